"""Tables and several labels at once, as runs: on 1 and 2 replicas, resumed, evaluated with padding, exported."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from sklearn import metrics as sklearn_metrics

from data import pipeline
from tests import tables_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import config, inputs, plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What `tables_worker` leaves behind."""
    directory = tmp_path_factory.mktemp("tables")
    command = [sys.executable, "-m", "tests.tables_worker", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def found(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Its arrays."""
    return dict(np.load(folder / "found.npz"))


def _part(found: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): array for key, array in found.items() if key.startswith(prefix)}


def test_the_statistics_are_those_of_the_training_split(folder: pathlib.Path, found: dict) -> None:
    dataset = pipeline.open_dataset("diabetes", str(folder / "data"))
    count = dataset.splits["train"]
    [(x, y, mask)] = pipeline.eval_batches(dataset, "train", global_batch_size=count, per_replica_batch_size=count)
    assert mask.numpy().all()
    columns = [name for name, array in dataset.spec().inputs.items() if array.below is None]
    assert len(columns) == 9
    numbers = np.stack([x[name].numpy() for name in columns], axis=1).astype(np.float64)
    adapted = _part(found, "regression/1/adapted/model/")
    for layer, values in (("numbers", numbers), ("label", y.numpy().astype(np.float64)[:, None])):
        np.testing.assert_allclose(adapted[f"{layer}/mean"], values.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(adapted[f"{layer}/variance"], values.var(axis=0), rtol=1e-6)
        for what in ("mean", "variance"):
            ended = found[f"regression/1/ended/model/{layer}/{what}"]
            np.testing.assert_array_equal(ended, adapted[f"{layer}/{what}"], err_msg="training leaves them alone")


def _patients(batches: tf.data.Dataset) -> list[tuple]:
    """Something of each that no two of them share."""
    columns = [[x[name].numpy() for name in ("age", "bmi", "s1", "s6")] + [y.numpy()] for x, y in batches]
    return [patient for batch in columns for patient in zip(*batch, strict=True)]


@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (100, 1), (100, 2), (342, 1), (342, 2)])
def test_the_first_examples_come_once_each(folder: pathlib.Path, count: int, replicas: int) -> None:
    # 342 are ten batches and 22 rows of the eleventh, where rows of the second epoch stand between them.
    settings = config.merge(tables_worker.OPTIONS | {"dataset": "diabetes", "data_dir": str(folder / "data"),
                                                     "train_steps": 1, "model_dir": str(folder / "none")})  # fmt: skip
    read = inputs.open_inputs(settings, "")
    made = plan.resolve(settings, num_replicas=replicas, num_train_examples=342, num_eval_examples=100)
    context = tf.distribute.InputContext()
    found = _patients(inputs.first_examples(read, made, count))
    order = _patients(read.train_batches(made, context, 0).take(11 * replicas))
    assert len(found) == len(set(found)) == count
    assert found[:320] == order[: min(count, 320)], "in the order of training"


@pytest.mark.parametrize("case", tables_worker.CASES)
def test_two_replicas_train_and_measure_as_one(found: dict, case: str) -> None:
    for kind in ("adapted/model", "ended/model", "log"):
        one, two = (_part(found, f"{case}/{n}/{kind}/") for n in (1, 2))
        assert one.keys() == two.keys()
        assert one
        for name, array in one.items():
            np.testing.assert_allclose(two[name], array, rtol=1e-5, atol=1e-5, err_msg=f"{kind} {name}")
    for name, copies in _part(found, f"{case}/2/copies/").items():
        np.testing.assert_array_equal(*copies, err_msg=name)


def test_a_resumed_run_keeps_the_statistics_and_ends_with_the_same_bits(found: dict) -> None:
    resumed, ended = (_part(found, f"{tables_worker.RESUMED}/1/{kind}/") for kind in ("resumed", "ended"))
    weights = [name for name in ended if not name.startswith("metrics/")]  # of the evaluation in between
    assert any("label/mean" in name for name in weights)
    for name in weights:
        np.testing.assert_array_equal(resumed[name], ended[name], err_msg=name)


def test_regression_is_evaluated_and_exported_in_the_units_of_the_label(found: dict) -> None:
    export, log = _part(found, "regression/1/export/"), _part(found, "regression/1/log/")
    y, prediction = export["label"], export["prediction"]
    assert y.shape == prediction.shape == (100,)
    assert 25 <= y.min() < y.max() <= 346
    assert log["eval_loss"] == pytest.approx(sklearn_metrics.mean_squared_error(y, prediction), rel=1e-5)
    assert log["eval_mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(y, prediction), rel=1e-5)
    assert log["eval_rmse"] == pytest.approx(sklearn_metrics.mean_squared_error(y, prediction) ** 0.5, rel=1e-5)
    assert log["eval_r2"] == pytest.approx(sklearn_metrics.r2_score(y, prediction), abs=1e-5)
    # 12 steps from 0 would be nowhere near: what is learned is how far a label is from the mean.
    assert log["eval_r2"] > 0.1


def test_several_labels_are_evaluated_and_exported(folder: pathlib.Path, found: dict) -> None:
    export, log = _part(found, "multi_label/1/export/"), _part(found, "multi_label/1/log/")
    y, logits = export["label"], export["logits"].astype(np.float64)
    assert y.shape == logits.shape == (297, 4)
    probabilities = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(export["probabilities"], probabilities, atol=1e-6)
    assert log["eval_loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.where(y, logits, -logits)))), rel=1e-5)
    assert log["eval_accuracy"] == pytest.approx(np.mean((logits > 0) == y), abs=1e-6)
    assert log["eval_f1"] == pytest.approx(sklearn_metrics.f1_score(y, logits > 0, average="macro"), abs=1e-5)
    assert log["eval_roc_auc"] == pytest.approx(sklearn_metrics.roc_auc_score(y, logits, average="macro"), abs=5e-3)
