"""Rematerialisation: layers that keep no activations for the backward pass, but compute them again in it.

Memory against time: of such a layer only the inputs are kept (Chen et al. 2016, arXiv:1604.06174), for a second forward
pass. Keras' own `RematScope` fails under TensorFlow's tape, and finds layers by size or by exact names at their making.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trainer import backend, internals, patterns
from trainer.errors import ConfigError


def rematerialise(model: keras.Model, wanted: Sequence[str]) -> None:
    """Lets the layers of a built model whose names match a pattern, and all that is in them, keep no activations.

    Raises:
        ConfigError: a pattern matches no layer.
    """
    layers = [layer for layer in internals.layers(model) if layer is not model]
    names = [layer.name for layer in layers]
    for pattern in wanted:
        if not any(patterns.first_match(name, [pattern]) for name in names):
            near = patterns.near(pattern, names)
            raise ConfigError(f"--remat matches no layer. Received: {pattern!r}. There are: {near}")
    wrapped: set[int] = set()  # and what is in them: to compute within again would be to compute twice
    for layer in layers:
        if id(layer) not in wrapped and patterns.first_match(layer.name, wanted):
            wrapped.update(id(inner) for inner in internals.layers(layer))
            layer.call = _computed_again(layer, layer.call)


def _computed_again(layer: keras.layers.Layer, call: Callable) -> Callable:
    """`call` that is run once more in the backward pass.

    Gradients come through arguments only, so weights are arguments too. The layer's state, such as that of its random
    numbers, is what it was in the first pass, and moves on once.
    """

    def again(*args: Any, **kwargs: Any) -> Any:
        given = keras.tree.flatten((args, kwargs))
        floats = [index for index, value in enumerate(given) if ops.is_tensor(value) and _is_float(value)]
        variables = layer.trainable_variables
        others = [v for v in layer.variables if not any(v is t for t in variables)] + layer.metrics_variables
        autocast = internals.autocast_of_now()  # in the backward pass no layer is being called
        with internals.no_autocast():
            weights = [ops.copy(v.value) for v in variables]  # as they are: a variable of TensorFlow would move on
            state = [ops.copy(v.value) for v in others]
        first: list[tuple[Any, int, list[int]]] = []  # structure of the output, its length, which state has moved on

        def function(*tensors: Any) -> list:
            values = list(given)
            for index, tensor in zip(floats, tensors, strict=False):
                values[index] = tensor
            mapping = [*zip(variables, tensors[len(floats) :], strict=True), *zip(others, state, strict=True)]
            with keras.StatelessScope(mapping, collect_losses=True) as scope, autocast():
                before = [scope.get_current_value(v) for v in others]
                inner_args, inner_kwargs = keras.tree.pack_sequence_as((args, kwargs), values)
                output = call(*inner_args, **inner_kwargs)
                losses = list(scope.losses)
            after = [scope.get_current_value(v) for v in others]
            moved = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
            flat = keras.tree.flatten(output)
            first.append((keras.tree.map_structure(lambda _: None, output), len(flat), moved))
            return [*flat, *losses, *(after[index] for index in moved)]

        results = backend.part("functions").recomputed(function)(*(given[index] for index in floats), *weights)
        structure, length, moved = first[0]
        losses = len(results) - length - len(moved)
        for index, value in zip(moved, results[length + losses :], strict=True):
            others[index].assign(value)
        for loss in results[length : length + losses]:
            layer.add_loss(loss)
        return keras.tree.pack_sequence_as(structure, results[:length])

    return again


def _is_float(tensor: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
