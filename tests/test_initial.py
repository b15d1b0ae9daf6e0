"""Weights that a run begins with, from a checkpoint of the other backend."""

import pathlib
from types import SimpleNamespace

import keras
import numpy as np

from tests.devices import one_replica
from trainer import replicated
from trainer.checkpoints.store import Checkpoints
from trainer.modes import initial


def _table() -> replicated.Replicated:
    x = given = keras.Input((3,))
    x = keras.layers.Normalization(name="numbers")(x)
    model = keras.Model(given, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    return replicated.Replicated(model, one_replica(), (keras.KerasTensor((4, 3)), keras.KerasTensor((4, 1))))


def test_counts_of_the_other_backend(tmp_path: pathlib.Path) -> None:
    """Normalization counts its examples in int32 on JAX, and in int64 on TensorFlow."""
    trained = _table()
    assert trained.signature()["model/numbers/count"][1] == "int64"
    arrays = trained.state() | {"model/numbers/count": np.int32(7), "model/numbers/mean": np.full(3, 2, np.float32)}
    saves = Checkpoints(str(tmp_path / "checkpoints"), keep=1, keep_best=0, best_metric="loss", best_goal="min")
    saves.save(5, {name: np.asarray(array) for name, array in arrays.items()}, {"metrics": {}})
    saves.close()
    run = SimpleNamespace(config=SimpleNamespace(init_fresh=""), replicated=trained)
    initial.load_weights(run, str(tmp_path))
    state = trained.state()
    assert state["model/numbers/count"] == 7 and state["model/numbers/count"].dtype == np.int64
    np.testing.assert_array_equal(state["model/numbers/mean"], [2, 2, 2])
