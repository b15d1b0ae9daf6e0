"""Where the time of a run goes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import keras

from trainer.callbacks import Progress

PARTS = ("start", "compile", "train", "input wait", "evaluate", "checkpoint", "export")


class Clock:
    """Seconds by part of a run.

    Args:
        started: `time.monotonic()` at the start of the process.
    """

    def __init__(self, started: float):
        self._started = started
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, part: str, seconds: float) -> None:
        """Counts `seconds` towards `part`."""
        self._seconds[part] += seconds

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Counts the time spent inside towards `part`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(part, time.monotonic() - begun)

    def start_is_over(self) -> None:
        """Counts everything until now as start-up."""
        self._seconds["start"] = time.monotonic() - self._started

    def seconds(self) -> dict[str, float]:
        """Seconds by part, and `other` for what no part claims; they sum to the age of the process."""
        age = time.monotonic() - self._started
        return {**self._seconds, "other": max(0.0, age - sum(self._seconds.values()))}


class LoopClock(keras.callbacks.Callback):
    """Counts training loops: the first, a single step, is compilation; the others train and wait for input."""

    def __init__(self, clock: Clock, progress: Progress):
        super().__init__()
        self._clock, self._progress = clock, progress
        self._first_step: int | None = None
        self._begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock of a loop."""
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it."""
        seconds = time.monotonic() - self._begun
        if self._first_step is None:
            self._first_step = self._progress.step
            self._clock.add("compile", seconds)
            return
        waited = min(self._progress.input_wait_secs, seconds)
        self._clock.add("train", seconds - waited)
        self._clock.add("input wait", waited)

    def steps_timed(self) -> int:
        """Steps behind the parts `train` and `input wait`: all but the first loop's."""
        return 0 if self._first_step is None else self._progress.step - self._first_step
