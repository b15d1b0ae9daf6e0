"""Models for `--mode=parity`, one fault each: `--model=tests.parity_models --model_options='fault="..."'`."""

import dataclasses
import random
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Options:
    """fault: which one; none: a model that is the same on any number of replicas."""

    fault: str = "none"


class Centred(keras.layers.Layer):
    """Depends on the other examples."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x - keras.ops.mean(x, axis=0)


class AsksForReplica(keras.layers.Layer):
    """Depends on the replica."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        return x * (1.0 + tf.cast(replica.replica_id_in_sync_group if replica else 0, x.dtype))


class Noise(keras.layers.Layer):
    """Draws from TensorFlow's own state."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + 0.1 * tf.random.normal(tf.shape(x))


class Counter(keras.layers.Layer):
    """Counts positive activations in an integer."""

    def build(self, shape: tuple) -> None:
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.count.assign(self.count + tf.reduce_sum(tf.cast(x > 0, tf.int32)))
        return x


class Exchanging(keras.layers.Layer):
    """Meets the other replicas in the middle of the pass, and changes nothing."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        if replica is None:
            return x
        return x + 0.0 * replica.all_reduce(tf.distribute.ReduceOp.MEAN, keras.ops.mean(x))


class ExchangingInFunction(Exchanging):
    """Does so within a tf.function, from where replicas cannot meet."""

    def call(self, x: Any) -> Any:
        return tf.function(super().call, autograph=False)(x)


class RunningPeak(keras.layers.Layer):
    """Keeps a maximum over the batch, which is no mean."""

    def build(self, shape: tuple) -> None:
        self.peak = self.add_weight(shape=(), initializer="zeros", trainable=False, name="peak")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.peak.assign(keras.ops.max(x))
        return x


class Python(keras.layers.Layer):
    """Calls back into Python, as XLA cannot."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = tf.numpy_function(lambda array: array, [x], x.dtype)
        return x + tf.stop_gradient(tf.ensure_shape(y, x.shape))


class Overflow(keras.layers.Layer):
    """Casts what does not fit: to the smallest integer on an x86 CPU, to the largest with XLA."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        huge = tf.cast(1e20 * (1.0 + tf.stop_gradient(x)), tf.int32)
        return x * (1.0 + tf.cast(huge > 0, x.dtype))


class AlwaysNoisy(keras.layers.Layer):
    """Draws from a generator of Keras', in training or not."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + 0.1 * keras.random.normal(tf.shape(x), seed=self.generator)


class MeanOfPeaks(keras.metrics.Mean):
    """Averages what it finds in each batch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.max(y_pred))


class MeanOfMeans(keras.metrics.Mean):
    """Averages the mean of each batch, whatever it holds."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = keras.ops.max(y_pred, axis=-1)  # [b]
        weights = keras.ops.ones_like(values) if sample_weight is None else sample_weight
        super().update_state(keras.ops.sum(values * weights) / keras.ops.sum(weights))


def _crossentropy(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def divided_twice(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A mean that is divided by the batch once more."""
    return keras.ops.mean(_crossentropy(y_true, y_pred)) / tf.cast(tf.shape(y_true)[0], tf.float32)


def by_replicas(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """As TensorFlow's guide for a loop of one's own asks for."""
    return keras.ops.mean(_crossentropy(y_true, y_pred)) / tf.distribute.get_strategy().num_replicas_in_sync


def per_positive(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Divides by what it finds in the batch."""
    of_class = tf.cast(y_true < 3, tf.float32)
    return keras.ops.sum(of_class * _crossentropy(y_true, y_pred)) / (1.0 + keras.ops.sum(of_class))


def hardest(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Learns from the worst examples of the batch, of which it wants to see enough."""
    return keras.ops.mean(keras.ops.top_k(_crossentropy(y_true, y_pred), 6)[0])


LOSSES = {f.__name__: f for f in (hardest, divided_twice, by_replicas, per_positive)}
METRICS = {"mean_of_peaks": MeanOfPeaks, "mean_of_means": MeanOfMeans}
LAYERS = {
    "batch_norm": keras.layers.BatchNormalization,
    "centred": Centred,
    "replica": AsksForReplica,
    "exchanging": Exchanging,
    "exchanging_in_function": ExchangingInFunction,
    "noise": Noise,
    "counter": Counter,
    "spectral": lambda name: keras.layers.SpectralNormalization(keras.layers.Dense(12), name=name),
    "peak": RunningPeak,
    "python": Python,
    "overflow": Overflow,
    "always_noisy": AlwaysNoisy,
}


class OwnStep(keras.Model):
    """Sums its loss by hand."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.own_loss = keras.metrics.Mean(name="own_loss")

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(_crossentropy(y, self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.own_loss.update_state(loss)
        return {"own_loss": self.own_loss.result()}


def build(options: Options, spec: Any) -> keras.Model:
    """[B, H, W, C] uint8 -> [B, classes]."""
    faults = options.fault.split("+")
    image = keras.Input(spec.inputs.shape, dtype=spec.inputs.dtype)
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    x = keras.layers.Dense(12, activation="relu", name="hidden")(x)
    for fault in faults:
        if fault in LAYERS:
            x = LAYERS[fault](name=f"the_{fault}")(x)
    if "dropout" in faults:
        x = keras.layers.Dropout(0.3, name="the_dropout")(x)
    if "unseeded" in faults:
        x = keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(random.SystemRandom().random()))(x)
    logits = keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x)
    return (OwnStep if "own_step" in faults else keras.Model)(image, logits)


def compile_args(options: Options, spec: Any) -> dict:
    """What the fault asks for."""
    arguments: dict = {}
    for fault in options.fault.split("+"):
        if fault in LOSSES:
            arguments["loss"] = LOSSES[fault]
        if fault == "reduction_sum":
            arguments["loss"] = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        if fault in METRICS:
            arguments["metrics"] = [METRICS[fault](name=fault)]
    return arguments
