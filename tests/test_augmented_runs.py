"""Runs with every augmentation on: the same on 1 and 2 replicas, compiled or not, resumed or not, and in all modes."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import augmented_worker
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ, metrics_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("augmented") / "found.npz"
    done = subprocess.run(
        [sys.executable, "-m", "tests.augmented_worker", str(path)],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


def _of(found: dict[str, np.ndarray], run: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{run}/"): array for key, array in found.items() if key.startswith(f"{run}/")}


@pytest.mark.parametrize("other", ["two", "xla"])
def test_replicas_and_xla_change_nothing(found: dict[str, np.ndarray], other: str) -> None:
    one, many = _of(found, "one"), _of(found, other)
    assert one.keys() == many.keys() and "log/accuracy" in one
    for key, array in one.items():
        np.testing.assert_allclose(many[key], array, rtol=0, atol=1e-5, err_msg=key)


def test_a_resumed_run_ends_with_the_same_bits(found: dict[str, np.ndarray]) -> None:
    whole, resumed = _of(found, "one"), _of(found, "resumed")
    for key, array in whole.items():
        np.testing.assert_array_equal(resumed[key], array, err_msg=key)


def test_postmortem_parity_and_preflight_see_the_examples_that_are_trained_on(found: dict[str, np.ndarray]) -> None:
    seen = _of(found, "seen")
    np.testing.assert_allclose(seen["postmortem_loss"], seen["loss"], atol=1e-5)
    labels = seen["parity_labels"]
    assert labels.shape == (augmented_worker.BATCH, augmented_worker.CLASSES)
    np.testing.assert_allclose(labels.sum(axis=1), 1, atol=1e-5)
    assert (np.sort(labels, axis=1)[:, -2] > 0.05).any(), "some are mixed"
    assert not seen["obstacles"].size, seen["obstacles"]


def test_a_run_says_what_happens_where_and_evaluates_labels_as_stored(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    augmented = ["--crop_padding=1", "--rand_augment=1", "--mixup=0.2", "--label_smoothing=0.1"]
    flags = ["--model=mlp", "--train_epochs=6", "--global_batch_size=50", f"--model_dir={tmp_path}", *augmented]
    done = trainer.run(*flags)
    said = "crop of the padded image, RandAugment on the host; mixup, label smoothing on the device"
    assert f"augmentation  {said}" in done.stdout
    records = metrics_of(tmp_path)
    assert records[-1]["eval/accuracy"] > 0.75
    # Labels that are smoothed, and mixed, have an entropy that no model gets below.
    trained = [record["train/loss"] for record in records if "train/loss" in record]
    assert records[-1]["eval/loss"] < trained[-1] - 0.2
    refused = trainer.run(*flags, "--global_batch_size=75", "--allow_config_change", code=78)
    assert "each replica must have an even number of them" in refused.stderr
