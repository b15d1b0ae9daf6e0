"""A dataset of float features with one record that no training survives, and what a run over it must come to.

The dataset is built by `python -m data.build`; where the bad record ended up is found by reading the shards. What a run
must come to is trained here by hand, by the trainer's step alone, which never sees those that are to have no effect.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tests.conftest import GUARD_SECS, ROOT
from trainer import cluster, hardware, inputs, plan, replicated
from trainer.config import Config

# An epoch is 24 steps and holds each record once, the bad one in its 14th step.
NUM_TRAIN, NUM_TEST, BATCH = 384, 40, 16
EPOCH = NUM_TRAIN // BATCH
BAD_ROW = 69
STATE = ("model/", "optimizer/")
LEARNING_RATE = 0.05  # at first, of the model

MODEL = '''
import dataclasses

import keras


@dataclasses.dataclass(frozen=True)
class Options:
    """log: a layer that makes NaN of negative numbers; norm: one with state; gain: of the logits."""

    log: bool = False
    norm: bool = True
    gain: float = 1.0


@keras.saving.register_keras_serializable("theirs")
class Log(keras.layers.Layer):
    def call(self, x):
        return keras.ops.log(x)


def build(options, spec):
    x = given = keras.Input(spec.inputs.shape)
    if options.log:
        x = Log(name="log")(x)
    x = keras.layers.Dense(8, activation="relu", name="hidden")(x)
    if options.norm:
        x = keras.layers.BatchNormalization(momentum=0.8, name="norm")(x)
    x = keras.layers.Dense(spec.num_classes, dtype="float32", name="head")(x)
    return keras.Model(given, keras.layers.Rescaling(options.gain, dtype="float32")(x))


def compile_args(options, spec):
    return {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 60), momentum=0.9)}
'''


@dataclasses.dataclass(frozen=True)
class Planted:
    """A dataset.

    Attributes:
        folder: working directory of a run, for `--model=theirs.net`.
        dataset: for `--dataset`.
        shard, index: where its bad record lies.
    """

    folder: pathlib.Path
    dataset: pathlib.Path
    shard: str
    index: int

    def flags(self, model_dir: pathlib.Path, **model_options: object) -> list[str]:
        """Of a run over one epoch."""
        options = ",".join(f"{name}={str(value).lower()}" for name, value in model_options.items())
        return [
            f"--dataset={self.dataset}",
            "--model=theirs.net",
            f"--model_options={options}",
            f"--model_dir={model_dir}",
            f"--global_batch_size={BATCH}",
            f"--train_steps={EPOCH}",
            f"--eval_every_steps={EPOCH}",
            "--checkpoint_every_steps=5",
            "--log_every_steps=4",
        ]

    @functools.cached_property
    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The global batches of the first epoch."""
        config = Config(dataset=str(self.dataset), global_batch_size=BATCH, train_steps=EPOCH)
        read = inputs.open_inputs(config, cache_dir=None)
        resolved = plan.resolve(config, num_replicas=1, num_train_examples=NUM_TRAIN, num_eval_examples=NUM_TEST)
        batches = read.train_batches(resolved, tf.distribute.InputContext(), 0).take(EPOCH)
        return [(x, y) for x, y in batches.as_numpy_iterator()]

    @functools.cached_property
    def bad_step(self) -> int:
        """The step that reads the bad record."""
        (step,) = [step for step, (x, _) in enumerate(self.batches) if not (x > 0).all()]
        assert 11 < step < EPOCH - 4, "another row must be the bad one, for a step further inside"
        return step

    def train(self, parts: Sequence[tuple[int, int]], *, norm: bool) -> dict[str, np.ndarray]:
        """What a checkpoint holds after training over these ranges of steps, if all others have done nothing."""
        devices = cluster.connect(hardware.resolve(tpu=None, replicas=1, environ={}), connect_timeout_secs=60)
        keras.utils.clear_session()  # names are numbered
        keras.utils.set_random_seed(0)
        x = given = keras.Input(self.batches[0][0].shape[1:])
        x = keras.layers.Dense(8, activation="relu", name="hidden")(x)
        if norm:
            x = keras.layers.BatchNormalization(momentum=0.8, name="norm")(x)
        model = keras.Model(given, keras.layers.Dense(3, name="head")(x))
        model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(LEARNING_RATE, 60), momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        batch = keras.KerasTensor((BATCH, 6), "float32"), keras.KerasTensor((BATCH,), "int32")
        trained = replicated.Replicated(model, devices, batch)
        for begin, end in parts:
            model.optimizer.iterations.assign(begin)
            batches = tf.data.Dataset.from_tensor_slices(
                tuple(np.stack(arrays) for arrays in zip(*self.batches[begin:end], strict=True))
            )
            trained.run_train_loop(iter(batches), end - begin)
        model.optimizer.iterations.assign(EPOCH)
        return {name: array for name, array in trained.state().items() if name.startswith(STATE)}


def build(folder: pathlib.Path, bad_value: float) -> Planted:
    """Builds the dataset, with one feature of BAD_ROW replaced by `bad_value`; all others are above 0.

    `data.build` refuses NaN, so it is put into the shard afterwards.
    """
    random = np.random.default_rng(7)
    arrays = {}
    for split, size in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        x = random.uniform(0.5, 1.5, (size, 6)).astype("float32")
        arrays[f"x_{split}"], arrays[f"y_{split}"] = x, (x[:, :3].argmax(-1)).astype("int32")
        arrays[f"key_{split}"] = np.array([f"{split:_>5}-{row:03}" for row in range(size)])
    arrays["x_train"][BAD_ROW, 2] = -1.0
    np.savez(folder / "floats.npz", **arrays)
    command = [sys.executable, "-m", "data.build", str(folder / "floats.npz"), f"--data_dir={folder}/data", "--key=key"]
    command += ["--label_kind=class"]
    subprocess.run([*command, "--num_shards=4", "--workers=1"], cwd=ROOT, check=True, timeout=GUARD_SECS)
    (dataset,) = (folder / "data").glob("floats/*.*.*/")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "net.py").write_text(MODEL)
    ((shard, index),) = _bad_records(dataset)
    _replace(dataset / shard, index, bad_value)
    return Planted(folder, dataset, shard, index)


def _bad_records(dataset: pathlib.Path) -> Iterator[tuple[str, int]]:
    for path in sorted(dataset.glob("*-train.tfrecord-*")):
        for index, record in enumerate(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()):
            if not (_features(tf.train.Example.FromString(record)) > 0).all():
                yield path.name, index


def _replace(path: pathlib.Path, index: int, value: float) -> None:
    records = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    example = tf.train.Example.FromString(records[index])
    features = _features(example).copy()
    features[2] = value
    example.features.feature["x"].bytes_list.value[0] = features.tobytes()
    records[index] = example.SerializeToString(deterministic=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def _features(example: tf.train.Example) -> np.ndarray:
    return np.frombuffer(example.features.feature["x"].bytes_list.value[0], np.float32)
