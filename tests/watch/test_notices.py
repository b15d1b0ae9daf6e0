"""Notices of the metadata server: a real one on loopback, which keeps its promises or does not."""

import queue
import threading
import urllib.parse

import pytest

from tests.watch.http_server import HttpServer, Request
from trainer.watch import notices

GUARD_SECS = 30
NONE = {"preempted": "FALSE", "maintenance-event": "NONE"}


class Metadata:
    """Answers as Google's metadata server does: values with ETags, and long polls."""

    def __init__(self):
        self.values = dict(NONE)
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def __call__(self, request: Request):
        if request.headers["Metadata-Flavor"] != "Google":
            return 403, {}, b""
        url = urllib.parse.urlsplit(request.path)
        key = url.path.removeprefix("/computeMetadata/v1/instance/")
        query = dict(urllib.parse.parse_qsl(url.query))
        if key not in self.values:
            return 404, {}, b""
        with self.changed:
            if "wait_for_change" in query:
                self.changed.wait_for(lambda: etag(self.values[key]) != query["last_etag"], int(query["timeout_sec"]))
            return 200, {"ETag": etag(self.values[key])}, self.values[key].encode() + b"\n"


def etag(value: str) -> str:
    return f"e{hash(value)}"


@pytest.fixture
def fast(monkeypatch):
    """Back-off and time-outs that do not make the tests wait; the lengths of waits are no part of what is tested."""
    monkeypatch.setattr(notices, "_MIN_INTERVAL_SECS", 0.01)
    monkeypatch.setattr(notices, "_MAX_BACKOFF_SECS", 0.05)
    monkeypatch.setattr(notices, "_PATIENCE_SECS", 0.2)


def started(server: HttpServer) -> queue.Queue:
    """Starts the watch on a server; the notices come through the queue."""
    noticed: queue.Queue = queue.Queue()
    assert notices.start(noticed.put, {"GCE_METADATA_HOST": server.address}, "/no/such/file")
    return noticed


def wait_until(condition) -> None:
    while not condition():
        threading.Event().wait(0.01)


def wait_for_long_polls(server: HttpServer) -> None:
    """Returns once both keys have been read and are being waited on."""
    wait_until(lambda: sum("wait_for_change=true" in request.path for request in list(server.requests)) >= 2)


@pytest.mark.parametrize(
    ("key", "value", "notice"),
    [
        ("preempted", "TRUE", "preemption notice"),
        (
            "maintenance-event",
            "TERMINATE_ON_HOST_MAINTENANCE",
            "maintenance notice TERMINATE_ON_HOST_MAINTENANCE",
        ),
    ],
)
def test_a_notice_arrives_when_the_value_changes(fast, monkeypatch, key, value, notice):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of another machine, if of any: not to be asked
    metadata = Metadata()
    with HttpServer(metadata) as server:
        noticed = started(server)
        wait_for_long_polls(server)
        metadata.set(key, value)
        assert noticed.get(timeout=GUARD_SECS) == notice


def test_a_migration_is_no_reason_to_stop(fast):
    metadata = Metadata()
    with HttpServer(metadata) as server:
        noticed = started(server)
        wait_for_long_polls(server)
        metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        seen = f"last_etag={etag('MIGRATE_ON_HOST_MAINTENANCE')}"
        wait_until(lambda: any(seen in request.path for request in list(server.requests)))
        assert noticed.empty()
        metadata.set("preempted", "TRUE")
        assert noticed.get(timeout=GUARD_SECS) == notices.PREEMPTION


def test_a_preemption_that_stands_at_the_start_stops_and_a_maintenance_does_not(fast):
    # The first leaves seconds. The second can stand for an hour, in which a supervised run would stop again and again.
    metadata = Metadata()
    metadata.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    with HttpServer(metadata) as server:
        noticed = started(server)
        wait_for_long_polls(server)
        assert noticed.empty()
    metadata = Metadata()
    metadata.values["preempted"] = "TRUE"
    with HttpServer(metadata) as server:
        assert started(server).get(timeout=GUARD_SECS) == notices.PREEMPTION


@pytest.mark.parametrize(
    "bad",
    [
        lambda request, server: (404, {}, b"TRUE"),
        lambda request, server: (503, {}, b"TERMINATE_ON_HOST_MAINTENANCE"),
        lambda request, server: (200, {}, b"<html>TRUE</html>"),
        lambda request, server: (200, {}, b"\xff\xfe" * 1000),
        lambda request, server: (server.closed.wait(GUARD_SECS), (200, {}, b""))[1],  # silent
    ],
    ids=["404", "503", "html", "binary", "silent"],
)
def test_a_server_that_fails_hurts_nothing_and_is_asked_again(fast, monkeypatch, bad):
    # A silent server is given up on by the time-out of the socket: of the long poll, too.
    monkeypatch.setattr(notices, "_POLL_SECS", 0.2)
    metadata = Metadata()
    metadata.values["preempted"] = "TRUE"
    well = threading.Event()

    def answer(request):
        return metadata(request) if well.is_set() else bad(request, server)

    with HttpServer(answer) as server:
        noticed = started(server)
        wait_until(lambda: len(server.requests) >= 6)
        assert noticed.empty()
        well.set()
        assert noticed.get(timeout=GUARD_SECS) == notices.PREEMPTION


def test_a_server_that_does_not_wait_is_not_asked_without_a_pause(monkeypatch):
    monkeypatch.setattr(notices, "_MIN_INTERVAL_SECS", 1000)
    with HttpServer(lambda request: (200, {}, b"FALSE")) as server:
        noticed = started(server)
        wait_until(lambda: len(server.requests) >= 2)  # one a key
        threading.Event().wait(0.2)
        assert len(server.requests) == 2
        assert noticed.empty()


@pytest.mark.parametrize(
    ("product", "on_gce"), [("Google Compute Engine\n", True), ("Google\n", True), ("KVM\n", False)]
)
def test_the_server_is_asked_on_google_compute_engine_only(tmp_path, monkeypatch, product, on_gce):
    monkeypatch.setattr(notices, "_watch", lambda *arguments: None)  # there is no such server here
    file = tmp_path / "product_name"
    file.write_text(product)
    assert notices.start(print, {}, str(file)) == on_gce
    assert not notices.start(print, {}, str(tmp_path / "missing"))
