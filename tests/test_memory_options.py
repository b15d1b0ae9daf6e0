"""Microbatches and rematerialisation do what they are for; that they change no numbers, test_replicated.py holds."""

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests import replicas_worker
from tests.devices import one_replica


class Noting(keras.layers.Layer):
    """Notes the size of each batch that it is traced with."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.seen: list[int | None] = []

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.seen.append(x.shape[0])
        return x * x


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [64]),
        ({"remat": ["noting"]}, [64, 64]),  # and again in the backward pass
        ({"microbatches": 4}, [16]),  # in a loop that is traced once
        ({"microbatches": 4, "remat": ["noting"]}, [16, 16]),
    ],
)
def test_what_a_step_computes(options: dict[str, Any], seen: list[int]) -> None:
    layer = Noting(name="noting")

    def model() -> keras.Model:
        image = keras.Input((8, 8))
        x = keras.layers.Dense(8)(keras.layers.Flatten()(image))  # so that a gradient comes through the layer
        return keras.Model(image, keras.layers.Dense(10)(layer(x)))

    case = replicas_worker.Case(model, replicas_worker.SGD, options=options)
    devices = one_replica()
    trained = replicas_worker.make(case, devices)
    layer.seen.clear()
    trained.run_train_loop(replicas_worker.batches(case, devices), 1)
    assert layer.seen == seen
