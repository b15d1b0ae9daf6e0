"""The work of `bench_loop`, the same for every contender: models, data, initial weights, optimizers.

Written for Keras 3 and for tf-keras alike: `keras` is always the one or the other.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

NUM_CLASSES, NUM_BATCHES = 10, 50
RATE, MOMENTUM = 0.01, 0.9
ADAM_RATE, DECAY = 1e-3, 0.004


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is measured.

    Attributes:
        units: of its dense layers, each with a ReLU.
        filters: of 3x3 convolutions before them, each with a ReLU and pooling.
        shape: of an example.
        loops: of 100 steps in a turn, so that a turn lasts long enough to be timed.
    """

    units: tuple[int, ...]
    shape: tuple[int, ...]
    loops: int
    filters: tuple[int, ...] = ()
    batch: int = 64


# By what a step takes on one core of the machine it was written on.
CASES: Mapping[str, Case] = {
    "mlp 0.1 ms": Case((128,), (64,), loops=10),
    "mlp 1 ms": Case((512, 512), (256,), loops=3),
    "cnn 10 ms": Case((128,), (28, 28, 1), loops=1, filters=(32, 64)),
}
OPTIMIZERS = ("sgd", "adamw")


def model(keras: Any, case: Case) -> Any:
    """[B, *shape] float32 -> logits [B, 10] float32, its initial weights made with NumPy (arXiv:1502.01852)."""
    inputs = x = keras.Input(case.shape)
    for filters in case.filters:
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x) if case.filters else x
    for units in case.units:
        x = keras.layers.Dense(units, activation="relu")(x)
    made = keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x))
    made.set_weights(list(_weights([tuple(array.shape) for array in made.get_weights()])))
    return made


def _weights(shapes: list[tuple[int, ...]]) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for shape in shapes:
        is_bias = len(shape) == 1
        deviation = 0.0 if is_bias else (2.0 / np.prod(shape[:-1])) ** 0.5
        yield generator.normal(0.0, deviation, shape).astype(np.float32)


def optimizer(keras: Any, name: str) -> Any:
    """By its name in `OPTIMIZERS`."""
    if name == "sgd":
        return keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    return keras.optimizers.AdamW(ADAM_RATE, weight_decay=DECAY)


def loss(keras: Any) -> Any:
    """Of integer labels and logits, a mean over examples."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def accuracy(keras: Any) -> Any:
    """The metric that all track beside the loss."""
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def batches(case: Case, share: int) -> Any:
    """`tf.data.Dataset` of `share` examples each, for ever: [share, *shape] float32 and labels [share] int32."""
    import tensorflow as tf

    generator = np.random.default_rng(1)
    examples = NUM_BATCHES * case.batch
    features = generator.standard_normal((examples, *case.shape), np.float32)
    labels = generator.integers(0, NUM_CLASSES, examples, np.int32)
    made = tf.data.Dataset.from_tensor_slices((features, labels)).batch(share, drop_remainder=True)
    return made.cache().repeat().prefetch(tf.data.AUTOTUNE)
