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
from trainer import cluster, hardware, models, optimizers, replicated, tasks
from trainer.backends.tensorflow import engine, internals
from trainer.backends.tensorflow.finite import FiniteCheck
from trainer.config import Config
from trainer.plan import LearningRate

BATCH = 64
SPEC = Spec(Array((28, 28, 1), "uint8"), Array((), "int32"), 10)
# Name, options, steps of a measurement, most that a step may take with the check over without it.
# On a CPU the optimizer works on one variable while the backward pass still works on others, until a check has to come
# first. That shows in the second, where the optimizer takes most of the time, and in the first, which is tiny.
CASES = (
    ("mlp", {"units": [128]}, 200, None),
    ("mlp", {"units": [1024, 1024]}, 40, None),
    ("cnn", {}, 20, 1.02),
)


class Unchecked(FiniteCheck):
    """Averages the gradients and does nothing else."""

    def undone_unless_finite(self, step: Callable[[], None]) -> None:
        """Runs the step."""
        step()

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> internals.Apply:
        def average(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            replica = tf.distribute.get_replica_context()
            apply(replica.all_reduce(tf.distribute.ReduceOp.MEAN, [tf.convert_to_tensor(g) for g in gradients]))

        return average


KINDS = (FiniteCheck, Unchecked)


def _loop(
    name: str, options: dict, devices: cluster.Cluster, steps: int, kind: type[FiniteCheck]
) -> Callable[[], float]:
    """A call trains `steps` steps and returns milliseconds a step."""
    engine.FiniteCheck = kind
    share = BATCH // devices.num_replicas
    keras.utils.set_random_seed(0)
    with devices.scope():
        model = models.find(name, options).build(SPEC)
        model.compile(
            optimizers.build(Config(), LearningRate("constant", 1e-3, train_steps=10**6)),
            tasks.loss(SPEC),
            weighted_metrics=tasks.metrics(SPEC),
            jit_compile=False,
        )
    spec = (keras.KerasTensor((share, 28, 28, 1), "uint8"), keras.KerasTensor((share,), "int32"))
    trained = replicated.Replicated(model, devices, spec)
    images = tf.cast(tf.random.stateless_uniform((share, 28, 28, 1), (0, 1), maxval=256, dtype=tf.int32), tf.uint8)
    labels = tf.random.stateless_uniform((share,), (0, 2), maxval=10, dtype=tf.int32)
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat().prefetch(tf.data.AUTOTUNE)
    iterator = iter(devices.distribute(lambda _: batches))

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
    devices = cluster.connect(target, connect_timeout_secs=60)
    kept = True
    for name, options, steps, bound in CASES:
        # Two of each, made in an order that favours neither: what is made later lies elsewhere in memory.
        loops = [_loop(name, options, devices, steps, kind) for kind in (*KINDS, *reversed(KINDS))]
        turns = []
        for number in range(arguments.rounds):
            order = range(len(loops)) if number % 2 else reversed(range(len(loops)))
            took = {index: loops[index]() for index in order}
            turns.append((took[0] + took[3], took[1] + took[2]))
        ratios = [one / other for one, other in turns]
        low, median, high = statistics.quantiles(ratios, n=4)
        step_ms = statistics.median(other for _, other in turns) / 2
        verdict = "no bound" if bound is None else f"bound {bound}: {'kept' if median <= bound else 'MISSED'}"
        what = f"{name} {options!s:28s} {step_ms:6.2f} ms a step"
        print(f"{what}, with check x {median:.3f} ({low:.3f} to {high:.3f})  {verdict}")
        kept &= bound is None or median <= bound
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
