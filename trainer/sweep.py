"""What a sweep of the learning rate found: losses by learning rate, and which rate they speak for. Pure.

The range test of Smith (arXiv:1506.01186, section 3.3): the learning rate rises from step to step while the model
trains, until the loss comes apart. The suggestion is a tenth of the rate at which the smoothed loss was least. At that
rate training is about to come apart, so it is an upper bound and no place to stay; and a minimum is read off levels,
which noise moves less than it moves slopes, by which the steepest point would be found.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

# The smoothed loss forgets at 1/e within this part of the steps that were asked for: about a third of a decade.
_SMOOTHED_OVER = 0.05
# Smoothed beyond so many times its least value, and half the way back to where it began, the loss has come apart.
_APART = 4.0
_MARGIN = 10.0
# A fall counts from so many standard deviations of the smoothed loss on: of a few hundred values of nothing but noise
# the least lies three to six below the mean of the first.
_NOISE = 8.0
DIVERGED, NOT_FINITE, COMPLETE = "diverged", "not finite", "complete"


@dataclasses.dataclass(frozen=True)
class Point:
    """One step: the loss of its batch before the weights change, and the global norm of its gradients."""

    learning_rate: float
    loss: float
    gradient_norm: float


@dataclasses.dataclass(frozen=True)
class Range:
    """The learning rates of a sweep: `low` at the first of `steps` steps, `high` at the last, by equal factors."""

    low: float
    high: float
    steps: int

    @property
    def window(self) -> int:
        """Steps within which the moving average of the loss forgets."""
        return math.ceil(_SMOOTHED_OVER * self.steps)

    @property
    def decay(self) -> float:
        """Of the moving average of the loss, a step."""
        return math.exp(-1 / self.window)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What was found.

    points: the steps done, at least one.
    ended: DIVERGED, NOT_FINITE or COMPLETE.
    """

    asked: Range
    points: tuple[Point, ...]
    ended: str

    @property
    def smoothed(self) -> list[float]:
        """The loss of each step, smoothed."""
        return smooth([point.loss for point in self.points], self.asked.decay)

    @property
    def least(self) -> int:
        """Index of the least smoothed loss, the first ones aside, which are means of a few."""
        smoothed = self.smoothed
        return min(range(min(self.asked.window, len(smoothed) - 1), len(smoothed)), key=smoothed.__getitem__)

    @property
    def suggestion(self) -> float | None:
        """Peak learning rate to train with; None where the losses speak for none."""
        return None if self.reason_against else self.points[self.least].learning_rate / _MARGIN

    @property
    def reason_against(self) -> str:
        """Why there is no suggestion, and what to do; "" where there is one."""
        if self._fall() <= _NOISE * self._noise():
            return (
                f"the loss never fell by more than it varies from batch to batch; --sweep_from={self.asked.low:g} may "
                "be too high, --sweep_steps too few, or the model learns nothing"
            )
        if self.ended == COMPLETE and self.least >= len(self.points) - self.asked.window:
            return f"the loss still fell at the end; raise --sweep_to={self.asked.high:g}"
        return ""

    def _fall(self) -> float:
        first = [point.loss for point in self.points[: self.asked.window]]
        return sum(first) / len(first) - self.smoothed[self.least]

    def _noise(self) -> float:
        """Standard deviation of the smoothed loss, from differences of neighbours, where trends count little."""
        losses = [point.loss for point in self.points[: self.least + 1]]
        squares = [(after - before) ** 2 for before, after in zip(losses, losses[1:], strict=False)]
        if not squares:
            return 0.0
        raw = math.sqrt(sum(squares) / len(squares) / 2)  # a difference has the variance of both
        decay = self.asked.decay
        return raw * math.sqrt((1 - decay) / (1 + decay))


def smooth(losses: Sequence[float], decay: float) -> list[float]:
    """Exponential moving average, corrected for its beginning at 0 as in Adam (arXiv:1412.6980, section 3)."""
    smoothed, mean = [], 0.0
    for step, loss in enumerate(losses, start=1):
        mean = decay * mean + (1 - decay) * loss
        smoothed.append(mean / (1 - decay**step))
    return smoothed


def has_diverged(smoothed: Sequence[float]) -> bool:
    """Whether the last of these losses has come apart: far above the least of them, and half the way back to the first.

    Half the way, because a loss near 0 is four times its least by noise alone.
    """
    least = min(smoothed)
    return smoothed[-1] - least > max((_APART - 1) * abs(least), (smoothed[0] - least) / 2)


def headline(sweep: Sweep) -> str:
    """The suggestion, or why there is none, in a line."""
    if sweep.suggestion is None:
        return f"no suggestion: {sweep.reason_against}"
    point = sweep.points[sweep.least]
    return (
        f"peak learning rate {sweep.suggestion:.2g}: a tenth of {point.learning_rate:.2g}, where the smoothed loss was "
        f"least ({sweep.smoothed[sweep.least]:.4g})"
    )


def extent(sweep: Sweep) -> str:
    """How far the sweep came."""
    asked, points = sweep.asked, sweep.points
    ends = {
        DIVERGED: "the loss came apart there",
        NOT_FINITE: "the step behind it was not finite",
        COMPLETE: "to the end",
    }
    return (
        f"{points[0].learning_rate:.2g} to {points[-1].learning_rate:.2g} in {len(points):,} of {asked.steps:,} steps: "
        f"{ends[sweep.ended]}"
    )


def rows(sweep: Sweep) -> list[list[str]]:
    """A table with a row for each half of a decade."""
    table = [["learning rate", "loss", "smoothed", "gradient norm"]]
    smoothed, due = sweep.smoothed, -math.inf
    for index, point in enumerate(sweep.points):
        exponent = math.log10(point.learning_rate)
        if exponent >= due or index == len(sweep.points) - 1:
            due = exponent + 0.5
            cells = (point.loss, smoothed[index], point.gradient_norm)
            table.append([f"{point.learning_rate:.1e}", *(f"{value:.4g}" for value in cells)])
    return table


def to_json(sweep: Sweep, circumstances: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, with what was trained."""
    steps = [
        {**dataclasses.asdict(point), "smoothed_loss": value}
        for point, value in zip(sweep.points, sweep.smoothed, strict=True)
    ]
    return {
        "suggestion": sweep.suggestion,
        "text": headline(sweep),
        "least": steps[sweep.least],
        "ended": sweep.ended,
        "asked": dataclasses.asdict(sweep.asked),
        **circumstances,
        "steps": steps,
    }
