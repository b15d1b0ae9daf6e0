"""Functions of arrays on JAX: compiled, differentiated, computed again in the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def compiled(function: Callable) -> Callable:
    """`function` of arrays as a program, in which only what its results need is computed."""
    return jax.jit(function)


def value_and_gradients(function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any]) -> tuple[Any, Any, list]:
    """What `function(*tensors)` returns, (value, more), and the gradient of the scalar `value` by each array.

    None, or zeros, is the gradient of what the value does not depend on.
    """
    (value, more), gradients = jax.value_and_grad(lambda given: function(*given), has_aux=True)(list(tensors))
    return value, more, gradients


def recomputed(function: Callable[..., list]) -> Callable[..., list]:
    """`function` of float arrays, run once more in the backward pass, which keeps nothing but its arguments."""
    return jax.checkpoint(function)


def quieten() -> None:
    """Nothing to do: compilations of JAX say nothing."""
