"""Alerts to people: through the log, and as a JSON POST to a webhook. Imports no TensorFlow.

`send` never blocks, never raises and never hurts the run: a thread delivers, from a bounded queue, with time-outs.
"""

import base64
import datetime
import http.client
import json
import logging
import math
import platform
import queue
import threading
import time
import typing
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from trainer import logs
from trainer.redact import redact

Severity = typing.Literal["INFO", "WARNING", "ERROR"]

_LEVELS = {"INFO": logs.RESULT, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_QUEUE = 100  # alerts that wait for a webhook that is slow; later ones are for the log alone
_TIMEOUT_SECS = 10.0  # for connecting and for each part of the answer
_TRIES = 6
_FIRST_BACKOFF_SECS = 1.0
_MAX_BACKOFF_SECS = 60.0  # also of what Retry-After asks for
_CLOSING_BACKOFF_SECS = 0.2  # the process is about to end
_TOO_MANY_REQUESTS = 429

_log = logging.getLogger("trainer.alerts")


class Alerts:
    """Sends alerts of one run."""

    def __init__(self, url: str | None, run: str):
        """Starts nothing where there is no webhook.

        Args:
          url: of the webhook, http or https, checked with `redact.check_alert_url`; None for the log alone.
          run: what tells this run from others: its model_dir.
        """
        self._url, self._headers = url, dict[str, str]()
        if url is not None:
            self._url, self._headers = _without_userinfo(url)
        self._run = run
        self._queue: queue.Queue[Mapping[str, typing.Any] | None] = queue.Queue(_QUEUE)
        self._closing = threading.Event()
        self._told_of_failure = False
        self._thread = threading.Thread(target=self._deliver_all, name="alerts", daemon=True)
        if url is not None:
            self._thread.start()

    def send(
        self, event: str, message: str, severity: Severity = "WARNING", *, is_in_log: bool = False, **facts: object
    ) -> None:
        """Logs and delivers one alert.

        Args:
          event: one word for machines: stall, nonfinite, preempted, slow_input, underflow, failing_saves, finished.
          message: one line for people.
          severity: as Cloud Logging names it.
          is_in_log: the message is there already, or will be: it is not said twice.
          **facts: further fields of the JSON, such as step=1200.
        """
        try:
            if not is_in_log:
                _log.log(_LEVELS[severity], "%s: %s", event, redact(message))
            if self._url is not None and not self._closing.is_set():
                self._queue.put_nowait(_payload(event, message, severity, self._run, facts))
        except queue.Full:
            self._tell_of_failure("too many alerts wait for it")
        except Exception as error:  # whatever is wrong with an alert, the run goes on
            _log.warning("The alert %r was not sent: %s", event, redact(str(error)))

    def close(self, timeout_secs: float) -> None:
        """Delivers what it can within `timeout_secs`; later alerts go to the log alone."""
        if self._url is None or self._closing.is_set():
            return
        self._closing.set()
        ends_at = time.monotonic() + timeout_secs
        try:
            self._queue.put(None, timeout=timeout_secs)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, ends_at - time.monotonic()))
        if self._thread.is_alive():
            self._tell_of_failure(f"no answer within {timeout_secs:g} s at the end of the run")

    def _deliver_all(self) -> None:
        while (payload := self._queue.get()) is not None:
            self._deliver(json.dumps(payload).encode())

    def _deliver(self, body: bytes) -> None:
        backoff = _FIRST_BACKOFF_SECS
        for attempt in range(1, _TRIES + 1):
            problem, wanted_secs = self._post(body)
            if problem is None:
                return
            if wanted_secs is None or attempt == _TRIES:
                return self._tell_of_failure(problem)
            # `close` cuts this short; from then on the tries follow one another quickly.
            self._closing.wait(min(max(backoff, wanted_secs), _MAX_BACKOFF_SECS))
            if self._closing.is_set():
                time.sleep(_CLOSING_BACKOFF_SECS)
            backoff *= 2

    def _post(self, body: bytes) -> tuple[str | None, float | None]:
        """What went wrong (None: delivered), and the seconds to wait at least before another try (None: no use)."""
        headers = {"Content-Type": "application/json", "User-Agent": "keras-tpu-trainer"} | self._headers
        try:
            request = urllib.request.Request(self._url or "", body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECS):
                return None, None
        except urllib.error.HTTPError as error:
            with error:
                retry = error.code == _TOO_MANY_REQUESTS or error.code >= http.client.INTERNAL_SERVER_ERROR
                return f"HTTP status {error.code}", _retry_after_secs(error.headers["Retry-After"]) if retry else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}", 0.0

    def _tell_of_failure(self, problem: str) -> None:
        if not self._told_of_failure:
            self._told_of_failure = True
            where = redact(f"--alert_url={self._url}")
            _log.warning("Alerts do not reach %s: %s. They are in the log; this is said once.", where, redact(problem))


def _without_userinfo(url: str) -> tuple[str, dict[str, str]]:
    """The URL and the header that user and password in it stand for: urllib would take them for a part of the host."""
    parts = urllib.parse.urlsplit(url)
    userinfo, at, address = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    credentials = base64.b64encode(urllib.parse.unquote_to_bytes(userinfo)).decode()
    return parts._replace(netloc=address).geturl(), {"Authorization": f"Basic {credentials}"}


def _payload(event: str, message: str, severity: str, run: str, facts: Mapping[str, object]) -> dict[str, typing.Any]:
    text = redact(message)
    return {
        **{name: _plain(value) for name, value in facts.items()},
        "event": event,
        "severity": severity,
        "message": text,
        "text": f"[{severity}] {run}: {text}",  # what Slack, Google Chat and Mattermost show
        "run": run,
        "host": platform.node(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _plain(value: object) -> object:
    """A value that JSON has: NaN, which an alert may well be about, is none."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return redact(str(value))


def _retry_after_secs(seconds: str | None) -> float:
    """What a server asks for, if in seconds: a date would need a clock that can be trusted."""
    return float(seconds) if seconds and seconds.isdecimal() else 0.0
