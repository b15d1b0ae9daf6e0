"""Trains small models on N virtual replicas and stores what came out, for tests that compare 1, 2 and 4 of them.

`python -m tests.replicas_worker NUM_REPLICAS OUT.npz [CASE ...]`, all cases by default, and steps that are not finite.
With cases named, no case of XLA but those, and no steps that are not finite.
One process a number of replicas, since TensorFlow's devices are fixed once used. Every case trains STEPS steps on the
same records in the same order; keys are `<case>/<what>`.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from trainer import backend, cluster, hardware, internals, optimizers, plan, replicated
from trainer.config import Config

GLOBAL_BATCH = 64
STEPS = 60
LOOPS_BY_ONE = [(step, step + 1) for step in range(STEPS)]
ONE_LOOP = [(0, 1), (1, 51), (51, STEPS)]


@dataclasses.dataclass(frozen=True)
class Case:
    """One training: how the model is made, its optimizer options, and how it runs (`options` of `Replicated`)."""

    model: Callable[[], keras.Model]
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: Any = None
    loops: Any = None
    xla: bool = False
    precision: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def dense(**options: Any) -> keras.Model:
    """[B, 8, 8] -> [B, 10] logits."""
    return keras.Model(*_dense_graph(**options))


def _dense_graph(
    *,
    l2: float = 0.0,
    noise: bool = False,
    batch_norm: bool = False,
    synchronized: bool = False,
    dropout: float = 0.0,
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    image = keras.Input((8, 8))
    x = keras.layers.Flatten()(image)
    x = keras.layers.Dense(32, activation="relu", kernel_regularizer=keras.regularizers.L2(l2) if l2 else None)(x)
    if noise:
        x = ActivityLoss()(x)
    if batch_norm:
        x = keras.layers.BatchNormalization(momentum=0.8, synchronized=synchronized)(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return image, keras.layers.Dense(10, dtype="float32")(x)


class ActivityLoss(keras.layers.Layer):
    """Adds a loss that depends on the batch."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Block(keras.layers.Layer):
    """A layer of layers with all that a layer may have: random numbers, statistics, a loss and a metric of its own."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(64, activation="relu")
        self.dropout = keras.layers.Dropout(0.3)
        self.scale = RunningScale()
        self.size = keras.metrics.Mean(name=f"{self.name}_size")

    def build(self, shape: tuple) -> None:
        for layer in (self.hidden, self.dropout, self.scale):
            layer.build(shape)
        super().build(shape)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        y = self.dropout(self.hidden(x), training=training)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        if training:
            self.size.update_state(keras.ops.abs(y))
        return x + self.scale(y, training=training)


def blocks() -> keras.Model:
    """[B, 8, 8] -> [B, 10] logits."""
    image = keras.Input((8, 8))
    x = Block(name="block_1")(Block(name="block_0")(keras.layers.Flatten()(image)))
    return keras.Model(image, keras.layers.Dense(10)(x))


class OwnTrainStep(keras.Model):
    """Computes its loss by hand, as for one device, and keeps a metric of its own."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.own_loss = keras.metrics.Mean(name="own_loss")

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.own_loss.update_state(loss)
        return {"own_loss": self.own_loss.result()}


class OwnTrainStepOnJax(OwnTrainStep):
    """The same, as Keras wants it there."""

    def train_step(self, state: tuple, data: tuple) -> tuple[dict, tuple]:
        import jax

        weights, others, optimizer, metrics = state
        x, y = data

        def loss_of(weights: list) -> Any:
            y_pred, _ = self.stateless_call(weights, others, x, training=True)
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
        with keras.StatelessScope(list(zip(self.metrics_variables, metrics, strict=True))) as scope:
            self.own_loss.update_state(loss)
        metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
        return {"own_loss": loss}, (weights, others, optimizer, metrics)


class OwnComputeLoss(keras.Model):
    """Replaces only the loss, as Keras' documentation shows it: a plain mean, not scaled by anything."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


class Subclassed(keras.Model):
    """A model without a graph, with a layer that counts its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(32, activation="relu")
        self.scale = RunningScale()
        self.out = keras.layers.Dense(10)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = keras.ops.reshape(x, (-1, 64))
        return self.out(self.scale(self.hidden(x), training=training))


