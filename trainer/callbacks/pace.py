"""How far a run is and when it will be done, from how it has gone since this start."""

import time

from trainer.callbacks import Callback, Loop
from trainer.callbacks.clock import Clock
from trainer.plan import Plan
from trainer.progress import Progress

# Parts of the clock that steps take: what the host does between two calls among them.
_OF_STEPS = ("steps", "recomputed", "input_wait", "other")
_LOOK_SECS = 0.5
_HALF_LIFE_SECS = 300.0  # after which what was counts half: a run that gets slower says so, and one hiccup does not
_FORWARD_SHARE = 1 / 3  # of a step's time, for the evaluation before one was seen: the backward pass takes twice that


class Pace(Callback):
    """Estimates the time left, evaluations and checkpoints included; not the export.

    The first call of the loop, which compiles, and other starts of the run do not count. Comes behind the `LoopClock`.

    Args:
        plan: of the run.
        clock: of this process.
        start_step: that this process goes on from.
        evaluate_every_steps: None of a run that evaluates nothing.
    """

    def __init__(self, plan: Plan, clock: Clock, *, start_step: int, evaluate_every_steps: int | None):
        self._plan, self._clock, self._evaluate_every = plan, clock, evaluate_every_steps
        self._step, self._step_at = start_step, time.monotonic()
        self._loss: float | None = None
        self._seen: tuple[int, float] | None = None  # step and seconds of steps, when they were looked at last
        self._looked_at = 0.0
        self._steps, self._secs = 0.0, 0.0  # what is long ago counts less
        self._evaluated, self._evaluation_secs, self._evaluation_total = -1, 0.0, 0.0
        self._saves = 0

    def on_loop_end(self, loop: Loop) -> None:
        """Takes note of how far the run is, and now and then of how fast."""
        self._step, self._step_at, self._loss = loop.end, time.monotonic(), loop.logs.get("loss", self._loss)
        self._saves += self._plan.is_checkpoint(loop.end)
        if loop.first or self._step_at - self._looked_at >= _LOOK_SECS:
            self._looked_at = self._step_at
            self._look()

    def on_evaluation(self, step: int, metrics: object) -> None:
        """Takes note of how long it took. The first one compiles: the next one takes its place."""
        total = self._clock.seconds()["evaluation"]
        self._evaluation_secs, self._evaluation_total = total - self._evaluation_total, total
        self._evaluated, self._step_at = step, time.monotonic()

    def progress(self) -> Progress:
        """As of now. From any thread."""
        speed = self._steps / self._secs if self._secs else None
        left = None if speed is None else max(0.0, self._left(speed) - (time.monotonic() - self._step_at))
        return Progress(self._step, self._plan.train_steps, self._plan.steps_per_epoch, speed, left, self._loss)

    def _look(self) -> None:
        seconds = self._clock.seconds()
        spent = sum(seconds[part] for part in _OF_STEPS)
        if self._seen is not None:
            steps, secs = self._step - self._seen[0], spent - self._seen[1]
            fade = 0.5 ** (secs / _HALF_LIFE_SECS)
            self._steps, self._secs = self._steps * fade + steps, self._secs * fade + secs
        self._seen = (self._step, spent)

    def _left(self, steps_per_sec: float) -> float:
        """Seconds from the end of the last step."""
        plan, step = self._plan, self._step
        left = (plan.train_steps - step) / steps_per_sec
        if self._evaluate_every is not None:
            each = self._evaluation_secs or plan.eval_steps * _FORWARD_SHARE / steps_per_sec
            left += each * (self._due(self._evaluate_every) + self._is_evaluated_next())
        stall = self._clock.seconds()["checkpoint_stall"]
        return left + stall / max(1, self._saves) * self._due(plan.checkpoint_every_steps)

    def _due(self, every: int) -> int:
        """How often something is due after this step: every so many steps, and at the last."""
        last, step = self._plan.train_steps, self._step
        return last // every - step // every + (last % every > 0) if step < last else 0

    def _is_evaluated_next(self) -> bool:
        every, step = self._evaluate_every, self._step
        is_due = every is not None and step > 0 and (step % every == 0 or step == self._plan.train_steps)
        return is_due and self._evaluated < step
