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


def undone_if_halted(loop: Loop, variables: Callable[[], Sequence[tf.Variable]]) -> Loop:
    """`loop`, after which variables are what they were before it if a step was not finite ("halted_at" is not -1).

    Args:
        loop: to be traced.
        variables: all that it changes, those of each replica of this process.
    """

    def undone(iterator: Iterator, steps: tf.Tensor) -> dict[str, Any]:
        # No copies yet: TensorFlow makes one when it changes what is held elsewhere.
        before = [(variable, variable.read_value()) for variable in variables()]
        outcome = loop(iterator, steps)

        def undo() -> None:
            for variable, value in before:
                variable.assign(value)

        tf.cond(outcome["halted_at"] >= 0, undo, lambda: None)
        return outcome

    return undone
