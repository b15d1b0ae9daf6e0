"""Models that cannot keep the promises on several replicas are refused, with the reason."""

import keras
import pytest
import tensorflow as tf

from tests import replicas_worker
from tests.devices import one_replica
from trainer import refusals, replicated
from trainer.errors import ConfigError


class ReturnsUntracked(replicas_worker.OwnTrainStep):
    """Returns a value that no metric keeps."""

    def train_step(self, data: tuple) -> dict:
        super().train_step(data)
        return {"loss": tf.constant(1.0)}


def test_value_that_no_metric_keeps() -> None:
    case = replicas_worker.Case(lambda: ReturnsUntracked(*replicas_worker._dense_graph()), replicas_worker.SGD)
    trained = replicas_worker.make(case, one_replica())
    with pytest.raises(ConfigError, match="returns loss, which no metric"):
        trained.run_train_loop(replicas_worker.batches(case, one_replica()), 1)


class ReturnsAll(replicas_worker.OwnTrainStep):
    """Returns what Keras' own guide does: the metrics of `compile` come as a dict in the dict."""

    def train_step(self, data: tuple) -> dict:
        super().train_step(data)
        x, y = data
        for metric in self.metrics:
            metric.update_state(*((y, self(x)) if metric.name == "compile_metrics" else (1.0,)))
        return {metric.name: metric.result() for metric in self.metrics}


def test_metrics_may_be_returned_as_keras_does() -> None:
    case = replicas_worker.Case(lambda: ReturnsAll(*replicas_worker._dense_graph()), replicas_worker.SGD)
    trained = replicas_worker.make(case, one_replica())
    logs = trained.run_train_loop(replicas_worker.batches(case, one_replica()), 1).logs
    assert {"own_loss", "loss", "accuracy"} <= logs.keys()


class Parts(keras.metrics.Mean):
    """One metric, two results."""

    def result(self):
        return {"once": super().result(), "twice": 2 * super().result()}

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


def test_parts_of_a_metric_are_reported_by_their_names_as_in_keras() -> None:
    devices = one_replica()
    with devices.scope():
        model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Parts()], jit_compile=False)
    spec = (keras.KerasTensor((64, 8, 8)), keras.KerasTensor((64,), dtype="int32"))
    batches = replicas_worker.batches(replicas_worker.CASES["adamw"], devices)
    logs = replicated.Replicated(model, devices, spec).run_train_loop(batches, 2).logs
    assert (logs["once"], logs["twice"]) == (1.0, 2.0)


def test_metric_that_nobody_updates_is_not_reported_as_zero() -> None:
    case = replicas_worker.CASES["own_train_step"]
    trained = replicas_worker.make(case, one_replica())
    logs = trained.run_train_loop(replicas_worker.batches(case, one_replica()), 2).logs
    assert list(logs) == ["own_loss", "gradient_norm"]


def test_xla_around_a_layer_that_exchanges_statistics() -> None:
    model = replicas_worker.dense(batch_norm=True, synchronized=True)

    assert "synchronized" in str(refusals.reason_against_xla(model, 2))
    assert refusals.reason_against_xla(model, 1) is None


def test_layer_that_goes_on_where_the_batch_before_has_ended() -> None:
    inputs = keras.Input((3, 2), batch_size=4)
    model = keras.Model(inputs, keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=True), name="reads")(inputs))
    model.compile(loss="mse")
    with pytest.raises(ConfigError, match=r"the layer reads \(Bidirectional\) goes on.* Received: stateful=True"):
        replicated.Replicated(model, one_replica(), (keras.KerasTensor((4, 3, 2)), keras.KerasTensor((4, 4))))


def test_summing_loss_on_several_replicas() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    case = replicas_worker.Case(replicas_worker.dense, replicas_worker.SGD, loss=loss)
    replicas_worker.make(case, one_replica())  # one replica: nothing to disagree on
    with pytest.raises(ConfigError, match="sums over the batch"):
        refusals.check_losses(loss, num_replicas=2)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 2}]
)
def test_optimizer_of_which_keras_is_not_capable_on_several_replicas(options: dict) -> None:
    optimizer = keras.optimizers.SGD(**options)
    refusals.check_optimizer(optimizer, num_replicas=1)
    with pytest.raises(ConfigError, match=list(options)[-1]):
        refusals.check_optimizer(optimizer, num_replicas=2)


def test_microbatches_of_a_train_step_that_applies_its_own_gradients() -> None:
    case = replicas_worker.Case(
        lambda: replicas_worker.OwnTrainStep(*replicas_worker._dense_graph()),
        replicas_worker.SGD,
        options={"microbatches": 2},
    )
    with pytest.raises(ConfigError, match="microbatches=2 cannot be had: the train_step of OwnTrainStep"):
        replicas_worker.make(case, one_replica())


def test_remat_of_a_layer_that_is_not_there() -> None:
    case = replicas_worker.Case(replicas_worker.blocks, replicas_worker.SGD, options={"remat": ["blok_*"]})
    with pytest.raises(ConfigError, match="matches no layer. Received: 'blok_.*block_0"):
        replicas_worker.make(case, one_replica())


class Beside(keras.layers.Layer):
    """Counts its calls in a variable that no layer knows of, and draws random numbers without a generator."""

    counter: dict = {}

    def call(self, x, training=False):
        if training and self.counter:
            self.counter["calls"].assign(self.counter["calls"] + 1)
        return x + keras.random.uniform(keras.ops.shape(x))


def test_a_step_of_arrays_does_not_lose_what_a_layer_assigns_beside_the_model() -> None:
    case = replicas_worker.Case(
        lambda: keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), Beside(), keras.layers.Dense(10)]),
        replicas_worker.SGD | {"learning_rate": 1e-30},
        options={"microbatches": 2},
    )
    trained = replicas_worker.make(case, one_replica())
    (name,) = [name for name in trained.state() if name.startswith("random/")]
    seeds = [trained.state()[name].tolist()]
    for _ in range(2):
        trained.run_train_loop(replicas_worker.batches(case, one_replica()), 1)
        seeds.append(trained.state()[name].tolist())
    assert seeds[0] != seeds[1] != seeds[2], "each step draws other numbers"
    Beside.counter["calls"] = keras.Variable(0.0, name="calls")
    try:
        trained = replicas_worker.make(case, one_replica())
        with pytest.raises(ConfigError, match=r"the variable calls, which is not one of its own.*add_weight"):
            trained.run_train_loop(replicas_worker.batches(case, one_replica()), 1)
    finally:
        Beside.counter.clear()
