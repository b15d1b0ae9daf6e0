"""A limit for work that may never return, TensorFlow's gRPC above all."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trainer.errors import RetryError

_T = TypeVar("_T")


class Watchdog:
    """Runs work in a thread and gives up on it at a deadline.

    Attributes:
        timeout_secs: seconds that the work has.
        waiting_for: what the work says that it is about to wait for; named when it is given up.
    """

    def __init__(self, timeout_secs: float):
        self.timeout_secs = timeout_secs
        self.waiting_for = ""
        self._started = time.monotonic()
        self._given_up = threading.Event()

    @property
    def elapsed_secs(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started

    def run(self, work: Callable[[], _T]) -> _T:
        """Returns or raises what `work` does; RetryError with `waiting_for` when the deadline comes first."""
        outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def report() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=report, name="connect", daemon=True).start()
        if not concurrent.futures.wait([outcome], timeout=self.timeout_secs).done:
            self._given_up.set()
            raise RetryError(
                f"Gave up after {self.timeout_secs:g} s of waiting for {self.waiting_for}. "
                "Check that it is up and reachable and run again, or wait longer with --connect_timeout_secs."
            )
        return outcome.result()

    def pause(self, secs: float) -> None:
        """For the work, between two looks: sleeps.

        Raises:
            RetryError: it has been given up, so that nobody would hear of another look.
        """
        if self._given_up.wait(secs):
            raise RetryError("given up at the deadline")
