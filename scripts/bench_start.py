"""The time until the first step is done: ours against Keras' own `fit`, on the same model, data and replicas.

    python -m scripts.bench_start [--rounds=5] [--cases=mlp,cnn,resnet50] [--replicas=1,2,4,8] [--backend=tensorflow]

Counted from the call: building the optimizer's variables, tracing, compiling and one step; imports, data and the making
of the model are not. With --restart ours is compiled by XLA and started twice instead, with a `compile_cache` that is
empty and then not. Each start is a process; the two take turns. Prints seconds and seconds of CPU, which a busy machine
changes less, as medians, and the ratio of CPU as median and quartiles. Keras' `fit` on JAX runs on one replica here.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

BATCH = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A built-in model with its options, and the shape of an image."""

    model: str
    options: Mapping[str, Any]
    image: tuple[int, int, int]


CASES = {
    "mlp": Case("mlp", {"units": [128]}, (28, 28, 1)),
    "cnn": Case("cnn", {}, (28, 28, 1)),
    "resnet50": Case("resnet", {"depth": 50, "width": 16}, (64, 64, 3)),
}
OURS, FIT, EMPTY, KEPT = "ours", "fit", "empty cache", "kept cache"


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
        made.run_train_loop(iterator, 1)

    return ours


def measure(case: Case, who: str, replicas: int, directory: str | None) -> dict[str, float]:
    """Seconds of one first step, in this process."""
    from trainer import compile_cache

    with compile_cache.opened(directory) if directory else contextlib.nullcontext():
        run = start(case, who, replicas)
        begun, cpu = time.perf_counter(), time.process_time()
        run()
        return {"secs": time.perf_counter() - begun, "cpu_secs": time.process_time() - cpu}


def in_a_process(backend: str, *arguments: str) -> dict[str, float]:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", "scripts.bench_start", *arguments]
    environ = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, replicas: int, backend: str, rounds: int, contenders: tuple[str, str]) -> None:
    """Lets two take turns, and prints what they take and the ratio of the first's CPU to the second's."""
    found: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            cached = [f"--directory={directory}"] if EMPTY in contenders else []
            for who in contenders if cached or len(found[contenders[0]]) % 2 else reversed(contenders):
                one = [f"--cases={case}", f"--replicas={replicas}", f"--measure={who}", *cached]
                found[who].append(in_a_process(backend, *one))
    for who, turns in found.items():
        secs, cpu = (statistics.median(turn[key] for turn in turns) for key in ("secs", "cpu_secs"))
        print(f"{case:9s} {replicas} replica(s)  {who:12s} {secs:7.2f} s  {cpu:7.2f} s of CPU")
    first, second = (found[who] for who in contenders)
    ratios = [one["cpu_secs"] / other["cpu_secs"] for one, other in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    print(f"{'':9s} {contenders[0]} / {contenders[1]}: {middle:.2f} of the CPU ({low:.2f} to {high:.2f})", flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--replicas", default="1,2,4,8")
    parser.add_argument("--backend", default="tensorflow", choices=("tensorflow", "jax"))
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--measure", choices=(OURS, FIT, EMPTY, KEPT), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        case, replicas = CASES[arguments.cases], int(arguments.replicas)
        print(json.dumps(measure(case, arguments.measure, replicas, arguments.directory)))
        return
    contenders = (EMPTY, KEPT) if arguments.restart else (OURS, FIT)
    for case in arguments.cases.split(","):
        for replicas in map(int, arguments.replicas.split(",")):
            if arguments.backend == "tensorflow" or replicas == 1 or arguments.restart:
                compare(case, replicas, arguments.backend, arguments.rounds, contenders)


if __name__ == "__main__":
    main()
