"""The TensorFlow step of tensors keeps what layers assign to on the way, wherever it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.devices import one_replica
from trainer import replicated
from trainer.cluster import Cluster
from trainer.errors import ConfigError

STEPS, BATCH = 3, 4
BESIDE: list[keras.Variable] = []  # no layer tracks what stands here


class Assigning(keras.layers.Layer):
    """Counts its calls beside the model, and holds its trainable scale at what the last input was at most."""

    def build(self, shape: tuple) -> None:
        BESIDE[:] = [keras.Variable(0.0, trainable=False)]
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:  # [B, 2]
        if training:
            BESIDE[0].assign_add(1.0)
            self.calls.assign_add(1.0)
            self.scale.assign(keras.ops.max(x))
        return x * self.scale


@pytest.fixture(scope="module")
def devices() -> Cluster:
    return one_replica()


def replicated_model(devices: Cluster, microbatches: int = 1) -> replicated.Replicated:
    with devices.scope():
        inputs = keras.Input((2,))
        model = keras.Model(inputs, Assigning()(inputs))
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse", jit_compile=False)
    spec = (keras.KerasTensor((BATCH, 2)), keras.KerasTensor((BATCH, 2)))
    return replicated.Replicated(model, devices, spec, microbatches=microbatches)


def batches() -> tf.data.Dataset:
    """The step from 0 on, as each value of x and y: a loss of (scale x - y)^2, its gradient 2 (scale x - y) x."""
    steps = tf.data.Dataset.range(1, STEPS + 1).map(lambda step: tf.fill([BATCH, 2], tf.cast(step, tf.float32)))
    return tf.data.Dataset.zip(steps, steps)


def test_what_a_layer_assigns_is_kept(devices: Cluster) -> None:
    trained = replicated_model(devices)
    layer = trained.model.layers[-1]
    trained.run_train_loop(iter(batches()), STEPS)
    assert (float(BESIDE[0]), float(layer.calls)) == (STEPS, STEPS)
    # The last step: the layer sets the scale to 3, and the update comes on top, its gradient 2 (3 * 3 - 3) * 3 = 36.
    np.testing.assert_allclose(float(layer.scale), 3 - 0.5 * 36, rtol=1e-6)


def test_parts_of_a_batch_refuse_it(devices: Cluster) -> None:
    trained = replicated_model(devices, microbatches=2)
    with pytest.raises(ConfigError, match="assigns to"):
        trained.run_train_loop(iter(batches()), STEPS)


def test_a_layer_that_normalises_its_kernel_trains_as_in_keras(devices: Cluster) -> None:
    """It assigns to trainable weights; gradients are by what it has made of them."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((BATCH, 2), np.float32) for _ in range(2))

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        made = keras.Model(
            inputs, keras.layers.SpectralNormalization(keras.layers.Dense(2), power_iterations=2)(inputs)
        )
        made.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
        return made

    with devices.scope():
        ours, theirs = model(), model()
    theirs.fit(x, y, batch_size=BATCH, epochs=STEPS, shuffle=False, verbose=0)
    spec = (keras.KerasTensor((BATCH, 2)), keras.KerasTensor((BATCH, 2)))
    trained = replicated.Replicated(ours, devices, spec)
    trained.run_train_loop(iter(tf.data.Dataset.from_tensors((x, y)).repeat()), STEPS)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-5, err_msg=mine.path)
