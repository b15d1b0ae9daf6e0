"""Where the time of this process goes."""

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator

from trainer.callbacks import Callback, Loop

PARTS = (
    "start_up",
    "connecting",
    "compiling",
    "steps",
    "recomputed",
    "input_wait",
    "evaluation",
    "checkpoint_stall",
    "export",
    "waiting",
    "other",
)

# What is being done while a part runs, for people; of the others the mode says it.
DOING = {
    "start_up": "starting",
    "connecting": "connecting",
    "compiling": "compiling the first step",
    "evaluation": "evaluating",
    "checkpoint_stall": "saving",
    "export": "exporting",
    "waiting": "waiting",
}

_MOST_POINTS = 4096


class Clock:
    """Seconds by part; at any moment exactly one part runs, so they sum to the age of the process.

    A part begun within another interrupts it: what is measured inside counts once, for the inner one. Parts begin and
    end on the main thread; any thread may read.

    Args:
        started: `time.monotonic()` at the start of the process.
    """

    def __init__(self, started: float):
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["start_up"]
        self._counted = self._since = started  # everything before is in _seconds; when the open part began to run
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Counts the time spent inside towards `part`."""
        depth = self.begin(part)
        try:
            yield
        finally:
            self.end(depth)

    def begin(self, part: str) -> int:
        """Lets `part` run from now on; the answer is for `end`."""
        if part not in PARTS:
            raise KeyError(f"a run has no part {part!r}; there are {', '.join(PARTS)}")
        with self._lock:
            self._count()
            self._open.append(part)
            self._since = self._counted
            return len(self._open) - 1

    def end(self, depth: int) -> None:
        """Ends what `begin` began, and what is still open inside of it because an error left it."""
        with self._lock:
            self._count()
            del self._open[depth:]
            self._since = self._counted

    def start_is_over(self) -> None:
        """From now on what no part claims is `other` rather than start-up."""
        with self._lock:
            self._count()
            self._open[0] = "other"
            self._since = self._counted

    def current(self) -> tuple[str, float]:
        """The part that runs now, and for how many seconds without a break."""
        with self._lock:
            return self._open[-1], time.monotonic() - self._since

    def move(self, seconds: float, source: str, target: str) -> float:
        """Counts `seconds` of `source`, or what it has, towards `target` instead; returns how many."""
        with self._lock:
            self._count()
            moved = max(0.0, min(seconds, self._seconds[source]))
            self._seconds[source] -= moved
            self._seconds[target] += moved
            return moved

    def seconds(self) -> dict[str, float]:
        """Seconds by part until now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self._open[-1]] += now - self._counted
        self._counted = now


class LoopClock(Callback):
    """Counts train loops: the first compiles; the others do steps, recompute steps that were lost, wait for input.

    Args:
        clock: gets the seconds.
        start_step: step that this process goes on from.
        reached_before: highest step that an earlier start of the run is known to have reached; steps up to there were
            counted by it and lost with it, and are recomputed.
    """

    def __init__(self, clock: Clock, *, start_step: int, reached_before: int):
        self._clock, self._reached_before = clock, reached_before
        self.reached_step = start_step
        self._depth: int | None = None
        self._first = True
        self._timed_steps, self._timed_secs = 0, 0.0
        # Seconds of steps that count, as a curve over steps, for the steps that a rollback takes back.
        self._curve = [(start_step, 0.0)]

    def on_loop_begin(self, step: int) -> None:
        """Starts the clock of a loop; with the first one the start-up is over."""
        if self._first:
            self._clock.start_is_over()
        self._depth = self._clock.begin("compiling" if self._first else "steps")

    def on_loop_end(self, loop: Loop) -> None:
        """Stops it, and tells steps from waiting."""
        self._close()
        self.reached_step = loop.end
        if self._first:
            self._first = False
            self._add_to_curve(loop.end, 0.0)
            return
        self._timed_steps += loop.end - loop.begin
        self._timed_secs += loop.seconds
        waited = self._clock.move(min(loop.input_wait_secs, loop.seconds), "steps", "input_wait")
        busy = loop.seconds - waited
        done_before = min(max(self._reached_before - loop.begin, 0), loop.end - loop.begin) / (loop.end - loop.begin)
        again = self._clock.move(busy * done_before, "steps", "recomputed")
        self._add_to_curve(loop.end, busy - again)

    def on_rollback(self, begin: int, end: int) -> None:
        """Counts what was undone as recomputed."""
        at_end = self._curve[-1][1]
        kept = self._curve_at(begin)
        self._clock.move(at_end - kept, "steps", "recomputed")
        self._curve = [point for point in self._curve if point[0] < begin] + [(begin, kept), (end, kept)]

    def on_end(self) -> None:
        """Stops the clock of a loop that an error left."""
        self._close()

    def steps_per_sec(self) -> float | None:
        """Of all loops but the first, with their waiting for input; None before there are any."""
        return self._timed_steps / self._timed_secs if self._timed_secs else None

    def _close(self) -> None:
        if self._depth is not None:
            self._clock.end(self._depth)
            self._depth = None

    def _add_to_curve(self, step: int, seconds: float) -> None:
        self._curve.append((step, self._curve[-1][1] + seconds))
        if len(self._curve) > _MOST_POINTS:  # between points it is taken for straight, so every second one will do
            self._curve = [*self._curve[:-1:2], self._curve[-1]]

    def _curve_at(self, step: int) -> float:
        """Seconds of steps that count up to `step`."""
        after = bisect.bisect_left(self._curve, step, key=lambda point: point[0])
        if after == 0:
            return self._curve[0][1]
        if after == len(self._curve):
            return self._curve[-1][1]
        (left, low), (right, high) = self._curve[after - 1], self._curve[after]
        return low + (high - low) * (step - left) / (right - left)
