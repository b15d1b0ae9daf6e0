"""The replicated loop against Keras' own `fit`, and XLA against no XLA, on the same model and data in one process.

    python scripts/bench_loop.py [--rounds=5]

Prints one line a ratio with its bound and exits 1 where a bound is missed. The alternatives take turns, round by round,
so that a machine whose speed drifts slows all of them; a ratio is the median over rounds, its spread the extremes.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from data.spec import Array, Spec
from trainer import cluster, hardware, models, replicated, tasks

STEPS = 100  # a measurement, in one loop
BATCH = 64
SPEC = Spec(Array((28, 28, 1), "uint8"), Array((), "int32"), 10)
MLP = ("mlp", {"units": [128]})
CNN = ("cnn", {"batch_norm": False, "dropout": 0.0})


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Steps/s of one alternative over another's, and the least it has to be."""

    name: str
    ours: str
    theirs: str
    bound: float | None


RATIOS = (
    Ratio("mlp: ours / Keras fit, 100 steps an execution", "mlp", "mlp fit 100", 0.9),
    Ratio("mlp: ours / Keras fit, 1 step an execution", "mlp", "mlp fit 1", 1.5),
    Ratio("cnn: ours / Keras fit, 100 steps an execution", "cnn", "cnn fit 100", 0.9),
    Ratio("mlp: without XLA / with XLA, on CPU", "mlp", "mlp xla", None),
    Ratio("cnn: without XLA / with XLA, on CPU", "cnn", "cnn xla", 1.2),
)


def _model(name: str, options: dict) -> keras.Model:
    keras.utils.set_random_seed(0)
    return models.find(name, options).build(SPEC)


def _batches() -> tf.data.Dataset:
    images = tf.cast(tf.random.stateless_uniform((BATCH, 28, 28, 1), (0, 1), maxval=256, dtype=tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform((BATCH,), (0, 2), maxval=10, dtype=tf.int32)
    return tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(tf.data.AUTOTUNE)


def _compile(model: keras.Model, **options: object) -> None:
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=tasks.loss(SPEC),
        weighted_metrics=tasks.metrics(SPEC),
        jit_compile=False,
        **options,
    )


def _ours(name: str, options: dict, *, xla: bool = False) -> Callable[[], None]:
    model = _model(name, options)
    _compile(model)
    spec = (keras.KerasTensor((BATCH, 28, 28, 1), "uint8"), keras.KerasTensor((BATCH,), "int32"))
    devices = cluster.connect(hardware.resolve(tpu=None, replicas=1, environ={}), connect_timeout_secs=60)
    trained = replicated.Replicated(model, devices, spec, xla=xla)
    iterator = iter(_batches())
    return lambda: trained.run_train_loop(iterator, STEPS)


def _keras_fit(name: str, options: dict, steps_per_execution: int) -> Callable[[], None]:
    model = _model(name, options)
    _compile(model, steps_per_execution=steps_per_execution)
    batches = _batches()
    return lambda: model.fit(batches, steps_per_epoch=STEPS, epochs=1, verbose=0, shuffle=False)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    runs = {
        "mlp": _ours(*MLP),
        "mlp xla": _ours(*MLP, xla=True),
        "mlp fit 100": _keras_fit(*MLP, 100),
        "mlp fit 1": _keras_fit(*MLP, 1),
        "cnn": _ours(*CNN),
        "cnn xla": _ours(*CNN, xla=True),
        "cnn fit 100": _keras_fit(*CNN, 100),
    }
    for run in runs.values():
        run()  # traces and compiles
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            speeds[name].append(STEPS / (time.perf_counter() - begun))
    for name, values in speeds.items():
        print(f"{name:12s} {statistics.median(values):8.0f} steps/s  ({min(values):.0f} to {max(values):.0f})")
    return 0 if all([_report(ratio, speeds) for ratio in RATIOS]) else 1


def _report(ratio: Ratio, speeds: dict[str, list[float]]) -> bool:
    """Prints one ratio; returns whether it keeps its bound."""
    values = [ours / theirs for ours, theirs in zip(speeds[ratio.ours], speeds[ratio.theirs], strict=True)]
    median = statistics.median(values)
    kept = ratio.bound is None or median >= ratio.bound
    bound = "no bound" if ratio.bound is None else f"bound {ratio.bound}: {'kept' if kept else 'MISSED'}"
    print(f"{ratio.name:48s} {median:5.2f}  ({min(values):.2f} to {max(values):.2f})  {bound}")
    return kept


if __name__ == "__main__":
    sys.exit(main())