class RunningScale(keras.layers.Layer):
    """Reads, in training, a running mean that the step itself updates: replicas must agree on it at every step."""

    def build(self, shape: tuple) -> None:
        self.mean = self.add_weight(shape=(), initializer="ones", trainable=False, name="mean")
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="steps")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        scaled = x / (0.5 + self.mean)  # before the update: after it, the mean is that of this replica's share
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x))
            self.steps.assign(self.steps + 1)
        return scaled


class TwoInputs:
    """Marks the case whose batches are a dict of two inputs."""

    @staticmethod
    def build() -> keras.Model:
        """{"top", "bottom"}: [B, 4, 8] each -> [B, 10] logits."""
        inputs = {name: keras.Input((4, 8), name=name) for name in ("top", "bottom")}
        x = keras.layers.Concatenate()([keras.layers.Flatten()(tensor) for tensor in inputs.values()])
        return keras.Model(inputs, keras.layers.Dense(10)(x))


def scalar_loss(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A loss function that returns one number; Keras scales only those that return one an example."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


SGD = {"optimizer": "sgd", "learning_rate": 0.05}
CASES = {
    "adamw": Case(dense, {"weight_decay": 0.1, "learning_rate": 0.01}),
    "by_one": Case(dense, {"weight_decay": 0.1, "learning_rate": 0.01}, loops=LOOPS_BY_ONE),
    "momentum": Case(dense, SGD | {"weight_decay": 0.01, "warmup": "10 steps"}),
    "clipvalue": Case(dense, SGD | {"clipvalue": 0.01}),
    "l2": Case(functools.partial(dense, l2=0.01), SGD),
    "add_loss": Case(functools.partial(dense, noise=True), SGD),
    "scalar_loss": Case(dense, SGD, loss=scalar_loss),
    "own_train_step": Case(
        lambda: (OwnTrainStepOnJax if backend.chosen() == "jax" else OwnTrainStep)(*_dense_graph()),
        SGD | {"clipnorm": 0.05},
    ),
    "own_compute_loss": Case(lambda: OwnComputeLoss(*_dense_graph()), SGD | {"global_clipnorm": 0.1}),
    "subclassed": Case(Subclassed, SGD),
    "two_inputs": Case(TwoInputs.build, SGD),
    "bfloat16": Case(dense, SGD, precision="mixed_bfloat16"),
    "float16": Case(dense, SGD | {"global_clipnorm": 0.1}, precision="mixed_float16"),
    "xla": Case(functools.partial(dense, l2=0.01, noise=True), SGD | {"global_clipnorm": 0.1}, xla=True),
    "xla_off": Case(functools.partial(dense, l2=0.01, noise=True), SGD | {"global_clipnorm": 0.1}),
    "microbatches": Case(
        functools.partial(dense, l2=0.01, noise=True), SGD | {"global_clipnorm": 0.1}, options={"microbatches": 4}
    ),
    "blocks": Case(blocks, SGD),
    "remat": Case(blocks, SGD, options={"remat": ["block_*"]}),
    "remat_xla": Case(blocks, SGD, xla=True, options={"remat": ["block_*"], "microbatches": 2}),
    "batch_norm": Case(functools.partial(dense, batch_norm=True), SGD),
    "synchronized": Case(functools.partial(dense, batch_norm=True, synchronized=True), SGD),
}


def compiled(case: Case) -> keras.Model:
    """The case's model, compiled; under the scope of the devices."""
    config = Config(**case.optimizer, train_steps=STEPS, global_batch_size=GLOBAL_BATCH)
    planned = plan.resolve(config, num_replicas=1, num_train_examples=0, num_eval_examples=0)
    with internals.synchronized_anywhere():
        model = case.model()
    model.compile(
        optimizer=optimizers.build(config, planned.learning_rate),
        loss=case.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=False,
    )
    return model


def make(case: Case, devices: cluster.Cluster) -> replicated.Replicated:
    """The case's model on the cluster's replicas."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.precision)
    share = GLOBAL_BATCH // devices.num_replicas
    image = keras.KerasTensor((share, 8, 8))
    half = keras.KerasTensor((share, 4, 8))
    x = {"top": half, "bottom": half} if case.model is TwoInputs.build else image
    with devices.scope():
        made = replicated.Replicated(
            compiled(case), devices, (x, keras.KerasTensor((share,), dtype="int32")), xla=case.xla, **case.options
        )
    made.load_state(_begun(made))
    return made


def _begun(made: replicated.Replicated) -> dict[str, np.ndarray]:
    """Weights that do not depend on the backend, as those of Keras' initializers do."""
    generator = np.random.default_rng(0)
    shapes = {name: shape for name, (shape, _) in made.signature().items() if name.endswith("/kernel")}
    return {
        name: generator.normal(0.0, sum(shape) ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
        if name.startswith(replicated.MODEL)
    }


def batches(case: Case, devices: cluster.Cluster, *, bad_record: int | None = None) -> Any:
    """Digits in file order, for ever; `bad_record` is NaN."""
    images, labels = digits()
    if bad_record is not None:
        images[bad_record] = np.nan
    x = {"top": images[:, :4], "bottom": images[:, 4:]} if case.model is TwoInputs.build else images
    share = GLOBAL_BATCH // devices.num_replicas

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, labels)).repeat().batch(share, drop_remainder=True)

    return iter(devices.distribute(local))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """[1797, 8, 8] float32 in 0..1 and [1797] int32."""
    data = load_digits()
    return (data.images / 16.0).astype("float32"), data.target.astype("int32")


