"""Evaluation counts every example exactly once, whatever the size of the test set and the number of replicas."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import pipeline
from data.datasets import digits
from tests.conftest import Trainer
from trainer.training import Position

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model trained for so few steps that it is often wrong."""
    directory = tmp_path_factory.mktemp("evaluated")
    flags = ["--model=cnn", "--global_batch_size=64", "--train_steps=12", "--learning_rate=0.003"]
    Trainer(digits_dir).run(f"--model_dir={directory}", *flags)
    return directory


class Sized(digits.Digits, skip_registration=True):
    """Digits with a test split of NUM_TEST examples."""

    NUM_TEST = 0

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        images, labels = digits.load()
        return {
            "train": self._generate_examples(images, labels, np.arange(1000)),
            "test": self._generate_examples(images, labels, np.arange(1000, 1000 + self.NUM_TEST)),
        }


# Each size and each number of replicas; what they add to one another is for the nightly tests.
CASES = [(1, 2), (7, 1), (297, 2), (298, 1)]
OTHER_CASES = [(1, 1), (7, 2), (297, 1), (298, 2)]


@pytest.mark.parametrize(
    ("num_examples", "num_replicas"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHER_CASES)],
)
def test_accuracy_is_numpys_on_the_export(
    model_dir: pathlib.Path, trainer: Trainer, tmp_path: pathlib.Path, num_examples: int, num_replicas: int
) -> None:
    class Dataset(Sized, skip_registration=True):
        NUM_TEST = num_examples

    builder = Dataset(data_dir=str(tmp_path / "data"))
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=1))
    dataset = pipeline.open_dataset(str(builder.data_path))
    batch = pipeline.eval_batches(dataset, global_batch_size=num_examples, per_replica_batch_size=num_examples)
    images, labels, _ = (tensor.numpy() for tensor in next(iter(batch)))
    served = tf.saved_model.load(str(model_dir / "export")).signatures["serving_default"]
    logits = served(image=tf.constant(images))["logits"].numpy()
    right = int((logits.argmax(axis=-1) == labels).sum())
    loss = float(np.mean(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(num_examples), labels]))
    flags = ["--mode=eval", f"--dataset={builder.data_path}", f"--replicas={num_replicas}", "--steps_per_loop=2"]
    trainer.run(f"--model_dir={model_dir}", *flags)
    record = json.loads((model_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["eval/accuracy"] == np.float32(right) / np.float32(num_examples)
    assert record["eval/loss"] == pytest.approx(loss, abs=1e-5)


def test_a_checkpoint_is_not_judged_by_the_metrics_of_another_step() -> None:
    at = Position(step=20, evaluated=20, metrics={"loss": 0.5})
    assert at.facts()["metrics"] == {"loss": 0.5}
    at.step = 30
    assert at.facts() == {"evaluated": 20, "metrics": {}, "passed_over": []}
