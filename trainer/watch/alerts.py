"""Alerts to people: through the log, as a JSON POST to a webhook, and for the run's report. Imports no TensorFlow.

`send` never blocks, never raises and never hurts the run: threads deliver, from bounded queues, with time-outs.
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
from collections.abc import Callable, Mapping

from trainer import logs
from trainer.redact import redact

Severity = typing.Literal["INFO", "WARNING", "ERROR"]

_LEVELS = {"INFO": logs.RESULT, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_QUEUE = 100  # alerts that wait for a webhook or a storage that is slow; later ones are for the log alone
_KEPT = 1000  # lines of alerts.jsonl, which is written whole each time
_TIMEOUT_SECS = 10.0  # for connecting and for each part of the answer
_TRIES = 6
_FIRST_BACKOFF_SECS = 1.0
_MAX_BACKOFF_SECS = 60.0  # also of what Retry-After asks for
_CLOSING_BACKOFF_SECS = 0.2  # the process is about to end
_TOO_MANY_REQUESTS = 429

Payload = Mapping[str, typing.Any]

_log = logging.getLogger("trainer.alerts")


class Alerts:
    """Sends alerts of one run."""

    def __init__(self, url: str | None, run: str, keep: Callable[[Payload], None] | None = None):
        """Starts nothing where nobody but the log wants them.

        Args:
          url: of the webhook, http or https, checked with `redact.check_alert_url`; None for none.
          run: what tells this run from others: its model_dir.
          keep: writes an alert down, in a thread of its own; what it raises is a warning, once.
        """
        self._url, self._headers = url, dict[str, str]()
        if url is not None:
            self._url, self._headers = _without_userinfo(url)
        self._run, self._keep = run, keep
        self._closing = threading.Event()
        self._told_of_failure = self._told_of_loss = False
        self._webhook = _Courier("alerts", self._deliver, self._tell_of_failure) if url is not None else None
        self._file = _Courier("alerts-kept", self._write, self._tell_of_loss) if keep is not None else None

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
            payload = _payload(event, message, severity, self._run, facts)
            for courier in self._couriers():
                courier.take(payload)
        except Exception as error:  # whatever is wrong with an alert, the run goes on
            _log.warning("The alert %r was not sent: %s", event, redact(str(error)))

    def close(self, timeout_secs: float) -> None:
        """Delivers what it can within `timeout_secs`; later alerts go to the log alone."""
        couriers = self._couriers()
        self._closing.set()
        ends_at = time.monotonic() + timeout_secs
        for courier in couriers:
            courier.close(ends_at, f"no answer within {timeout_secs:g} s at the end of the run")

    def _couriers(self) -> list["_Courier"]:
        """Those that still take alerts. The quick one first: at the end they share the time."""
        if self._closing.is_set():
            return []
        return [courier for courier in (self._file, self._webhook) if courier is not None]

    def _write(self, payload: Payload) -> None:
        try:
            if self._keep is not None:
                self._keep(payload)
        except Exception as error:  # whatever the storage says, the run goes on
            self._tell_of_loss(str(error))

    def _deliver(self, payload: Payload) -> None:
        body = json.dumps(payload).encode()
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

    def _tell_of_loss(self, problem: str) -> None:
        if not self._told_of_loss:
            self._told_of_loss = True
            _log.warning("Alerts cannot be kept: %s. They are in the log; this is said once.", redact(problem))


class _Courier:
    """Hands one alert after another to who delivers it, in a thread of its own, so that who sends need not wait."""

    def __init__(self, name: str, deliver: Callable[[Payload], None], tell_of_failure: Callable[[str], None]):
        self._deliver, self._tell_of_failure = deliver, tell_of_failure
        self._queue: queue.Queue[Payload | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._deliver_all, name=name, daemon=True)
        self._thread.start()

    def take(self, payload: Payload) -> None:
        try:
            self._queue.put_nowait(payload)
        except queue.Full:
            self._tell_of_failure("too many wait")

    def close(self, ends_at: float, problem: str) -> None:
        """Delivers what there is until `ends_at` (monotonic); `problem` is what to tell if that is not enough."""
        try:
            self._queue.put(None, timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, ends_at - time.monotonic()))
        if self._thread.is_alive():
            self._tell_of_failure(problem)

    def _deliver_all(self) -> None:
        while (payload := self._queue.get()) is not None:
            self._deliver(payload)


def added(text: str | None, alert: Payload) -> str:
    """The text of `alerts.jsonl`, a JSON object a line, with one more; of what stands there the newest stay.

    Args:
      text: what stands there; None of a file that is not there.
      alert: as a webhook gets it.
    """
    lines = [line for line in (text or "").splitlines() if line][-(_KEPT - 1) :]
    return "".join(f"{line}\n" for line in [*lines, json.dumps(alert)])


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
