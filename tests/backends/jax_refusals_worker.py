"""What a step on JAX refuses to lose; `python -m tests.backends.jax_refusals_worker` tells it as JSON, by case."""

import json
from collections.abc import Callable

import jax
import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.devices import one_replica
from tests.provoked_jax_failures import Layer
from trainer import replicated
from trainer.errors import ConfigError

BATCH, FEATURES = 4, 3
DEVICES = one_replica()


def elsewhere(function: Callable) -> keras.Model:
    """A model that does `function` of its input and a thing that is not the model's."""
    x = keras.Input((FEATURES,))
    return keras.Model(x, keras.layers.Dense(1)(Layer(function)(x)))


def counting() -> keras.Model:
    count = keras.Variable(0.0, trainable=False, name="count")

    def counted(x: jax.Array) -> jax.Array:
        count.assign(count + 1.0)
        return x * count

    return elsewhere(counted)


def drawing() -> keras.Model:
    held = [keras.random.SeedGenerator(1)]
    return elsewhere(lambda x: _noisy(x, held[0]))


def _noisy(x: jax.Array, seed: keras.random.SeedGenerator) -> jax.Array:
    return x + keras.random.normal(ops.shape(x), seed=seed)


def reading() -> keras.Model:
    """A constant that happens to be a variable, such as the weights of a teacher: it loses nothing."""
    constant = keras.Variable(2.0, trainable=False)
    return elsewhere(lambda x: x * constant)


CASES: dict[str, Callable[[], keras.Model]] = {
    "counting": counting,
    "drawing": drawing,
    "reading": reading,
}


def told(make: Callable[[], keras.Model]) -> str:
    """What a run of one step ends with; nothing where it trains."""
    model = make()
    model.compile("sgd", "mse")
    spec = (keras.KerasTensor((BATCH, FEATURES)), keras.KerasTensor((BATCH, 1)))
    try:
        trained = replicated.Replicated(model, DEVICES, spec)
        batches = DEVICES.distribute(lambda _: _dataset())
        trained.run_train_loop(iter(batches), 1)
    except ConfigError as error:
        return str(error)
    return ""


def _dataset() -> tf.data.Dataset:
    one = (np.ones((BATCH, FEATURES), np.float32), np.ones((BATCH, 1), np.float32))
    return tf.data.Dataset.from_tensors(one).repeat()


if __name__ == "__main__":
    print(json.dumps({name: told(make) for name, make in CASES.items()}))
