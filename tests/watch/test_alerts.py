"""Alerts: what reaches a webhook, what the log says, and that neither hurts the run."""

import json
import logging
import math
import socket
import threading

import pytest

from tests.watch.http_server import HttpServer
from trainer import logs
from trainer.watch import alerts as alerts_lib

GUARD_SECS = 30
OK = (200, {}, b"ok")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Back-off that does not make the tests wait."""
    monkeypatch.setattr(alerts_lib, "_FIRST_BACKOFF_SECS", 0.01)


def answering(*answers):
    """Gives the answers one after the other, the last for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def start(server: HttpServer) -> alerts_lib.Alerts:
    return alerts_lib.Alerts(f"http://{server.address}/hook/SECRET", "gs://bucket/run")


def test_an_alert_is_logged_and_posted_as_json(caplog):
    caplog.set_level(logging.INFO)
    with HttpServer(answering(OK)) as server:
        alerts = start(server)
        alerts.send("nonfinite", "loss is NaN", "ERROR", step=12, loss=math.nan, records=[("a", 1)], lr=0.5)
        alerts.close(GUARD_SECS)
    (request,) = server.requests
    sent = json.loads(request.body)
    assert request.method == "POST"
    assert request.headers["Content-Type"] == "application/json"
    assert sent.pop("host")
    assert sent.pop("time").endswith("+00:00")
    assert sent == {
        "event": "nonfinite",
        "severity": "ERROR",
        "message": "loss is NaN",
        "text": "[ERROR] gs://bucket/run: loss is NaN",
        "run": "gs://bucket/run",
        "step": 12,
        "loss": "nan",  # JSON has no NaN
        "records": [["a", 1]],
        "lr": 0.5,
    }
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("trainer.alerts", logging.ERROR, "nonfinite: loss is NaN")
    ]


def test_without_a_webhook_it_is_the_log(caplog):
    caplog.set_level(logging.INFO)
    alerts = alerts_lib.Alerts(None, "run")
    alerts.send("finished", "at https://example.com/SECRET", "INFO")
    alerts.close(GUARD_SECS)
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [(logs.RESULT, "finished: at https://example.com/...")]  # also of a run that is --quiet


def test_what_the_log_has_already_is_not_said_twice(caplog):
    with HttpServer(answering(OK)) as server:
        alerts = start(server)
        alerts.send("failed", "the last word", is_in_log=True)
        alerts.close(GUARD_SECS)
    assert json.loads(server.requests[0].body)["message"] == "the last word"
    assert "is_in_log" not in json.loads(server.requests[0].body)
    assert not caplog.records


def test_user_and_password_of_the_url_are_sent_as_such():
    with HttpServer(answering(OK)) as server:
        alerts = alerts_lib.Alerts(f"http://us%40er:pass@{server.address}/hook", "run")
        alerts.send("stall", "nothing moves")
        alerts.close(GUARD_SECS)
    (request,) = server.requests
    assert request.path == "/hook"
    assert request.headers["Authorization"] == "Basic dXNAZXI6cGFzcw=="  # us@er:pass


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_webhook_that_fails_is_tried_again(caplog, status):
    with HttpServer(answering((status, {}, b""), (status, {"Retry-After": "0"}, b""), OK)) as server:
        alerts = start(server)
        alerts.send("stall", "no progress")
        while len(server.requests) < 3:
            threading.Event().wait(0.01)
        alerts.close(GUARD_SECS)
    assert len({request.body for request in server.requests}) == 1
    assert "do not reach" not in caplog.text


def test_retry_after_is_honoured_and_closing_cuts_it_short():
    with HttpServer(answering((429, {"Retry-After": "50"}, b""), OK)) as server:
        alerts = start(server)
        alerts.send("stall", "no progress")
        while len(server.requests) < 1:
            threading.Event().wait(0.01)
        threading.Event().wait(0.2)
        assert len(server.requests) == 1  # the back-off of 0.01 s alone would be over
        alerts.close(GUARD_SECS)
        assert len(server.requests) == 2


def test_an_alert_that_is_refused_is_told_once_without_the_secret(caplog):
    with HttpServer(answering((404, {}, b""))) as server:
        alerts = start(server)
        alerts.send("stall", "first")
        alerts.send("stall", "second")
        alerts.close(GUARD_SECS)
    assert len(server.requests) == 2  # one each: no use in trying again
    (told,) = [record.getMessage() for record in caplog.records if "do not reach" in record.getMessage()]
    assert f"http://{server.address}/...: HTTP status 404" in told
    assert "SECRET" not in caplog.text


def test_an_unreachable_webhook_is_told_once_and_costs_nothing(caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alerts = alerts_lib.Alerts(f"http://127.0.0.1:{port}/SECRET", "run")
    for _ in range(3):
        alerts.send("stall", "no progress")
    alerts.close(GUARD_SECS)
    (told,) = [record.getMessage() for record in caplog.records if "do not reach" in record.getMessage()]
    assert "Connection refused" in told
    assert "SECRET" not in caplog.text


def test_a_webhook_that_hangs_holds_up_neither_the_run_nor_its_end(caplog):
    def hang(request):
        server.closed.wait(GUARD_SECS)
        return OK

    with HttpServer(hang) as server:
        alerts = start(server)
        for _ in range(3 * alerts_lib._QUEUE):  # more than wait for it
            alerts.send("stall", "no progress")
        alerts.close(0.2)
        assert len(server.requests) == 1
        alerts.send("finished", "after the end", "INFO")
    assert caplog.text.count("do not reach") == 1
    assert caplog.text.count("stall: no progress") == 3 * alerts_lib._QUEUE  # the log has them all


def test_an_alert_that_cannot_be_made_does_not_raise(caplog):
    class Bad:
        def __str__(self):
            raise RuntimeError("no text")

    with HttpServer(answering(OK)) as server:
        alerts = start(server)
        alerts.send("stall", "no progress", "FATAL")
        alerts.send("stall", "no progress", fact=Bad())
        alerts.close(GUARD_SECS)
    assert caplog.text.count("was not sent") == 2


def test_they_are_kept_whatever_the_webhook_does():
    def hang(request):
        server.closed.wait(GUARD_SECS)
        return OK

    kept = []
    with HttpServer(hang) as server:
        alerts = alerts_lib.Alerts(f"http://{server.address}/hook", "run", kept.append)
        for step in range(3):
            alerts.send("stall", "see https://example.com/SECRET", step=step)
        alerts.close(0.2)
    assert [(alert["event"], alert["step"]) for alert in kept] == [("stall", step) for step in range(3)]
    assert "SECRET" not in str(kept)


def test_a_storage_that_fails_is_told_once(caplog):
    def fail(alert):
        raise OSError("no space left")

    alerts = alerts_lib.Alerts(None, "run", fail)
    for _ in range(3):
        alerts.send("stall", "nothing moves")
    alerts.close(GUARD_SECS)
    assert caplog.text.count("cannot be kept: no space left") == 1


def test_the_newest_are_kept():
    text = None
    for step in range(alerts_lib._KEPT + 2):
        text = alerts_lib.added(text, {"step": step})
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert steps == list(range(2, alerts_lib._KEPT + 2))
