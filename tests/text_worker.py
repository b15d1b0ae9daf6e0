"""Trains both models of text on 1 and on 2 replicas and stores what came out; `python -m tests.text_worker OUT.npz`.

Keys are `<task>/<replicas>/<what>`. One process: a strategy over the first of two virtual devices is one replica.
"""

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.spec import Array, Spec
from trainer import models, replicated, tasks

GLOBAL_BATCH, STEPS, LENGTH, VOCABULARY, CLASSES = 8, 12, 12, 11, 3
EVALUATED = 21  # the last batch is part padding
TOKENS = Array((LENGTH,), "int32", VOCABULARY)
SPECS = {
    "language_model": Spec(
        {"tokens": TOKENS, "segments": Array((LENGTH,), "int32", LENGTH + 1)}, TOKENS, None, "language_model"
    ),
    "classification": Spec(TOKENS, Array((), "int32"), CLASSES),
}
MODELS = {
    "language_model": ("transformer", {"width": 16, "depth": 2, "heads": 2, "z_loss": 1e-3}),
    "classification": ("text_classifier", {"width": 16, "depth": 1, "heads": 2, "kernel": 3, "dropout": 0.0}),
}


def examples(task: str, count: int) -> tuple[Any, np.ndarray]:
    """(x, y): records that are full to different degrees."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCABULARY, (count, LENGTH)).astype(np.int32)
    lengths = rng.integers(2, LENGTH + 1, (count, 1))
    there = np.arange(LENGTH) < lengths  # [count, S]
    if task == "classification":
        return tokens * there, rng.integers(0, CLASSES, count).astype(np.int32)
    segments = np.where(np.arange(LENGTH) < lengths // 2, 1, 2) * there
    targets = np.where(there, (tokens + 1) % VOCABULARY, -1)
    return {"tokens": tokens * there, "segments": segments.astype(np.int32)}, targets.astype(np.int32)


def batches(strategy: tf.distribute.Strategy, arrays: Any) -> Iterator:
    """Of GLOBAL_BATCH rows, without end."""

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = GLOBAL_BATCH // strategy.num_replicas_in_sync
        return tf.data.Dataset.from_tensor_slices(arrays).batch(rows, drop_remainder=True).repeat()

    return iter(strategy.distribute_datasets_from_function(local))


def run(task: str, strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Trains STEPS steps, evaluates, and computes what the export would give for all that was evaluated."""
    spec = SPECS[task]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    source = models.find(*MODELS[task])
    with strategy.scope():
        model = source.build(spec)
        brought = {"loss": tasks.loss(spec), **source.compile_args(spec)}
        # A step of SGD shows a gradient's size, which Adam divides away.
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), weighted_metrics=tasks.metrics(spec),
                      jit_compile=False, **brought)  # fmt: skip
    rows = GLOBAL_BATCH // strategy.num_replicas_in_sync
    x, y = examples(task, 64)
    batch_spec = keras.tree.map_structure(lambda a: keras.KerasTensor((rows, *a.shape[1:]), a.dtype.name), (x, y))
    trained = replicated.Replicated(model, strategy, batch_spec)
    done = trained.run_train_loop(batches(strategy, (x, y)), STEPS)
    found = {f"train/{name}": np.array(value) for name, value in done.logs.items()}
    found |= {f"weight/{name}": array for name, array in trained.state().items() if name.startswith("model/")}
    padded = -(-EVALUATED // GLOBAL_BATCH) * GLOBAL_BATCH
    x, y = examples(task, padded)
    mask = (np.arange(padded) < EVALUATED).astype(np.float32)
    logs = trained.evaluate(batches(strategy, (x, y, mask)), [(0, padded // GLOBAL_BATCH)])
    found |= {f"eval/{name}": np.array(value) for name, value in (logs or {}).items()}
    return found | {"logits": model(x, training=False).numpy()[:EVALUATED]}


def main() -> None:
    """Runs all and writes the file."""
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    # A second strategy over the same devices would take the keys of the first one's collectives.
    strategies = {count: tf.distribute.MirroredStrategy(devices[:count]) for count in (1, 2)}
    found: dict[str, np.ndarray] = {}
    for task in SPECS:
        for count, strategy in strategies.items():
            found |= {f"{task}/{count}/{key}": array for key, array in run(task, strategy).items()}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
