"""The time until the first step is done: ours against Keras' own `fit`, and a restart against the first start.

    python -m scripts.bench_start [--rounds=5] [--cases=mlp,cnn] [--replicas=1,2,4,8] [--backends=tensorflow,jax]

Counted from the call: building the optimizer's variables, tracing, compiling and one step; imports, data and the making
of the model are not. Each start is a process, and the two of a ratio take turns. Ours and Keras' `fit` have the same
model, data and replicas; on JAX `fit` trains on one replica here. The restart is ours on one replica, compiled by XLA,
with a `compile_cache` that is empty and then not. A ratio is of seconds of CPU, which a busy machine changes less.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.benches import results, turns

BATCH = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A built-in model with its options, the shape of an image, and numbers of replicas.

    kept_at_most: what of the first start a restart may take; None where most of it is not for compiling.
    """

    model: str
    options: Mapping[str, Any]
    image: tuple[int, int, int]
    replicas: Sequence[int] = (1, 2, 4, 8)
    kept_at_most: float | None = 0.5


CASES = {
    "mlp": Case("mlp", {"units": [128]}, (28, 28, 1), kept_at_most=None),
    "cnn": Case("cnn", {}, (28, 28, 1)),
    "resnet50": Case("resnet", {"depth": 50, "width": 16}, (64, 64, 3), (1, 4)),
}
OURS, FIT, EMPTY, KEPT = "ours", "Keras fit", "empty cache", "kept cache"
BOUND_OF_ONE, BOUND_OF_MORE = 1.0, 0.99  # no worse on one replica, better on more


def start(case: Case, who: str, replicas: int) -> Callable[[], object]:
    """What is timed: the first step of the case."""
    import keras
    import numpy as np
    import tensorflow as tf

    from data.spec import Array, Spec
    from trainer import cluster, hardware, models, replicated, tasks

    devices = cluster.connect(hardware.resolve(tpu=None, replicas=replicas, environ={}), connect_timeout_secs=60)
    spec = Spec(Array(case.image, "uint8"), Array((), "int32"), 10)
    with devices.scope():
        model = models.find(case.model, case.options).build(spec)
        model.compile(
            keras.optimizers.AdamW(1e-3), tasks.loss(spec), weighted_metrics=tasks.metrics(spec), jit_compile=False
        )

    def batches(size: int) -> tf.data.Dataset:
        examples = (np.zeros((size, *case.image), np.uint8), np.zeros((size,), np.int32))
        return tf.data.Dataset.from_tensors(examples).repeat()

    if who == FIT:
        return lambda: model.fit(batches(BATCH), steps_per_epoch=1, epochs=1, verbose=0, shuffle=False)
    share = BATCH // replicas
    batch_spec = (keras.KerasTensor((share, *case.image), "uint8"), keras.KerasTensor((share,), "int32"))
    iterator = iter(devices.distribute(lambda _: batches(share)))

    def ours() -> None:
        made = replicated.Replicated(model, devices, batch_spec, xla=who != OURS)
        made.run_train_loop(iterator, 1, lambda: iterator)  # as a run does

    return ours


def measure(case: Case, who: str, replicas: int, directory: str | None) -> dict[str, float]:
    """Seconds of one first step, in this process."""
    from trainer import compile_cache

    with compile_cache.opened(directory) if directory else contextlib.nullcontext():
        run = start(case, who, replicas)
        begun, cpu = time.perf_counter(), time.process_time()
        run()
        return {"secs": time.perf_counter() - begun, "cpu_secs": time.process_time() - cpu}


def in_a_process(backend: str, case: str, who: str, replicas: int, directory: str = "") -> dict[str, float]:
    """The same, in a process of its own."""
    flags = [f"--contender={who}", f"--cases={case}", f"--replicas={replicas}", f"--directory={directory}"]
    environ = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "scripts.bench_start", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    return json.loads(done.stdout.splitlines()[-1])


def restart(backend: str, case: str) -> dict[str, dict[str, float]]:
    """A start that keeps its programs, and one that finds them."""
    with tempfile.TemporaryDirectory() as directory:
        return {who: in_a_process(backend, case, who, 1, directory) for who in (EMPTY, KEPT)}


def add(
    report: results.Report, what: str, who: str, other: str, taken: Sequence[Mapping[str, Any]], bound: float | None
) -> None:
    """The ratio of one's CPU to the other's, with what the starts took."""
    ratios = [turn[who]["cpu_secs"] / turn[other]["cpu_secs"] for turn in taken]
    report.add(what, f"{who} / {other}", ratios, at_most=bound, note=f"{_told(taken, who)} / {_told(taken, other)}")


def _told(taken: Sequence[Mapping[str, Any]], who: str) -> str:
    secs, cpu = (statistics.median([turn[who][key] for turn in taken]) for key in ("secs", "cpu_secs"))
    return f"{secs:.2f} s, {cpu:.2f} of CPU"


def measure_all(report: results.Report, backend: str, name: str, replicas: Sequence[int], rounds: int) -> None:
    """One model on one backend."""
    for number in replicas if backend == "tensorflow" else [1]:
        start_of = functools.partial(in_a_process, backend, name)
        ways = {who: functools.partial(start_of, who, number) for who in (OURS, FIT)}
        bound = BOUND_OF_ONE if number == 1 else BOUND_OF_MORE
        what = f"{name}, {backend}, {number} replica{'s' * (number > 1)}"
        add(report, what, OURS, FIT, turns.alternate(ways, rounds), bound)
    taken = [restart(backend, name) for _ in range(rounds)]
    add(report, f"{name}, {backend}, compiled by XLA", KEPT, EMPTY, taken, CASES[name].kept_at_most)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=5, cases="mlp,cnn", replicas="1,4")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--replicas", default="1,2,4,8", help="of TensorFlow; resnet50 has 1 and 4 of them")
    parser.add_argument("--backends", default="tensorflow,jax")
    for name in ("contender", "directory"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [int(number) for number in arguments.replicas.split(",")]
    if arguments.contender:
        found = measure(CASES[arguments.cases], arguments.contender, wanted[0], arguments.directory)
        print(json.dumps(found))
        return 0
    report = results.Report("start", arguments.json)
    for backend in arguments.backends.split(","):
        for name in arguments.cases.split(","):
            replicas = [number for number in CASES[name].replicas if number in wanted]
            measure_all(report, backend, name, replicas, arguments.rounds)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
