"""A model of the user's own, with its own loss, metrics, optimizer, train step and state, on several inputs."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.conftest import Trainer, metrics_of, state_of

pytestmark = pytest.mark.slow

MODEL = '''
"""Regression on two inputs with a train step, a loss, a metric and an optimizer of its own."""

import dataclasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 4


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + 1.0)
        return x


class Net(keras.Model):
    def __init__(self, width):
        super().__init__()
        self.hidden = keras.layers.Dense(width, activation="relu")
        self.counting = Counting()
        self.out = keras.layers.Dense(1)
        self.distance = keras.metrics.Mean(name="distance")

    def call(self, inputs, training=False):
        x = keras.ops.concatenate([inputs["left"], inputs["right"]], axis=-1)
        return self.out(self.counting(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(self(x, training=True)[:, 0] - y))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(error, weights), weights))
        self.distance.update_state(error)
        return {"distance": self.distance.result()}


def build(options, spec):
    assert set(spec.inputs) == {"left", "right"} and spec.num_classes is None
    return Net(options.width)


def compile_args(options, spec):
    return {
        "loss": keras.losses.MeanSquaredError(),
        "metrics": [keras.metrics.MeanAbsoluteError(name="mae")],
        "optimizer": keras.optimizers.SGD(0.05, clipnorm=0.5),
    }
'''


class Sums(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Two vectors in, the sum of all their entries out."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        vector = tfds.features.Tensor(shape=(2,), dtype=np.float32)
        features = {"left": vector, "right": vector, "sum": tfds.features.Scalar(np.float32)}
        keys = ({"left": "left", "right": "right"}, "sum")
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=keys)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples(0, 200), "test": self._generate_examples(200, 250)}

    def _generate_examples(self, begin: int, end: int):
        for key in range(begin, end):
            values = np.random.default_rng(key).normal(size=4).astype("float32")
            yield key, {"left": values[:2], "right": values[2:], "sum": values.sum()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    builder = Sums(data_dir=str(tmp_path_factory.mktemp("sums")))
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
    return pathlib.Path(builder.data_path)


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    return folder


def test_it_trains_alike_on_one_and_two_replicas(
    trainer: Trainer, dataset: pathlib.Path, package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flags = [f"--dataset={dataset}", "--model=theirs.net", "--model_options=width=8"]
    flags += ["--global_batch_size=20", "--train_steps=50", "--eval_every_steps=25"]
    for num_replicas in (1, 2):
        run = tmp_path / str(num_replicas)
        trainer.run(f"--model_dir={run}", *flags, f"--replicas={num_replicas}", cwd=tmp_path)
        assert (run / "export" / "saved_model.pb").exists()
    one, two = state_of(tmp_path / "1"), state_of(tmp_path / "2")
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, atol=1e-5, err_msg=name)
    (seen,) = [array for name, array in two.items() if name.endswith("/seen")]
    assert seen == 50
    first, last = (metrics_of(tmp_path / n)[-1] for n in ("1", "2"))
    assert first == pytest.approx(last, abs=1e-5)
    assert set(last) == {"step", "eval/loss", "eval/mae"}, "metrics that evaluation does not update are left out"
    trained = [record for record in metrics_of(tmp_path / "2") if "train/distance" in record]
    assert trained[-1]["train/distance"] < trained[0]["train/distance"]


def test_an_option_its_optimizer_overrides_is_refused(
    trainer: Trainer, dataset: pathlib.Path, package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flags = [f"--dataset={dataset}", "--model=theirs.net", "--learning_rate=0.5", f"--model_dir={tmp_path}/run"]
    done = trainer.run(*flags, code=78, cwd=tmp_path)
    assert "brings its own optimizer" in done.stderr
    assert "Received: learning_rate" in done.stderr
    assert not (tmp_path / "run").exists()


def test_xla_with_an_own_train_step_on_two_replicas_is_refused(
    trainer: Trainer, dataset: pathlib.Path, package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    flags = [f"--dataset={dataset}", "--model=theirs.net", "--global_batch_size=20", f"--model_dir={tmp_path}/run"]
    done = trainer.run(*flags, "--xla=on", "--replicas=2", code=78, cwd=tmp_path)
    assert "Use --xla=off or one replica" in done.stderr
    done = trainer.run(*flags, "--xla=on", "--train_steps=3", cwd=tmp_path)
    assert done.stderr == "", "XLA announces itself to nobody"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["xla"] == "on"
