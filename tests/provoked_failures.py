"""Provokes known failures for real and prints what `trainer.diagnose` makes of each, one JSON line a failure.

A process of its own, since TensorFlow's devices are set up once: `python -m tests.provoked_failures DIRECTORY`.
"""

import json
import os
import pathlib
import socket
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from trainer import diagnose, places

DIRECTORY = pathlib.Path(sys.argv[1])
# More than any process can address, so that it fails whatever a machine lets processes ask for.
ABSURD = [2**24, 2**24]


class Eigen(keras.layers.Layer):
    def call(self, x):
        return tf.cast(tf.linalg.eigvals(tf.matmul(x, x, transpose_a=True)), tf.float32)


def _fit(strategy: tf.distribute.Strategy, *layers: keras.layers.Layer, loss: str = "mse", y: object = None, **compile):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), *layers])
        model.compile(loss=loss, **compile)
    x = np.ones([4, 3], "float32")
    model.fit(x, np.ones([4, 3]) if y is None else y, verbose=0)


def _accumulate(strategy: tf.distribute.Strategy) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    _fit(strategy, optimizer=optimizer, jit_compile=False)


def _write_records(*records: bytes) -> str:
    path = str(DIRECTORY / "records.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def _parse(kind: tf.DType, name: str) -> None:
    value = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    example = tf.train.Example(features=tf.train.Features(feature={"label": value})).SerializeToString()
    tf.io.parse_example([example], {name: tf.io.FixedLenFeature([], kind)})


def _damaged_record() -> None:
    path = _write_records(b"one", b"two")
    content = bytearray(pathlib.Path(path).read_bytes())
    content[13] ^= 1
    pathlib.Path(path).write_bytes(content)
    list(tf.data.TFRecordDataset(path))


def _late_workers() -> None:
    workers = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(workers)
    try:
        tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        del os.environ["TF_CONFIG"]


def _busy_port() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0)


def _two_clients() -> None:
    import tensorflow.python.tpu.client.client  # noqa: F401


def _dynamic_shape() -> None:
    @tf.function(jit_compile=True)
    def mask() -> tf.Tensor:
        return tf.sequence_mask(tf.random.stateless_uniform([2], [1, 2], 1, 3, tf.int32))

    mask()


def _other_checkpoint() -> None:
    path = tf.train.Checkpoint(a=tf.Variable(1.0)).save(str(DIRECTORY / "checkpoint"))
    tf.train.Checkpoint(b=tf.Variable(1.0)).restore(path).assert_consumed()


def _made_outside(strategy: tf.distribute.Strategy) -> None:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    with strategy.scope():
        model.compile(loss="mse", jit_compile=False)
    model.fit(np.ones([4, 3], "float32"), np.ones([4, 3]), verbose=0)


def _variable_while_running() -> None:
    @tf.function
    def make() -> None:
        tf.Variable(1.0)

    make()


def _python_condition() -> None:
    tf.function(lambda x: 1 if x > 0 else 2, autograph=False)(tf.ones([]))


def _recurse() -> None:
    _recurse()


def _provocations() -> dict[str, Callable[[], object]]:
    """By the name of the row that each is."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    two, one = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.distribute.get_strategy()
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    embedding = keras.Sequential([keras.layers.Embedding(3, 4)])
    return {
        "no TPU named": lambda: resolver(""),
        "several TPUs named": lambda: resolver(["a", "b"]),
        "two Cloud TPU clients": _two_clients,
        "TensorFlow in use too early": _late_workers,
        "port in use": _busy_port,
        "operation XLA cannot compile": lambda: _fit(one, Eigen(), jit_compile=True),
        "shape not known to XLA": _dynamic_shape,
        "out of device memory": lambda: tf.zeros(ABSURD),  # waits 10 s for memory to come free
        "out of host memory": lambda: np.ones(ABSURD),
        "XLA of the model's own on several replicas": lambda: _fit(two, jit_compile=True),
        "reduction inside of a function or condition": lambda: _accumulate(two),
        "made outside of the strategy": lambda: _made_outside(two),
        "Python condition on a tensor": _python_condition,
        "variable made while running": _variable_while_running,
        "label out of range": lambda: _fit(one, loss=loss, y=np.array([7, 1, 1, 1])),
        "index out of range": lambda: tf.function(embedding)(tf.constant([[1, 9]])),
        "batch and replicas": lambda: tf.distribute.InputContext(1, 0, 2).get_per_replica_batch_size(7),
        "not finite": lambda: tf.debugging.check_numerics(float("nan"), "loss"),
        "module is no Python": lambda: compile("x = = 1", "net.py", "exec"),
        "import fails": lambda: exec("from keras import Nothing"),
        "endless recursion": _recurse,
        "unknown file system": lambda: tf.io.read_file("s3://bucket/x"),
        "damaged record": _damaged_record,
        "records of another schema": lambda: _parse(tf.string, "image"),
        "input ended": lambda: tf.function(lambda batches: (next(batches), next(batches)))(
            iter(tf.data.Dataset.range(1))
        ),
        "checkpoint does not fit": _other_checkpoint,
        # Last: the context has been connected to a TPU that is not there.
        "TensorFlow without TPU support": lambda: tf.tpu.experimental.initialize_tpu_system(resolver("local")),
    }


def main() -> None:
    """Provokes them all."""
    for name, provoke in _provocations().items():
        try:
            provoke()
        except Exception as error:
            known, told, place = diagnose.find(error), diagnose.explain(error), places.of_error(error)
            found = known.name if known else f"unknown: {error!r}"
            said = {"found": found, "told": str(told), "exit_code": told.exit_code, "place": str(place)}
        else:
            said = {"found": "nothing failed"}
        print(json.dumps({"name": name, **said}), flush=True)


if __name__ == "__main__":
    main()
