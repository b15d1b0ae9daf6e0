"""A run that makes no progress: shows where every thread of Python stands, and ends it for another try."""

import contextlib
import datetime
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from trainer import logs
from trainer.errors import EXIT_RETRY

_LAST_WORDS_SECS = 10.0  # for the file and for `on_stall`, each: what they need may be what hangs
_MAX_TICK_SECS = 1.0
_PATIENCE = 10

_log = logging.getLogger(__name__)


class StallWatch:
    """Ends the process with exit code 75 when `beat` has not been called for too long.

    Works while the main thread sits in TensorFlow's C++. Counts only time in which this process could run: a machine
    that was suspended, a process that was stopped and a clock that jumped are no stalls.
    """

    def __init__(self, stall_secs: float | None, on_stall: Callable[[str], None], model_dir: str | None = None):
        """Watches nothing until `start`.

        Args:
          stall_secs: without a beat; None never ends anything.
          on_stall: called with the message before the end, in a thread of its own that gets 10 s.
          model_dir: where `stall-<UTC>.txt` with the stacks goes, local or gs://; None for standard error alone.
        """
        self._stall_secs = stall_secs
        self._on_stall = on_stall
        self._model_dir = model_dir
        self._idle_secs = 0.0
        self._patience = 1
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to count."""
        if self._stall_secs is not None:
            threading.Thread(target=self._watch, name="stall", daemon=True).start()

    def beat(self) -> None:
        """Says that there was progress."""
        self._idle_secs = 0.0

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Waits ten times as long while something runs that gives no sign of life, like the first compilation."""
        self._patience = _PATIENCE
        try:
            yield
        finally:
            self.beat()
            self._patience = 1

    def stop(self) -> None:
        """Ends the watch for good."""
        self._stopped.set()

    def _watch(self) -> None:
        limit = self._stall_secs or 0.0
        tick = min(_MAX_TICK_SECS, limit / 4)
        before = time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            # A tick that took longer is one in which nobody ran, the main thread no more than this one.
            self._idle_secs += min(now - before, 2 * tick)
            before = now
            if self._idle_secs >= limit * self._patience:
                self._end(limit)

    def _end(self, limit: float) -> None:
        message = f"no progress for --stall_secs={limit:g}; run again (exit code {EXIT_RETRY})"
        try:
            stacks = _stacks()
            path = self._bounded(lambda: self._write(stacks))
            message += f". Stacks of all threads: {path or 'on standard error'}"
            self._bounded(lambda: logs.write_last_words(message, EXIT_RETRY, stack=stacks))
            self._bounded(lambda: self._on_stall(message))
        finally:
            os._exit(EXIT_RETRY)

    def _write(self, stacks: str) -> str | None:
        if self._model_dir is None:
            return None
        now = datetime.datetime.now(datetime.UTC)  # in the name only
        path = f"{self._model_dir.rstrip('/')}/stall-{now:%Y%m%dT%H%M%SZ}.txt"
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(stacks)
        return path

    def _bounded(self, work: Callable[[], object]) -> object:
        """What `work` returns, None where it fails or takes too long."""
        results: list[object] = []

        def quietly() -> None:
            try:
                results.append(work())
            except Exception as error:
                _log.warning("At the end of a stalled run: %s", error)

        thread = threading.Thread(target=quietly, name="stalled", daemon=True)
        thread.start()
        thread.join(_LAST_WORDS_SECS)
        return results[0] if results else None


def _stacks() -> str:
    """Stacks of all threads of Python; in memory, because the disk may be what is full or hangs."""
    with open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
