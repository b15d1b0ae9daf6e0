"""A call whose steps do not wait until they are known to be finite, and which is undone as a whole if one is not.

Small steps spend a fifth of their time on that waiting, for no update may begin before the last gradient is there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Of all replicas of a process. Beside the steps of larger models the waiting does not show, and the memory would.
MOST_COPIED_BYTES = 64 * 2**20

Loop = Callable[[Iterator, tf.Tensor], dict[str, Any]]


def is_small(variables: Sequence[tf.Variable]) -> bool:
    """Whether they may be copied for each call."""
    return sum(v.shape.num_elements() * v.dtype.size for v in variables) <= MOST_COPIED_BYTES


def keeping(loop: Loop, variables: Callable[[], Sequence[tf.Variable]]) -> Loop:
    """`loop`, whose outcome has under "before" what the variables were before it.

    Args:
        loop: to be traced.
        variables: all that it changes, those of each replica of this process.
    """

    def kept(iterator: Iterator, steps: tf.Tensor) -> dict[str, Any]:
        # No copies yet: TensorFlow makes one when it changes what is held elsewhere.
        before = [variable.read_value() for variable in variables()]
        return loop(iterator, steps) | {"before": before}

    return kept


def undo(variables: Sequence[tf.Variable], outcome: dict[str, Any]) -> None:
    """Makes the variables what they were before a loop of `keeping`."""
    for variable, value in zip(variables, outcome["before"], strict=True):
        variable.assign(value)
