"""Trains both models of text on 1 and on 2 replicas and stores what came out; `python -m tests.text_worker OUT.npz`.

Keys are `<task>/<replicas>/<what>`. One process for both numbers of replicas.
"""

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from data.spec import Array, Spec
from trainer import cluster, models, replicated, tasks

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


def batches(devices: cluster.Cluster, arrays: Any) -> Iterator:
    """Of GLOBAL_BATCH rows, without end."""

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = GLOBAL_BATCH // devices.num_replicas
        return tf.data.Dataset.from_tensor_slices(arrays).batch(rows, drop_remainder=True).repeat()

    return iter(devices.distribute(local))


def run(task: str, devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """Trains STEPS steps, evaluates, and computes what the export would give for all that was evaluated."""
    spec = SPECS[task]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    source = models.find(*MODELS[task])
    with devices.scope():
        model = source.build(spec)
        brought = {"loss": tasks.loss(spec), **source.compile_args(spec)}
        # A step of SGD shows a gradient's size, which Adam divides away.
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), weighted_metrics=tasks.metrics(spec),
                      jit_compile=False, **brought)  # fmt: skip
    rows = GLOBAL_BATCH // devices.num_replicas
    x, y = examples(task, 64)
    batch_spec = keras.tree.map_structure(lambda a: keras.KerasTensor((rows, *a.shape[1:]), a.dtype.name), (x, y))
    trained = replicated.Replicated(model, devices, batch_spec)
    done = trained.run_train_loop(batches(devices, (x, y)), STEPS)
    found = {f"train/{name}": np.array(value) for name, value in done.logs.items()}
    found |= {f"weight/{name}": array for name, array in trained.state().items() if name.startswith("model/")}
    padded = -(-EVALUATED // GLOBAL_BATCH) * GLOBAL_BATCH
    x, y = examples(task, padded)
    mask = (np.arange(padded) < EVALUATED).astype(np.float32)
    logs = trained.evaluate(batches(devices, (x, y, mask)), [(0, padded // GLOBAL_BATCH)])
    found |= {f"eval/{name}": np.array(value) for name, value in (logs or {}).items()}
    return found | {"logits": model(x, training=False).numpy()[:EVALUATED]}


def main() -> None:
    """Runs all and writes the file."""
    clusters = cluster.rehearse(2)
    found: dict[str, np.ndarray] = {}
    for task in SPECS:
        for devices in clusters:
            found |= {f"{task}/{devices.num_replicas}/{key}": array for key, array in run(task, devices).items()}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
