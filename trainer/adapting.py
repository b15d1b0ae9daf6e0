"""Layers that adapt to the data, before the first step of a run.

As in Keras, a `keras.layers.Normalization` that is not given mean and variance is to have those of the data. What
stands between it and the input must have no weights: a Concatenate, a Rescaling. One with `invert=True` turns what the
model computes into the units of the label, so it takes mean and variance of the label.

They come from the first `adapt_examples` of the training order, which holds every example once before any comes again,
as the input delivers them: what is augmented on the devices is so later. Every worker computes them itself, from all of
these examples, not from its share; so they depend on how many replicas and workers there are as little as the order
does. They are weights: from there on they come from checkpoints (resuming, `--init_from`, evaluation, export), and
`waiting` finds nothing to adapt.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainer import backend, internals
from trainer.cluster import Cluster
from trainer.errors import ConfigError

if typing.TYPE_CHECKING:
    import tensorflow as tf

_FLOAT32_EPSILON = float(np.finfo(np.float32).eps)


def waiting(model: keras.Model) -> list[int]:
    """Places in `internals.layers` of the layers that nothing has been put into: neither data nor a checkpoint."""
    return [
        index
        for index, layer in enumerate(internals.layers(model))
        if internals.adapts(layer) and layer.built and _is_as_initialised(layer)
    ]


def _is_as_initialised(layer: keras.layers.Normalization) -> bool:
    mean, variance, _ = layer.get_weights()
    return not mean.any() and (variance == 1).all()


def adapt(
    trained: keras.Model,
    devices: Cluster,
    copy: keras.Model,
    places: Sequence[int],
    batches: "tf.data.Dataset",
) -> None:
    """Gives layers of `trained` the mean and variance of what they are to normalise.

    Args:
        trained: made under `devices.scope()`; its layers are changed, on every replica, and nothing else.
        copy: the same model outside of any strategy, with the same weights: what is computed of the data before it
            comes to a layer is computed with this one.
        places: of the layers, from `waiting`.
        batches: (x, y) of all examples that count, of any batch size.

    Raises:
        ConfigError: a layer whose input depends on weights, or is not finite.
    """
    layers = [internals.layers(copy)[place] for place in places]
    inputs = _Inputs(copy, layers)
    found = [_Moments() for _ in layers]
    weights = inputs.weights()
    for number, (x, y) in enumerate(batches.as_numpy_iterator()):
        if number == 0:
            _refuse_dependent(inputs, layers, x)
        for layer, moments, calls in zip(layers, found, inputs.of(weights, x), strict=True):
            for values in calls:
                moments.add(*_sums(layer, values, y))
    for place, moments in zip(places, found, strict=True):
        layer = internals.layers(trained)[place]
        if not np.isfinite(moments.variance).all():
            raise ConfigError(
                f"the layer {layer.name} is to normalise by mean and variance of the training data, which holds values "
                f"that are not finite. Received: mean {moments.mean}. Rebuild the dataset without them"
            )
        # An infinite variance would make 0 of every value, and nobody would know.
        if (moments.variance > np.finfo(np.float32).max).any():
            raise ConfigError(
                f"the layer {layer.name} is to normalise by the variance of the training data, which float32 cannot "
                f"hold. Received: {np.max(moments.variance):.3g}. Rebuild the dataset in a larger unit"
            )
        with devices.scope():
            layer.adapt_mean.assign(np.asarray(moments.mean, np.float32))
            layer.adapt_variance.assign(np.asarray(moments.variance, np.float32))


@dataclasses.dataclass
class _Moments:
    """Mean and variance of what comes in parts, in float64.

    T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979,
    https://doi.org/10.1007/978-3-642-51461-6_3.
    """

    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0  # sum of squared differences from the mean

    def add(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        """Takes another part into account."""
        total = self.count + count
        difference = mean - self.mean
        self.mean = self.mean + difference * (count / total)
        self.squares = self.squares + squares + difference**2 * (self.count * count / total)
        self.count = total

    @property
    def variance(self) -> np.ndarray:
        """1 where all values are the same as far as float32 can tell: Keras would divide by 1e-7 what differs later."""
        variance = self.squares / self.count
        return np.where(variance <= (_FLOAT32_EPSILON * self.mean) ** 2, 1.0, variance)


class _Inputs:
    """What layers of a model are given, as a function of its float weights and of `x`.

    Of the model no more is computed than what comes before these layers.
    """

    def __init__(self, model: keras.Model, layers: Sequence[keras.layers.Normalization]):
        self.variables = [v for v in model.weights if keras.backend.is_float_dtype(v.dtype)]
        given: dict[int, list] = {id(layer): [] for layer in layers}

        def noted(call: Callable, notes: list, inputs: Any) -> Any:
            notes.append(inputs)
            return call(inputs)

        for layer in layers:
            layer.call = functools.partial(noted, layer.call, given[id(layer)])

        def function(weights: Sequence[Any], x: Any) -> list[list]:
            for notes in given.values():
                notes.clear()
            with keras.StatelessScope(list(zip(self.variables, weights, strict=True))):
                model(x, training=False)
            return [list(given[id(layer)]) for layer in layers]

        self._function = backend.part("functions").compiled(function)

    def weights(self) -> list[np.ndarray]:
        """As they are."""
        return [ops.convert_to_numpy(variable.value) for variable in self.variables]

    def of(self, weights: Sequence[np.ndarray], x: Any) -> list[list[np.ndarray]]:
        """By layer and call."""
        return [[ops.convert_to_numpy(values) for values in calls] for calls in self._function(weights, x)]


def _refuse_dependent(inputs: _Inputs, layers: Sequence[keras.layers.Normalization], x: Any) -> None:
    """Raises ConfigError where what a layer is given depends on weights of the model, which change in training.

    Looked up with NaN for weights, which becomes NaN whatever is computed from them.
    """
    weights = inputs.weights()
    unknown = [np.full_like(weight, np.nan) for weight in weights]
    before, after = inputs.of(weights, x), inputs.of(unknown, x)
    for place, layer in enumerate(layers):
        if layer.invert or _same(before[place], after[place]):
            continue
        of = []
        for index, variable in enumerate(inputs.variables):
            one_unknown = [*weights[:index], unknown[index], *weights[index + 1 :]]
            if not _same(before[place], inputs.of(one_unknown, x)[place]):
                of.append(variable.path)
        raise ConfigError(
            f"the layer {layer.name} is to normalise by mean and variance of the training data, and what it is "
            f"given depends on weights, which training changes. Received: {', '.join(of)}. Put it before them, "
            "give it mean and variance, or use keras.layers.BatchNormalization"
        )


def _same(calls: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    # By their bytes: NaN is the same as itself.
    return all(one.tobytes() == other.tobytes() for one, other in zip(calls, others, strict=True))


def _sums(layer: keras.layers.Normalization, values: np.ndarray, y: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Number, mean and sum of squared differences from it, of what the layer takes as one, over a batch; float64."""
    if layer.invert:
        if math.prod(y.shape[1:]) != math.prod(values.shape[1:]):
            raise ConfigError(
                f"the layer {layer.name} turns what the model computes into the units of the label, so it must be "
                f"given as many numbers. Received: {values.shape[1:]} for a label of shape {y.shape[1:]}"
            )
        values = np.reshape(y, values.shape)
    values = values.astype(np.float64)
    kept = [axis % values.ndim for axis in layer.axis]
    reduced = tuple(axis for axis in range(values.ndim) if axis not in kept)
    mean = values.mean(reduced, keepdims=True)
    squares = np.square(values - mean).sum(reduced)
    count = values.size // math.prod(values.shape[axis] for axis in kept)
    return count, np.squeeze(mean, reduced), squares
