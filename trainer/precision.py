"""Whether gradients fit the half precision that they are computed in, counted on the devices once a report.

A gradient that is too small for float16 becomes 0, and looks like that of a weight that the batch does not reach. What
can be seen is how many are about to: below the smallest normal number (2^-14 of float16) digits are lost, down to the
smallest of all (2^-24). Loss scaling moves gradients out of there (Micikevicius et al., arXiv:1710.03740, section 3.2).

    gradient_underflow    share of entries below the smallest normal number among those that are not 0; where the whole
                          gradient of a variable is 0, all of its entries count as below
    gradient_overflow     share of steps that a scaled gradient beyond float16 has undone (mixed float16 only)
    loss_scale            by which the loss is multiplied now (mixed float16 only)

Counted are gradients as a replica computed them, scaled, before any average; only of layers that compute in half
precision, at the first step of each report whose gradients are finite.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trainer import internals

UNDERFLOW, OVERFLOW, LOSS_SCALE = "gradient_underflow", "gradient_overflow", "loss_scale"
NAMES = (UNDERFLOW, OVERFLOW, LOSS_SCALE)
_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}

# (entries below, entries that are not 0), of each replica's own gradients. float32: shares need no last digit.
NOTHING = (0.0, 0.0)


def smallest_normal(model: keras.Model) -> dict[int, float]:
    """Of each trainable variable, by its id, of a layer that computes in half precision."""
    return {id(variable): _SMALLEST_NORMAL[dtype] for variable, dtype in internals.half_precision(model)}


def is_counted(counts: Any) -> Any:
    """Whether the report in the making has its numbers: then they cost a look at one."""
    return counts[1] > 0


def counted(chosen: Sequence[tuple[Any, float]]) -> Any:
    """[2] float32 of gradients, each with the smallest normal number of its precision; NOTHING if one is not finite."""
    counts = sum(_of_variable(gradient, smallest) for gradient, smallest in chosen)
    finite = ops.all(ops.stack([ops.all(ops.isfinite(gradient)) for gradient, _ in chosen]))
    return ops.where(finite, counts, ops.zeros_like(counts))


def values(model: keras.Model, counts: Any, overflow: Any) -> dict[str, Any]:
    """What a report says, float32; NaN of what is not known.

    Args:
        counts: summed over the replicas.
        overflow: share of steps undone because scaled gradients were not finite.
    """
    found = {UNDERFLOW: counts[0] / counts[1]}
    if internals.scales(model.optimizer):
        found |= {OVERFLOW: overflow, LOSS_SCALE: internals.scale(model.optimizer)}
    return found


def _of_variable(gradient: Any, smallest: float) -> Any:
    magnitude = ops.abs(gradient)
    present = ops.count_nonzero(magnitude > 0)
    below = ops.count_nonzero(ops.logical_and(magnitude > 0, magnitude < smallest))
    numbers = ops.cast(ops.stack([below, present]), "float32")
    return ops.where(present > 0, numbers, ops.cast(ops.size(gradient), "float32") + ops.zeros_like(numbers))