def train(name: str, devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """Trains a case and returns its logs, weights and each replica's view of its state."""
    case = CASES[name]
    trained = make(case, devices)
    iterator = batches(case, devices)
    found: dict[str, np.ndarray] = {}
    for begin, end in case.loops or ONE_LOOP:
        logs = trained.run_train_loop(iterator, end - begin).logs
    trained.check_integer_state()
    found |= {f"{name}/log/{key}": np.array(value) for key, value in logs.items()}
    for index, weight in enumerate(trained.model.get_weights()):
        found[f"{name}/weight/{index}"] = weight
    for variable in trained.model.non_trainable_variables:
        found[f"{name}/state/{variable.path.split('/')[-1]}"] = np.stack(trained.engine.copies(variable))
    return found


def batch_norm_oracle(devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """One step of batch norm: its statistics on each replica, and its input, for NumPy to average."""
    case = Case(lambda: _only_batch_norm(), SGD)
    trained = make(case, devices)
    trained.run_train_loop(batches(case, devices), 1)
    layer = next(layer for layer in trained.model.layers if isinstance(layer, keras.layers.BatchNormalization))
    return {
        f"oracle/{key}": np.stack(trained.engine.copies(variable))
        for key, variable in (("mean", layer.moving_mean), ("variance", layer.moving_variance))
    }


BAD_STEP, STEPS_OF_CALL = 7, 20
# The record in the middle of the batch of BAD_STEP.
BAD_RECORD = BAD_STEP * GLOBAL_BATCH + GLOBAL_BATCH // 2
NOT_FINITE = ("adamw", "batch_norm_and_dropout", "xla_batch_norm", "own_train_step", "float16")


def not_finite(name: str, devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """State after a call in which BAD_STEP is not finite, and after a quiet one that ends there; and on behind it.

    The call is made twice: without and with batches that can be had again.
    """
    case = {
        "batch_norm_and_dropout": Case(functools.partial(dense, batch_norm=True, dropout=0.5), SGD),
        "xla_batch_norm": Case(functools.partial(dense, batch_norm=True), SGD, xla=True),
    }.get(name) or CASES[name]
    found: dict[str, np.ndarray] = {}
    trained = make(case, devices)
    begin = trained.state()
    for kind, record, steps in (
        ("quiet", None, BAD_STEP),
        ("halted", BAD_RECORD, STEPS_OF_CALL),
        ("tried", BAD_RECORD, STEPS_OF_CALL),
    ):
        trained.load_state(begin)
        trained.reset_metrics()
        from_begin = functools.partial(batches, case, devices, bad_record=record)
        done = trained.run_train_loop(from_begin(), steps, from_begin if kind == "tried" else None)
        found |= {f"{name}/{kind}/{key}": array for key, array in trained.state().items()}
        found |= {f"{name}/{kind}/log/{key}": np.array(value) for key, value in done.logs.items()}
        found[f"{name}/{kind}/at"] = np.array(-1 if done.halted_at is None else done.halted_at)
    trained.pass_over(BAD_STEP, BAD_STEP + 1)
    done = trained.run_train_loop(batches(case, devices), STEPS_OF_CALL)
    found[f"{name}/behind/at"] = np.array(-1 if done.halted_at is None else done.halted_at)
    found[f"{name}/behind/loss"] = np.array(next(iter(done.logs.values())))
    found[f"{name}/behind/iterations"] = np.array(int(trained.model.optimizer.iterations.numpy()))
    return found


def _only_batch_norm() -> keras.Model:
    image = keras.Input((8, 8))
    x = keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Flatten()(image))
    return keras.Model(image, keras.layers.Dense(10)(x))


MASKS, MASK_BITS = 4, 4


def _replica() -> Any:
    """That of the step which is traced; 0 while a model is built."""
    if backend.chosen() == "jax":
        import jax

        with contextlib.suppress(NameError):
            return jax.lax.axis_index("replica")
        return 0
    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group if context else 0


class DropoutSum(keras.Model):
    """Shows, as metrics of MASK_BITS units each, what each of the first replicas drew, with a generator and without."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)
        self.seed = keras.random.SeedGenerator(1) if backend.chosen() == "jax" else None  # Keras wants one there
        self.out = keras.layers.Dense(10)
        self.drawn = [keras.metrics.Sum(name=f"mask_{i}") for i in range(MASKS)]

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.out(keras.ops.reshape(x, (-1, 64)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = self.dropout(keras.ops.ones((MASKS // 2, MASK_BITS)), training=True) / 2.0
        without = keras.random.uniform((MASKS // 2, MASK_BITS), seed=self.seed) < 0.5
        mask = keras.ops.concatenate([mask, keras.ops.cast(without, mask.dtype)])
        numbers = keras.ops.matmul(mask, 2.0 ** keras.ops.arange(MASK_BITS, dtype="float32"))  # [MASKS] below 16
        # Replica r adds number * 100^r: the sum, which float32 can hold, shows it in two decimal digits of its own.
        weight = keras.ops.power(100.0, keras.ops.cast(_replica(), "float32"))
        for metric, number in zip(self.drawn, keras.ops.unstack(numbers), strict=True):
            metric.update_state(number * weight)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def masks(devices: cluster.Cluster, *, with_xla: bool) -> dict[str, np.ndarray]:
    """[5, MASKS] sums that hold what each replica drew in steps 1, 2, 3 and, from the state after 1, again in 2, 3."""
    found = {}
    for xla in (False, True)[: 1 + with_xla]:
        case = Case(DropoutSum, SGD, xla=xla)
        trained = make(case, devices)
        iterator = batches(case, devices)

        def step(trained: replicated.Replicated = trained, iterator: Any = iterator) -> np.ndarray:
            trained.reset_metrics()
            logs = trained.run_train_loop(iterator, 1).logs
            return np.array([logs[f"mask_{i}"] for i in range(MASKS)])

        drawn = [step()]
        saved = trained.state()
        drawn += [step(), step()]
        trained.load_state(saved)
        drawn += [step(), step()]
        found["masks/xla" if xla else "masks/plain"] = np.stack(drawn)
    return found


def main() -> None:
    """Runs all cases and writes the file."""
    num_replicas, path = int(sys.argv[1]), sys.argv[2]
    tf.get_logger().setLevel("ERROR")  # it warns of retracing, and each case is a function of its own
    target = hardware.resolve(tpu=None, replicas=num_replicas, environ={})
    devices = cluster.connect(target, connect_timeout_secs=60)
    found: dict[str, np.ndarray] = {}
    names = sys.argv[3:]
    for name in names or CASES:
        found |= train(name, devices)
    found |= batch_norm_oracle(devices) | masks(devices, with_xla=not names and backend.chosen() != "jax")
    for name in [] if names else NOT_FINITE:
        found |= not_finite(name, devices)
    np.savez(path, **found)


if __name__ == "__main__":
    main()
