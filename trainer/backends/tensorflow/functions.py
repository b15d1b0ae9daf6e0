"""Functions of tensors on TensorFlow: compiled, differentiated, computed again in the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.backends.tensorflow import internals


def compiled(function: Callable) -> Callable:
    """`function` of arrays as a graph, in which only what its results need is computed."""
    return tf.function(function, autograph=False)


def value_and_gradients(function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any]) -> tuple[Any, Any, list]:
    """What `function(*tensors)` returns, (value, more), and the gradient of the scalar `value` by each tensor.

    None, or zeros, is the gradient of what the value does not depend on.
    """
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value, more = function(*tensors)
    gradients = tape.gradient(value, tensors)
    return value, more, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def recomputed(function: Callable[..., list]) -> Callable[..., list]:
    """`function` of float tensors, run once more in the backward pass, which keeps nothing but its arguments."""
    return tf.recompute_grad(function)


def quieten() -> None:
    """Keeps what the first compilation says to everybody off the console."""
    internals.swallow_first_xla_notice()
