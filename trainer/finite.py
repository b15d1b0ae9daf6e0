"""Whether a step's loss and gradients are finite, decided on the devices, and a step that is not without effect.

At the first step whose loss or gradient norm is NaN or infinite the replicas *halt*: that step's update, and those of
all later steps of the same call, change nothing. So the host, which looks once a loop, finds the very state in which
the step failed, and can examine it, save it, or go on behind it. All replicas decide from the same averaged numbers.

All updates of a step then wait for its judgement, which shows in small steps. A backend may run a call without waiting
instead, where it can undo the whole of it and be given the same batches once more: `note` tells at the end whether it
has to.

It runs at every step: what it costs is measured by `scripts/bench_watching.py`.
"""

from typing import Any

from keras import ops

# What is kept of the steps, one vector [5] float32 so that a step reads and writes it once: every device has float32,
# and steps of a call are few. Halted is finite, then not: added to anything it makes that not finite.
_HALTED, _STEPS, _NORM_SUM, _NORM_COUNT, _OVERFLOWS = range(5)
NOTHING = (0.0,) * 5
_HALT = (float("nan"), 0.0, 0.0, 0.0, 0.0)


def judge(kept: Any, half_square: Any, loss: Any, scale: Any) -> tuple[Any, Any]:
    """Whether a step counts, the same on all replicas, and what to add to what is kept.

    Of few operations, and of fewer until it is known whether the step counts: all updates wait for that.

    Args:
        kept: [5] float32.
        half_square: half the sum of the squares of the scaled gradients of the global batch.
        loss: finite only if the losses of all replicas are.
        scale: of the loss; a scaled gradient that overflows is how dynamic loss scaling finds its scale, and the
            optimizer deals with it. A float where it is always the same.
    """
    # What comes of a square root XLA does not compute again in each update that asks for it, as it would the sum; to
    # compile those of a ResNet-50 took longer than all else.
    norm = ops.sqrt(2.0 * half_square) / scale
    goes_on, counts = ops.isfinite(loss + kept[_HALTED]), ops.isfinite(norm)
    if isinstance(scale, float):
        goes_on, counted, overflows = ops.logical_and(goes_on, counts), 1.0, 0.0
    else:
        goes_on = ops.logical_and(goes_on, ops.logical_or(counts, scale > 1.0))
        norm, counted = ops.where(counts, norm, 0.0), ops.cast(counts, "float32")
        overflows = 1.0 - counted
    change = ops.stack([ops.convert_to_tensor(part, "float32") for part in (0.0, 1.0, norm, counted, overflows)])
    return goes_on, ops.where(goes_on, change, ops.convert_to_tensor(_HALT, "float32"))


def note(half_square: Any, loss: Any, scale: float) -> Any:
    """What to add to what is kept of a step that is not waited for. See `judge`."""
    norm = ops.sqrt(2.0 * half_square) / scale
    # Whatever the loss and the norms add up to: it is finite as long as they are, and the next call begins with 0.
    return ops.stack([ops.convert_to_tensor(part, "float32") for part in (loss + norm, 1.0, norm, 1.0, 0.0)])


def has_halted(kept: Any) -> Any:
    """Whether a step of this call was not finite."""
    return ops.logical_not(ops.isfinite(kept[_HALTED]))


def end_of_call(kept: Any) -> tuple[Any, Any]:
    """Which step of the call that ends failed, float32, -1 where none did; and what is kept for the next."""
    next_call = ops.convert_to_tensor([False, False, True, True, True])
    return ops.where(has_halted(kept), kept[_STEPS], -1.0), ops.where(next_call, kept, ops.zeros_like(kept))


def gradient_norm(kept: Any) -> Any:
    """Mean of the global norm of the gradients before clipping, since the last reset; NaN where no step counted."""
    return kept[_NORM_SUM] / kept[_NORM_COUNT]


def overflow(kept: Any) -> Any:
    """Share of steps since the last reset whose scaled gradients were not finite; NaN where there was no step."""
    return kept[_OVERFLOWS] / (kept[_NORM_COUNT] + kept[_OVERFLOWS])
