"""The moving average of the weights is what is evaluated and handed on; training goes on with the weights."""

import numpy as np
import pytest
import tensorflow as tf

from tests import replicas_worker
from tests.devices import one_replica
from trainer import replicated
from trainer.backends.tensorflow.cluster import StrategyCluster

CASE = replicas_worker.Case(replicas_worker.dense, replicas_worker.SGD | {"ema_momentum": 0.9})
STEPS = 12


@pytest.fixture(scope="module")
def trained() -> replicated.Replicated:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    devices = StrategyCluster(strategy=strategy, kind="cpu", num_replicas=1, description="mirrored")
    trained = replicas_worker.make(CASE, devices)
    trained.run_train_loop(replicas_worker.batches(CASE, devices), STEPS)
    return trained


def _evaluated(trained: replicated.Replicated) -> dict[str, float]:
    images, labels = replicas_worker.digits()
    rows = slice(0, 2 * replicas_worker.GLOBAL_BATCH)
    mask = np.ones(len(labels[rows]), "float32")
    batches = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows], mask))
    logs = trained.evaluate(iter(batches.batch(replicas_worker.GLOBAL_BATCH, drop_remainder=True)), [(0, 1), (1, 2)])
    assert logs is not None
    return logs


def test_averages_are_evaluated_and_weights_stay(trained: replicated.Replicated) -> None:
    before = trained.state()
    averages = {name: array for name, array in before.items() if name.startswith(replicated.AVERAGES)}
    assert len(averages) == len(trained.model.trainable_variables)
    found = _evaluated(trained)
    for name, array in trained.state().items():
        if not name.startswith(replicated.METRICS):
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    best = replicated.best_weights(before)
    assert any(not np.array_equal(best[name], before[name]) for name in best)
    trained.load_state(best)  # weights and averages are the same now
    assert _evaluated(trained) == pytest.approx(found, abs=1e-6)
    trained.load_state({name: before[name] for name in best})
    with trained.averaged():
        assert not tf.distribute.has_strategy(), "what is exported is not of the strategy"
        for name, array in best.items():
            np.testing.assert_array_equal(trained.state()[name], array)


def test_a_first_step_that_is_passed_over_leaves_no_average_of_zeros() -> None:
    trained = replicas_worker.make(CASE, one_replica())
    trained.pass_over(0, 1)
    state = trained.state()
    for name, array in state.items():
        if name.startswith(replicated.AVERAGES):
            weight = state[f"{replicated.MODEL}{name.removeprefix(replicated.AVERAGES)}"]
            np.testing.assert_array_equal(array, weight, err_msg=name)
