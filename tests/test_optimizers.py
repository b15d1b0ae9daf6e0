"""Schedules and optimizers against their definition."""

import math

import keras
import numpy as np
import pytest

from trainer import optimizers
from trainer.config import Config


@pytest.mark.parametrize("warmup", [0, 10])
def test_schedule_is_linear_then_cosine(warmup: int) -> None:
    schedule = optimizers.schedule(0.5, warmup, 100)
    for step in (0, 1, 5, 9, 10, 11, 50, 99, 100):
        if step < warmup:
            expected = 0.5 * step / warmup
        else:
            expected = 0.25 * (1 + math.cos(math.pi * (step - warmup) / (100 - warmup)))
        assert float(schedule(step)) == pytest.approx(expected, abs=1e-7), step


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_leaves_out_biases_and_norms(name: str) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    optimizer = optimizers.build(Config(optimizer=name, learning_rate=0.1, weight_decay=0.5), train_steps=10)
    optimizer.build(model.trainable_variables)
    optimizer.apply([np.zeros(v.shape, "float32") for v in model.trainable_variables])
    after = {v.name: v.numpy() for v in model.trainable_variables}
    np.testing.assert_allclose(after["kernel"], 1 - 0.1 * 0.5)
    for left_out in ("bias", "gamma", "beta"):
        np.testing.assert_array_equal(after[left_out], 1.0)
