"""A function traced by JAX, for what Keras' layers say of themselves while it is.

Of what is remarked of TensorFlow's graph, programs of JAX have nothing: strings, files, tables, shapes that depend on
values, and, without `jax_enable_x64`, numbers of 64 bits. What is left, such as eigenvalues, which JAX has for CPUs
only, the compiler names (`--mode=preflight`).
"""

from collections.abc import Callable
from typing import Any

import jax
import keras


class Tracing:
    """A function, traced while layers take turns.

    Args:
        first: name of the layer that runs at the beginning.
    """

    def __init__(self, first: str):
        pass

    def run(self, function: Callable, *symbolic: Any) -> None:
        """Traces `function` of arrays like these of Keras."""
        shapes = keras.tree.map_structure(lambda tensor: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype), symbolic)
        jax.eval_shape(function, *shapes)

    def turn(self, layer: str) -> None:
        """The layer of this name runs from now on."""

    def remarks(self) -> tuple[()]:
        """None, see above."""
        return ()
