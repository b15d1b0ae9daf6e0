"""Provokes failures of JAX for real and prints what `trainer.diagnose` makes of each, as `provoked_failures.py` does.

A process of its own, since a process has one backend: `python -m tests.provoked_jax_failures`.
"""

import json
import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from trainer import diagnose, places

ABSURD = [2**24, 2**24]  # more than any process can address


class Layer(keras.layers.Layer):
    """Does `function` to its input."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def _fit(function: Callable) -> None:
    model = keras.Sequential([keras.layers.Dense(3), Layer(function)])
    model.compile(loss="mse")
    model.fit(np.ones([4, 3], "float32"), np.ones([4, 3]), verbose=0)


def _leaked() -> None:
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)
    kept[0] + 1


def _late_devices() -> None:
    jax.devices()
    jax.config.update("jax_num_cpu_devices", 7)


# With the name of the row that each is.
PROVOCATIONS: list[tuple[str, Callable[[], object]]] = [
    ("JAX in use too early", _late_devices),
    ("value of a tensor in Python", lambda: _fit(lambda x: x if x[0, 0] > 0 else -x)),
    ("value of a tensor in Python", lambda: _fit(lambda x: x * float(x[0, 0]))),
    ("value of a tensor in Python", lambda: _fit(np.asarray)),
    ("value of a tensor in Python", lambda: _fit(tf.nn.relu)),
    ("value of a tensor in Python", lambda: jax.jit(lambda x: x if x > 0 else -x)(1.0)),
    ("value of a tensor in Python", lambda: jax.jit(lambda x: x * float(x))(1.0)),
    ("value of a tensor in Python", lambda: jax.jit(np.asarray)(1.0)),
    ("shape not known to JAX", lambda: _fit(lambda x: x[x > 0])),
    ("tensor kept from another step", _leaked),
    ("random numbers without a seed", lambda: _fit(lambda x: x + keras.random.normal([4, 3]))),
    ("out of memory on JAX", lambda: jnp.ones(ABSURD).block_until_ready()),
]


def main() -> None:
    for name, provoke in PROVOCATIONS:
        try:
            provoke()
        except Exception as error:
            kinds = [[type(seen).__name__, str(seen)] for seen in places.chain(error)]
            found = diagnose.find(error)
            told = diagnose.explain(error)
            print(json.dumps([name, found.name if found else str(kinds), str(told), told.exit_code]), flush=True)
        else:
            print(json.dumps([name, "nothing happened", "", 0]))


if __name__ == "__main__":
    main()
