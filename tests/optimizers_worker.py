"""Trains a small model by each optimizer on one and on two virtual replicas, for tests to compare.

`python -m tests.optimizers_worker OUT.npz NAME ...` stores, as `<optimizer>/<replicas>/<which>/<array>`, the state
after all steps, again after going on from that of a step before, and for one optimizer after each of more steps.
Clipping, weight decay and averages are on.
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import cluster, optimizers, replicated
from trainer.config import Config
from trainer.plan import LearningRate

STEPS, SAVED, BATCH, FEATURES, CLASSES = 5, 3, 16, 8, 3
EMA_MOMENTUM, EMA_STEPS, EMA_OF = 0.9, 20, "lamb"
NO_DECAY = "*bias, *gamma, logits/*"


def options(name: str) -> dict[str, Any]:
    """What is on besides the optimizer; ftrl refuses two of them."""
    shared = {"optimizer": name, "global_clipnorm": 0.5, "ema_momentum": EMA_MOMENTUM}
    return shared if name == "ftrl" else {**shared, "weight_decay": 0.1, "no_decay": NO_DECAY}


def make(name: str, devices: cluster.Cluster) -> replicated.Replicated:
    """A classifier of vectors with biases and a norm."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    planned = LearningRate("cosine", 0.05, 2 * EMA_STEPS, warmup_steps=0 if name == "ftrl" else 2, final_factor=0.1)
    with devices.scope():
        vector = keras.Input((FEATURES,))
        x = keras.layers.RMSNormalization()(keras.layers.Dense(12, activation="relu")(vector))
        model = keras.Model(vector, keras.layers.Dense(CLASSES, name="logits")(x))
        model.compile(
            optimizers.build(Config(**options(name)), planned),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    share = BATCH // devices.num_replicas
    spec = keras.KerasTensor((share, FEATURES)), keras.KerasTensor((share,), dtype="int32")
    return replicated.Replicated(model, devices, spec)


def batches(devices: cluster.Cluster, begin: int) -> Any:
    """The same examples in the same order on any number of replicas, from step `begin` on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EMA_STEPS * BATCH, FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, EMA_STEPS * BATCH).astype("int32")

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        share = BATCH // devices.num_replicas
        return tf.data.Dataset.from_tensor_slices((x, y)).skip(begin * BATCH).batch(share, drop_remainder=True)

    return iter(devices.distribute(local))


def train(name: str, devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """State after all steps, uninterrupted and resumed, and after each."""
    trained = make(name, devices)
    begin = trained.state()
    data = batches(devices, 0)
    trained.run_train_loop(data, SAVED)
    saved = trained.state()
    trained.run_train_loop(data, STEPS - SAVED)
    uninterrupted = trained.state()
    trained.restore(saved, "the state before")
    trained.run_train_loop(batches(devices, SAVED), STEPS - SAVED)
    states = {"uninterrupted": uninterrupted, "resumed": trained.state()}
    if name == EMA_OF:
        trained.restore(begin, "the state at first")
        data = batches(devices, 0)
        for step in range(EMA_STEPS):
            trained.run_train_loop(data, 1)
            states[str(step)] = trained.state()
    return {f"{name}/{devices.num_replicas}/{of}/{key}": a for of, state in states.items() for key, a in state.items()}


def main() -> None:
    """Writes the file."""
    path, *names = sys.argv[1:]
    clusters = cluster.rehearse(2)
    tf.get_logger().setLevel("ERROR")  # it warns of retracing, and each optimizer is a function of its own
    found = {key: array for name in names for devices in clusters for key, array in train(name, devices).items()}
    np.savez(path, **found)


if __name__ == "__main__":
    main()
