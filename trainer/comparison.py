"""What two runs of the same model have in common, and by how much they differ beyond rounding. Pure.

Two runs that compute the same differ in the last digits, by how much depends on model and optimizer: Adam makes a step
of full size of a gradient that is nothing but rounding. So that is measured: a *nudged* run begins with weights whose
last bit is changed, and what differs by more than a few times what that one differs by is no rounding.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

LOSS, GRADIENTS, METRICS, WEIGHTS, STATE, EVALUATION = KINDS = (
    "loss",
    "gradients",
    "metrics",
    "weights",
    "state",
    "evaluation",
)
# How far apart, relative to its size, counts as the same whatever the nudged run says.
TOLERANCE = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}
# How many times further apart than the nudged run, which is one draw of something random.
_NUDGES = 10.0
# A gradient is seen next to those of all variables: one that is this much smaller does not move the model.
_SMALL_GRADIENT = 1e-4
# To what a float32 weight is rounded, relative to it.
_ROUNDING = 2.0**-23
_SMALL = 1e-8

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run after some steps.

    logs: loss and metrics since the start. gradients: of the global batch in the last step, before clipping, by
    variable. weights, state: what is and what is not trainable, by variable.
    """

    logs: Mapping[str, float]
    gradients: Arrays
    weights: Arrays
    state: Arrays


@dataclasses.dataclass(frozen=True)
class Observed:
    """A run: its weights at the start, itself after one and after all steps, and an evaluation.

    All are evaluated with the same weights, the final ones of the first that was observed.
    """

    start: Arrays
    first: Snapshot
    last: Snapshot
    evaluation: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity of two runs.

    step: steps done, 1 or all. value: relative to its size; infinite where only one has it, or only one is finite.
    allowed: what rounding explains. ratio: of the second run to the first, for numbers.
    """

    kind: str
    name: str
    step: int
    value: float
    allowed: float
    ratio: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether rounding explains it."""
        return self.value <= self.allowed

    @property
    def counts(self) -> bool:
        """Whether it is judged: of later steps not what one example more or less changes by a jump."""
        return self.step == 1 or self.kind in (LOSS, WEIGHTS, STATE, EVALUATION)


def compare(one: Observed, nudged: Observed, other: Observed, *, steps: int, precision: str) -> list[Difference]:
    """Every quantity of `one` and `other` after the first and after all `steps`, and of their evaluation."""
    left, near, right = (_flat(observed, steps) for observed in (one, nudged, other))
    found = []
    for key in sorted(left.keys() | right.keys(), key=lambda key: (key[2], KINDS.index(key[0]), key[1])):
        kind, name, step = key
        floor = _floor(kind, name, one, one.first if step == 1 else one.last, TOLERANCE[precision])
        value, noise = (_distance(left.get(key), those.get(key), floor) for those in (right, near))
        allowed = max(TOLERANCE[precision], _NUDGES * noise if math.isfinite(noise) else 0.0)
        found.append(Difference(kind, name, step, value, allowed, _ratio(left.get(key), right.get(key))))
    return found


def apart(differences: Iterable[Difference], *kinds: str, step: int | None = None) -> list[Difference]:
    """What counts and is not rounding; of some kinds and of one step only, where given."""
    return [
        difference
        for difference in differences
        if difference.counts
        and not difference.agrees
        and (not kinds or difference.kind in kinds)
        and step in (None, difference.step)
    ]


def relative(left: np.ndarray, right: np.ndarray) -> float:
    """Norm of the difference of two arrays, next to their own."""
    return _distance(left, right, _SMALL)


def _flat(observed: Observed, steps: int) -> dict[tuple[str, str, int], np.ndarray]:
    flat = {(EVALUATION, name, steps): np.asarray(value) for name, value in observed.evaluation.items()}
    for step, snapshot in ((1, observed.first), (steps, observed.last)):
        for name, value in snapshot.logs.items():
            flat[LOSS if name == LOSS else METRICS, name, step] = np.asarray(value)
        flat |= {(GRADIENTS, name, step): array for name, array in snapshot.gradients.items()}
        # A small learning rate moves weights by less than any tolerance: what is compared is the way they went.
        flat |= {(WEIGHTS, name, step): array - observed.start[name] for name, array in snapshot.weights.items()}
        flat |= {(STATE, name, step): array for name, array in snapshot.state.items()}
    return flat


def _floor(kind: str, name: str, one: Observed, snapshot: Snapshot, tolerance: float) -> float:
    """Size below which a quantity counts as nothing."""
    if kind == GRADIENTS:
        return max(_SMALL, _SMALL_GRADIENT * math.hypot(*map(_norm, snapshot.gradients.values())))
    if kind == WEIGHTS and name in one.start:
        return max(_SMALL, _norm(one.start[name]) * _ROUNDING / tolerance)
    return _SMALL


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64).ravel()))


def _distance(left: np.ndarray | None, right: np.ndarray | None, floor: float) -> float:
    if left is None or right is None or left.shape != right.shape:
        return math.inf
    finite = np.isfinite(left)
    if (finite != np.isfinite(right)).any():
        return math.inf
    left, right = left[finite].astype(np.float64), right[finite].astype(np.float64)
    return _norm(left - right) / max(_norm(left), _norm(right), floor)


def _ratio(left: np.ndarray | None, right: np.ndarray | None) -> float | None:
    if left is None or right is None or left.shape != right.shape or not np.any(left):
        return None
    # Of arrays the projection of the second on the first, which is their ratio where one is a multiple of the other.
    left, right = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    return float(left @ right / (left @ left))
