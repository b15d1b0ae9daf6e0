"""Values of a run by step, and few enough of them to draw. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.report.left import Left
from trainer.report.numbers import to_float

LOSS, LEARNING_RATE, GRADIENT_NORM, MEMORY = "loss", "learning_rate", "gradient_norm", "host_memory_mib"
SPEED = ("examples_per_sec", "tokens_per_sec", "step_ms", "input_wait_ms", MEMORY)
TRAIN, EVAL = "train", "eval"
# As `precision.NAMES` has them, which would take Keras to import; a test holds the two together.
PRECISION = ("gradient_underflow", "gradient_overflow", "loss_scale")
# A chart is a few hundred pixels wide: two points a pixel show all that it could.
_MOST_POINTS = 600
_OF_A_BUCKET = 3  # the least, the largest, and one that is not finite
_NOT_METRICS = (LEARNING_RATE, GRADIENT_NORM, *SPEED, *PRECISION)

Point = tuple[int, float]
Found = Mapping[str, Mapping[str, "Curve"]]  # metric -> TRAIN or EVAL


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values by step, in the order of their steps; NaN and infinity among them."""

    name: str
    points: tuple[Point, ...]

    @property
    def finite(self) -> list[float]:
        """The values that can be drawn."""
        return [value for _, value in self.points if math.isfinite(value)]


def curves(left: Left) -> Found:
    """Metric -> `train` or `eval` -> its curve, in the order in which a run writes them."""
    found: dict[tuple[str, str], list[Point]] = {}
    for record in left.records:
        _add(found, record, record)
    for evaluation in left.evaluations:
        values = {f"{EVAL}/{name}": value for name, value in evaluation.metrics.items()}
        _add(found, {"step": evaluation.step}, values)
    made: dict[str, dict[str, Curve]] = {}
    for (kind, name), points in found.items():
        made.setdefault(name, {})[kind] = Curve(kind, tuple(sorted(points, key=lambda point: point[0])))
    return made


def metric_names(found: Mapping[str, Any]) -> list[str]:
    """Those that say how good the model is: the loss first."""
    return sorted((name for name in found if name not in _NOT_METRICS), key=lambda name: name != LOSS)


def thinned(curve: Curve) -> Curve:
    """A curve of at most 600 points or so that looks the same: of each part of the steps the least and the largest
    value stay, and one that is not finite."""
    points = curve.points
    if len(points) <= _MOST_POINTS:
        return curve
    parts = _MOST_POINTS // _OF_A_BUCKET
    first, last = points[0][0], points[-1][0]
    width = (last - first) / parts or 1.0
    buckets: dict[int, list[Point]] = {}
    for point in points:
        buckets.setdefault(min(int((point[0] - first) / width), parts - 1), []).append(point)
    kept = {points[0], points[-1]}
    for bucket in buckets.values():
        finite = [point for point in bucket if math.isfinite(point[1])]
        if finite:
            kept |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept |= set([point for point in bucket if not math.isfinite(point[1])][:1])
    return Curve(curve.name, tuple(sorted(kept, key=lambda point: point[0])))


def best(points: Sequence[Point], goal: str) -> Point | None:
    """The best of some evaluations, as `best_goal` has it; None where none is finite."""
    finite = [point for point in points if math.isfinite(point[1])]
    sign = {"min": 1, "max": -1}[goal]
    return min(finite, key=lambda point: sign * point[1], default=None)


def _add(found: dict[tuple[str, str], list[Point]], of: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    step = to_float(of.get("step"))
    if step is None or not math.isfinite(step):
        return
    for key, value in values.items():
        kind, slash, name = key.partition("/")
        number = to_float(value)
        if slash and kind in (TRAIN, EVAL) and number is not None:
            found.setdefault((kind, name), []).append((int(step), number))
