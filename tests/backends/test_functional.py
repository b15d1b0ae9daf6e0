"""The TensorFlow step of tensors keeps what layers assign to on the way, wherever it is."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.devices import one_replica
from trainer import replicated
from trainer.cluster import Cluster
from trainer.errors import ConfigError

STEPS, BATCH = 3, 4
SPEC = (keras.KerasTensor((BATCH, 2)), keras.KerasTensor((BATCH, 2)))
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
    return replicated.Replicated(model, devices, SPEC, microbatches=microbatches)


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


class Counting(keras.layers.Layer):
    """Counts its calls within something that TensorFlow traces by itself."""

    def __init__(self, within: Callable):
        super().__init__()
        self.within = within
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.within(lambda: self.calls.assign(self.calls + 1.0))
        return x


def in_branch(count: Callable) -> None:
    tf.cond(tf.constant(True), lambda: [count(), tf.constant(0)][1], lambda: tf.constant(1))


@pytest.mark.parametrize("within", [in_branch, lambda count: tf.function(count)()], ids=["branch", "function"])
def test_what_is_assigned_within_a_branch_or_a_function_is_refused(devices: Cluster, within: Callable) -> None:
    with devices.scope():
        model = keras.Sequential([keras.Input((2,)), Counting(within), keras.layers.Dense(2)])
        model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    trained = replicated.Replicated(model, devices, SPEC)
    with pytest.raises(ConfigError, match=r"calls within a tf.function, a branch or a loop.*super\(\).train_step"):
        trained.run_train_loop(iter(batches()), 1)


class Flat(keras.Model):
    """Is to have small gradients by its weights of what it predicts."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            size = keras.ops.mean(keras.ops.square(self(x)))
        *_, kernel, bias = tape.gradient(size, self.trainable_variables)
        penalty = keras.ops.sum(keras.ops.square(kernel)) + keras.ops.sum(keras.ops.square(bias))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + penalty


def spectral() -> keras.Model:
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.SpectralNormalization(keras.layers.Dense(2), power_iterations=2)(inputs))


def flat() -> keras.Model:
    inputs = keras.Input((2,))
    return Flat(inputs, keras.layers.Dense(2)(keras.layers.Dense(3, activation="tanh")(inputs)))


@pytest.mark.parametrize("make", [spectral, flat])
def test_what_depends_on_weights_otherwise_trains_as_in_keras(devices: Cluster, make: Callable) -> None:
    """One layer assigns to trainable weights, and gradients are by what it has made of them; a loss has some in it."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((BATCH, 2), np.float32) for _ in range(2))

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        made = make()
        made.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
        return made

    with devices.scope():
        ours, theirs = model(), model()
    theirs.fit(x, y, batch_size=BATCH, epochs=STEPS, shuffle=False, verbose=0)
    trained = replicated.Replicated(ours, devices, SPEC)
    trained.run_train_loop(iter(tf.data.Dataset.from_tensors((x, y)).repeat()), STEPS)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-5, err_msg=mine.path)


@pytest.mark.parametrize("again", [None, lambda: iter(batches())], ids=["waiting", "not waiting"])
def test_the_gradient_norm_is_that_of_the_loss_whatever_scales_it(devices: Cluster, again: Callable | None) -> None:
    norms = []
    for factor in (None, 1024.0):
        with devices.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_initializer="ones")])
            optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=factor)
            model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        trained = replicated.Replicated(model, devices, SPEC)
        norms.append(trained.run_train_loop(iter(batches()), STEPS, again).logs["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
