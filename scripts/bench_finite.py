"""What the finite check of every step costs, against the same loop without it, in one process.

    python scripts/bench_finite.py [--rounds=15] [--replicas=1]

Prints one line a model with its bound and exits 1 where a bound is missed. The alternatives take turns, round by round,
so that a machine whose speed drifts slows both; a ratio is the median over rounds, its spread the quartiles.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from data.spec import Array, Spec
from trainer import cluster, finite, hardware, internals, models, optimizers, replicated, tasks
from trainer.config import Config

BATCH = 64
SPEC = Spec(Array((28, 28, 1), "uint8"), Array((), "int32"), 10)
# Name, options, steps of a measurement, most that a step may take with the check over without it.
CASES = (
    ("mlp", {"units": [128]}, 200, None),
    ("mlp", {"units": [1024, 1024]}, 40, 1.02),
    ("cnn", {}, 30, 1.02),
)


class Unchecked(finite.FiniteCheck):
    """Averages the gradients and does nothing else."""

    def undone_unless_finite(self, step: Callable[[], None]) -> None:
        """Runs the step."""
        step()

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> internals.Apply:
        def average(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            replica = tf.distribute.get_replica_context()
            apply(replica.all_reduce(tf.distribute.ReduceOp.MEAN, [tf.convert_to_tensor(g) for g in gradients]))

        return average


def _loop(name: str, options: dict, strategy: tf.distribute.Strategy, steps: int) -> Callable[[], float]:
    """A call trains `steps` steps and returns milliseconds a step."""
    share = BATCH // strategy.num_replicas_in_sync
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.find(name, options).build(SPEC)
        model.compile(
            optimizers.build(Config(), 10**6), tasks.loss(SPEC), weighted_metrics=tasks.metrics(SPEC), jit_compile=False
        )
    spec = (keras.KerasTensor((share, 28, 28, 1), "uint8"), keras.KerasTensor((share,), "int32"))
    trained = replicated.Replicated(model, strategy, spec)
    images = tf.cast(tf.random.stateless_uniform((share, 28, 28, 1), (0, 1), maxval=256, dtype=tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform((share,), (0, 2), maxval=10, dtype=tf.int32)
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(tf.data.AUTOTUNE)
    iterator = iter(strategy.distribute_datasets_from_function(lambda _: batches))

    def run() -> float:
        begun = time.perf_counter()
        trained.run_train_loop(iterator, steps)
        return 1e3 * (time.perf_counter() - begun) / steps

    run()  # traces
    return run


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()
    target = hardware.resolve(tpu=None, replicas=arguments.replicas, environ={})
    strategy = cluster.connect(target, connect_timeout_secs=60).strategy
    kept = True
    for name, options, steps, bound in CASES:
        checked = _loop(name, options, strategy, steps)
        replicated.FiniteCheck = Unchecked
        unchecked = _loop(name, options, strategy, steps)
        replicated.FiniteCheck = finite.FiniteCheck
        turns = []
        for number in range(arguments.rounds):
            order = (checked, unchecked) if number % 2 else (unchecked, checked)
            took = {run: run() for run in order}
            turns.append((took[checked], took[unchecked]))
        ratios = [one / other for one, other in turns]
        low, median, high = statistics.quantiles(ratios, n=4)
        step_ms = statistics.median(other for _, other in turns)
        verdict = "no bound" if bound is None else f"bound {bound}: {'kept' if median <= bound else 'MISSED'}"
        what = f"{name} {options!s:28s} {step_ms:6.2f} ms a step"
        print(f"{what}, with check x {median:.3f} ({low:.3f} to {high:.3f})  {verdict}")
        kept &= bound is None or median <= bound
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
