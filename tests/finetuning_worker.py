"""Fine-tunes a small model on 1, 2 and 3 replicas, and resumed, and stores what came out, for test_finetuning.py.

`python -m tests.finetuning_worker OUT.npz`; a process of its own, since TensorFlow's devices are fixed once used. Keys
are `<case>/<replicas>/<name of state>`, with `resumed` for the replicas of a run that was stopped in the middle.
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from trainer import cluster, finetuning, optimizers, plan, replicated
from trainer.backends.tensorflow.cluster import StrategyCluster
from trainer.config import Config

MOST_REPLICAS = 3
GLOBAL_BATCH, STEPS = 48, 12
ADAMW = {"learning_rate": 0.01, "weight_decay": 0.1, "global_clipnorm": 0.5}
SGD = {"optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.1, "warmup": "3 steps"}
CASES: dict[str, dict[str, Any]] = {
    "frozen": ADAMW | {"freeze": "stem*, block_0*"},
    "factors": ADAMW | {"freeze": "stem_*", "learning_rate_factors": "logits/*=10, block_*=0.1, *=0"},
    "decay": SGD
    | {"layer_decay": 0.5, "freeze": "stem_norm*, block_0/bias", "precision": "mixed_float16", "xla": "on"},
}


def network() -> keras.Model:
    """[B, 8, 8] -> [B, 10] float32 logits: a stem with batch norm, two blocks, a head."""
    image = keras.Input((8, 8))
    x = keras.layers.Dense(16, name="stem")(keras.layers.Flatten()(image))
    x = keras.layers.BatchNormalization(momentum=0.8, name="stem_norm")(x)
    for index in range(2):
        x = keras.layers.Dense(16, activation="relu", name=f"block_{index}")(x)
    return keras.Model(image, keras.layers.Dense(10, dtype="float32", name="logits")(x))


def make(config: Config, devices: cluster.Cluster) -> replicated.Replicated:
    """The model on the cluster's replicas, in the order of `Assembly.compiled_model`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(config.precision)
    share = GLOBAL_BATCH // devices.num_replicas
    inputs, labels = keras.KerasTensor((share, 8, 8)), keras.KerasTensor((share,), dtype="int32")
    planned = plan.resolve(config, num_replicas=1, num_train_examples=0, num_eval_examples=0)
    with devices.scope():
        model = network()
        for weight in model.get_layer("stem_norm").weights:  # as of a run before
            weight.assign(weight + 0.1)
        finetuning.freeze(model, config, inputs)
        model.compile(
            optimizer=optimizers.build(config, planned.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        finetuning.scale_learning_rates(model, config, inputs)
        return replicated.Replicated(model, devices, (inputs, labels), xla=config.xla == "on")


def batches(devices: cluster.Cluster, start_step: int) -> Any:
    """Digits in file order."""
    data = load_digits()
    images, labels = (data.images / 16.0).astype("float32"), data.target.astype("int32")
    share = GLOBAL_BATCH // devices.num_replicas

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        records = tf.data.Dataset.from_tensor_slices((images, labels)).skip(start_step * GLOBAL_BATCH)
        return records.batch(share, drop_remainder=True)

    return iter(devices.distribute(local))


def train(options: dict[str, Any], replicas: int, names: list[str], *, stop: bool = False) -> dict[str, np.ndarray]:
    """State after all steps; with `stop` the second half is another model's, from the state of the first's."""
    # Collectives of two numbers of replicas do not go together in one process.
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(names[:replicas], cross_device_ops=reduction)
    devices = StrategyCluster(strategy=strategy, kind="cpu", num_replicas=replicas, description=", ".join(names))
    config = Config(**options, train_steps=STEPS, global_batch_size=GLOBAL_BATCH)
    trained = make(config, devices)
    begun = trained.state()
    if stop:
        trained.run_train_loop(batches(devices, 0), STEPS // 2)
        saved = {name: array.copy() for name, array in trained.state().items()}
        trained = make(config, devices)
        trained.restore(saved, "memory")
        trained.run_train_loop(batches(devices, STEPS // 2), STEPS // 2)
    else:
        trained.run_train_loop(batches(devices, 0), STEPS)
    return {f"before/{name}": array for name, array in begun.items()} | trained.state()


def main() -> None:
    """Runs all cases and writes the file."""
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * MOST_REPLICAS)
    names = [f"CPU:{index}" for index in range(MOST_REPLICAS)]
    found: dict[str, np.ndarray] = {}
    for name, options in CASES.items():
        for replicas in {"frozen": (1, 3), "factors": (1, 2), "decay": (2,)}[name]:
            found |= {f"{name}/{replicas}/{key}": a for key, a in train(options, replicas, names).items()}
    stopped = train(CASES["factors"], 2, names, stop=True)
    found |= {f"factors/resumed/{key}": array for key, array in stopped.items()}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
