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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import internals
from trainer.cluster import Cluster
from trainer.errors import ConfigError

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
    batches: tf.data.Dataset,
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
    given = _watched(layers)
    found = [_Moments() for _ in layers]

    def sums(x: Any, y: tf.Tensor) -> list[list[tuple]]:
        _call(copy, x, given)
        return [[_sums(layer, values, y) for values in given[id(layer)]] for layer in layers]

    # Of the model no more is computed than what comes before the layers.
    compiled = tf.function(sums, input_signature=batches.element_spec, autograph=False)
    for x, y in batches:
        for moments, calls in zip(found, compiled(x, y), strict=True):
            for count, mean, squares in calls:
                if count:
                    moments.add(int(count), mean.numpy(), squares.numpy())
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


def _watched(layers: Sequence[keras.layers.Normalization]) -> dict[int, list[tf.Tensor]]:
    """Lets layers note down what they are called with, by their ids."""
    given: dict[int, list[tf.Tensor]] = {id(layer): [] for layer in layers}

    def watched(call: Callable, noted: list[tf.Tensor], inputs: tf.Tensor) -> tf.Tensor:
        noted.append(inputs)
        return call(inputs)

    for layer in layers:
        layer.call = functools.partial(watched, layer.call, given[id(layer)])
    return given


def _call(model: keras.Model, x: Any, given: Mapping[int, list[tf.Tensor]]) -> None:
    """Calls the model while it is traced, so that `given` is what its layers are given.

    Raises:
        ConfigError: that depends on weights of the model, which change in training.
    """
    for noted in given.values():
        noted.clear()
    weights = {weight.path: weight.value for weight in model.weights if keras.backend.is_float_dtype(weight.dtype)}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(list(weights.values()))
        model(x, training=False)
    for layer in (layer for layer in internals.layers(model) if id(layer) in given and not layer.invert):
        for values in given[id(layer)]:
            gradients = tape.gradient(values, weights) if values.dtype.is_floating else {}
            if of := [path for path, gradient in gradients.items() if gradient is not None]:
                raise ConfigError(
                    f"the layer {layer.name} is to normalise by mean and variance of the training data, and what it is "
                    f"given depends on weights, which training changes. Received: {', '.join(of)}. Put it before them, "
                    "give it mean and variance, or use keras.layers.BatchNormalization"
                )


def _sums(layer: keras.layers.Normalization, values: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Number, mean and sum of squared differences from it, of what the layer takes as one, over a batch."""
    if layer.invert:
        if math.prod(y.shape[1:]) != math.prod(values.shape[1:]):
            raise ConfigError(
                f"the layer {layer.name} turns what the model computes into the units of the label, so it must be "
                f"given as many numbers. Received: {values.shape[1:]} for a label of shape {y.shape[1:]}"
            )
        values = tf.reshape(y, tf.shape(values))
    values = tf.cast(values, tf.float64)
    rank = values.shape.rank
    kept = [axis % rank for axis in layer.axis]
    reduced = [axis for axis in range(rank) if axis not in kept]
    mean = tf.reduce_mean(values, reduced, keepdims=True)
    squares = tf.reduce_sum(tf.square(values - mean), reduced)
    count = tf.size(values, tf.int64) // math.prod(values.shape[axis] for axis in kept)
    return count, tf.squeeze(mean, reduced), squares
