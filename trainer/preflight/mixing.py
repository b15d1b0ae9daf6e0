"""Whether a model treats the examples of a batch apart, found by running it on made-up ones."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainer import backend, internals, places

_MADE_UP = 4  # examples
# Relative difference that another order of summation does not make, by dtype of the layer.
_DIFFERENT, _DIFFERENT_HALF = 1e-3, 0.1
_HALVES = ("bfloat16", "float16")


def mixes_examples(model: keras.Model, inputs: Any) -> str | None:
    """Names the first layer in which an example of a batch depends on the others; None where there is none.

    Such a model gives other answers with other batch sizes and numbers of replicas. One that gives another answer each
    time is told too. Runs the model on this machine, as outside of training.

    Args:
        model: built, outside of any strategy of several devices.
        inputs: its inputs as `keras.KerasTensor`, of numbers.
    """
    generator = np.random.default_rng(0)

    def made_up(tensor: keras.KerasTensor) -> np.ndarray:
        shape, dtype = (_MADE_UP, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
        if dtype.startswith(("float", "bfloat")):
            return generator.normal(size=shape).astype("float32")
        return generator.integers(0, 2, size=shape).astype(dtype)  # also ids, that any embedding knows

    examples = keras.tree.map_structure(made_up, inputs)
    half = keras.tree.map_structure(lambda array: array[: _MADE_UP // 2], examples)
    try:
        together, apart, again = (_outputs(model, batch) for batch in (examples, half, half))
    except Exception as error:  # whatever the user's code raises: made-up inputs need not suit it
        place = places.of_error(error)
        where = f" at {place.quoted()}" if place else ""
        return (
            f"{model.name}: whether it mixes examples is not known; made-up inputs raise {type(error).__name__}{where}"
        )
    for (layer, whole), (_, part), (_, same) in zip(together, apart, again, strict=False):
        if _differ(part, same):
            return f"{layer.name}: it gives another answer each time, outside of training too"
        if _differ(whole, part):
            return (
                f"{layer.name}: the answer for an example depends on the others of its batch, so it changes with the "
                "size of the batch and the number of replicas"
            )
    return None


def _outputs(model: keras.Model, examples: Any) -> list[tuple[keras.layers.Layer, list[Any]]]:
    outputs: list[tuple[keras.layers.Layer, list[Any]]] = []
    backend.part("functions").quieten()  # Keras compiles grouped convolutions
    with internals.watching_layers(lambda layer, output: outputs.append((layer, keras.tree.flatten(output)))):
        model(examples, training=False)
    return outputs


def _differ(outputs: Sequence[Any], of_half: Sequence[Any]) -> bool:
    """Whether the outputs of a layer for the first examples differ from those for these examples alone."""
    return any(_differs(*pair) for pair in zip(outputs, of_half, strict=False))


def _differs(whole: Any, part: Any) -> bool:
    half = _MADE_UP // 2
    if not ops.is_tensor(whole) or not whole.shape or whole.shape[0] not in (half, _MADE_UP):
        return False
    if tuple(part.shape) != (half, *whole.shape[1:]):
        return True
    limit = _DIFFERENT_HALF if keras.backend.standardize_dtype(whole.dtype) in _HALVES else _DIFFERENT
    first, again = (ops.convert_to_numpy(t).astype(np.float64) for t in (whole[:half], part))
    return bool(np.max(np.abs(first - again), initial=0) > limit * np.max(np.abs(again), initial=1e-30))
