"""Requests to stop a run: SIGTERM, SIGINT, and notices that others hand in. Imports no TensorFlow.

Python runs signal handlers in its main thread only, between two bytecodes: not while that thread sits in a loop of
TensorFlow's. So signals go through `signal.set_wakeup_fd`, which the C handler writes to at once, to a thread of ours.

    stops = stopping.install()                 # first thing in the process: from here on a request ends it at once
    with stops.deferred(grace_secs=25):        # training: a request is only noted, until the deadline
        while stops.reason is None: ...

Whatever ends the process here ends it with exit code 75, or that of a run that is `over`, through `os._exit`, since the
main thread may not be able to.
Time is monotonic throughout. One thing defeats it: C++ that keeps Python's global lock (as MultiWorkerMirroredStrategy
does while it waits for its peers) holds up every thread of Python, ours too.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from trainer import logs
from trainer.errors import EXIT_RETRY

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_CLEAN_UP_SECS = 5.0  # before training nothing presses: long enough to give up a lease on gs://
_AT_ONCE_SECS = 1.0  # after a second SIGINT somebody waits for the prompt
_MARGIN = 0.2  # of the grace: for clean-ups, and for the process to die
_MAX_MARGIN_SECS = 2.0


class Stops:
    """Whether this process has been asked to stop, and the end of it if it does not. Made by `install`.

    Attributes:
      reason: what asked first ("SIGTERM", "SIGINT", "preemption notice"), None before; the loop polls it.
      saved_step: step of the last complete checkpoint, for the message at the deadline; set by the caller.
      when: what a stop interrupts outside of training ("before training began"), for the message; set by the caller.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.saved_step: int | None = None
        self.when = "before training began"
        self._lock = threading.Lock()
        self._deferred = False
        self._grace_secs = 0.0
        self._on_request: Callable[[str], None] | None = None
        self._deadline: float | None = None
        self._requested = threading.Event()
        self._leaving = threading.Event()
        self._interrupted = False
        self._profile = threading.Event()
        self._exit_code: int | None = None
        self._clean_ups: list[Callable[[str], None]] = []

    @contextlib.contextmanager
    def deferred(self, grace_secs: float, on_request: Callable[[str], None] | None = None) -> Iterator[None]:
        """While this lasts, a request is noted in `reason` and the process has `grace_secs` from then on to end itself.

        The deadline goes on after the block: what follows a stopped training is part of the grace.

        Args:
          grace_secs: seconds from the first request to the end of the process, clean-ups included.
          on_request: called with the reason in a thread of its own, so that it cannot hold up anything.
        """
        with self._lock:
            self._grace_secs, self._on_request = grace_secs, on_request
            self._deferred = True
        try:
            yield
        finally:
            with self._lock:
                self._deferred = False
                self.when = "after training"

    def over(self, exit_code: int) -> None:
        """Says that it stands written how the run has ended: whatever ends the process now, its exit code is this one.

        A request is noted as while training, for what still follows (the report): who is told that a run has finished,
        or cannot, must not begin it again.
        """
        with self._lock:
            if self._exit_code is None:
                self._exit_code, self._on_request = exit_code, None

    def request(self, reason: str) -> None:
        """Asks for a stop; a second request changes nothing. Outside of `deferred`, and before `over`, it does not
        return."""
        with self._lock:
            if self.reason is not None:
                return
            self._deadline = time.monotonic() + self._grace_secs - self._margin_secs
            self.reason = reason
            noted, notify = self._deferred or self._exit_code is not None, self._on_request
        if not noted:
            self._leave(f"stopped by {reason} {self.when}; run again", _CLEAN_UP_SECS)
        self._requested.set()
        if notify:
            with contextlib.suppress(RuntimeError):  # no more threads: the stop matters more
                threading.Thread(target=notify, args=(reason,), name="stop-requested", daemon=True).start()

    def end(self, message: str) -> None:
        """Ends the process with exit code 75 where it can neither go on nor save; does not return."""
        self._leave(message, _CLEAN_UP_SECS)

    def remaining_secs(self) -> float | None:
        """Seconds until the process is ended; None without a request."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def take_profile_request(self) -> bool:
        """Whether SIGUSR1 has asked for a profile since the last call."""
        asked = self._profile.is_set()
        self._profile.clear()
        return asked

    def on_exit(self, clean_up: Callable[[str], None]) -> None:
        """Adds what is called with the reason before the process is ended from here; the last added first.

        Together they have a few seconds before training, within the grace a fraction of it, and then are left behind.
        """
        self._clean_ups.insert(0, clean_up)

    def settle(self) -> None:
        """Does not return once the process is being ended from here: what fails meanwhile may fail over a clean-up."""
        if self._leaving.is_set():
            threading.Event().wait()

    @property
    def _margin_secs(self) -> float:
        return min(_MAX_MARGIN_SECS, _MARGIN * self._grace_secs)

    def _listen(self, wakeups: socket.socket) -> None:
        while number := wakeups.recv(1):
            if number[0] == signal.SIGUSR1:
                self._profile.set()
            elif number[0] == signal.SIGINT and self._interrupted:
                self._leave(f"stopped at once by a second SIGINT; {self._lost()}", _AT_ONCE_SECS)
            elif number[0] in (signal.SIGINT, signal.SIGTERM):
                self._interrupted |= number[0] == signal.SIGINT
                self.request(signal.Signals(number[0]).name)

    def _enforce_deadline(self) -> None:
        self._requested.wait()
        while remaining := self.remaining_secs():
            time.sleep(remaining)
        unfinished = "the loop in flight and its checkpoint" if self._deferred else "what follows training"
        message = f"{unfinished} did not end within --grace_secs={self._grace_secs:g} of {self.reason}; {self._lost()}"
        self._leave(message, self._margin_secs / 2)

    def _lost(self) -> str:
        if self.saved_step is None:
            return "there is no checkpoint yet: the run will begin again"
        return f"what was done since the checkpoint of step {self.saved_step} will be done again"

    def _leave(self, message: str, limit_secs: float) -> None:
        """Says why, cleans up as far as the time allows, and ends the process, whatever the other threads do."""
        self._leaving.set()
        try:
            reason = self.reason or message
            ends_at = time.monotonic() + limit_secs
            if self._exit_code is None:
                _bounded(lambda: logs.write_last_words(message, EXIT_RETRY), ends_at)
            for clean_up in list(self._clean_ups):
                _bounded(lambda clean_up=clean_up: clean_up(reason), ends_at)  # type: ignore[misc]
        finally:
            os._exit(EXIT_RETRY if self._exit_code is None else self._exit_code)


def install() -> Stops:
    """Takes over SIGTERM, SIGINT and SIGUSR1. Call once, in the main thread, before anything that takes time."""
    stops = Stops()
    wakeups, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        # Python writes to the descriptor only for signals that have a handler in Python, and this one must not raise.
        signal.signal(number, _do_nothing)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_let_go)
    threading.Thread(target=stops._listen, args=(wakeups,), name="signals", daemon=True).start()
    threading.Thread(target=stops._enforce_deadline, name="grace", daemon=True).start()
    return stops


def _do_nothing(number: int, frame: object) -> None:
    pass


def _hold_back() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _let_go() -> None:
    # A forked child has no thread that listens, and what its handlers wrote to the descriptor would stop its parent.
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _let_through()


def _bounded(work: Callable[[], object], ends_at: float) -> None:
    """Does some work in a thread that is left behind at `ends_at` (monotonic); its errors are nobody's any more."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, name="stopping", daemon=True)
    thread.start()
    thread.join(max(0.0, ends_at - time.monotonic()))
