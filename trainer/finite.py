"""Whether a step's loss and gradients are finite, decided on the devices, and a step that is not without effect.

At the first step whose loss or gradient norm is NaN or infinite the replicas *halt*: that step's update, and those of
all later steps of the same call, change nothing. So the host, which looks once a loop, finds the very state in which
the step failed, and can examine it, save it, or go on behind it. All replicas decide from the same averaged numbers.

It runs at every step: what it costs is measured by `scripts/bench_finite.py`.
"""

from typing import Any

from keras import ops

# What is kept of the steps, one vector [5] float32 so that a step reads and writes it once: every device has float32,
# and steps of a call are few.
_HALTED, _STEPS, _NORM_SUM, _NORM_COUNT, _OVERFLOWS = range(5)
NOTHING = (0.0,) * 5


def judge(kept: Any, norm: Any, failed: Any, scale: Any) -> tuple[Any, Any]:
    """Whether a step counts, the same on all replicas, and what is then kept.

    Args:
        kept: [5] float32.
        norm: of the gradients of the global batch, not scaled.
        failed: whether the loss of a replica is not finite.
        scale: of the loss; a scaled gradient that overflows is how dynamic loss scaling finds its scale, and the
            optimizer deals with it.
    """
    counts = ops.isfinite(norm)
    fails = ops.logical_or(failed, ops.logical_and(ops.logical_not(counts), scale <= 1.0))
    goes_on = ops.logical_not(ops.logical_or(fails, has_halted(kept)))
    counted = ops.logical_and(goes_on, counts)
    overflows = ops.logical_and(goes_on, ops.logical_not(counts))
    halted, steps, count, overflow = (
        ops.cast(change, "float32") for change in (ops.logical_not(goes_on), goes_on, counted, overflows)
    )
    return goes_on, kept + ops.stack([halted, steps, ops.where(counted, norm, 0.0), count, overflow])


def has_halted(kept: Any) -> Any:
    """Whether a step of this call was not finite."""
    return kept[_HALTED] > 0


def end_of_call(kept: Any) -> tuple[Any, Any]:
    """Which step of the call that ends failed, float32, -1 where none did; and what is kept for the next."""
    return ops.where(has_halted(kept), kept[_STEPS], -1.0), kept * ops.convert_to_tensor([0.0, 0.0, 1.0, 1.0, 1.0])


def gradient_norm(kept: Any) -> Any:
    """Mean of the global norm of the gradients before clipping, since the last reset; NaN where no step counted."""
    return kept[_NORM_SUM] / kept[_NORM_COUNT]


def overflow(kept: Any) -> Any:
    """Share of steps since the last reset whose scaled gradients were not finite; NaN where there was no step."""
    return kept[_OVERFLOWS] / (kept[_NORM_COUNT] + kept[_OVERFLOWS])
