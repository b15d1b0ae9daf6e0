"""How near our loop comes to two independent processes, when two replicas share the work: weak scaling on two cores.

    python -m scripts.bench_scaling [--rounds=11] [--cases='cnn 10 ms'] [--backends=tensorflow,jax]

Each replica has its own share of one size, and one thread for its computing. The ideal is honest about the machine, its
caches and its memory: two processes that know nothing of each other train at once, and the slower one counts. With them
take turns: two virtual replicas in one process, and two processes with a replica each (MultiWorkerMirroredStrategy, or
processes of JAX). A ratio is the part of the ideal that is reached. Needs two cores to itself.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import socket
import sys
from collections.abc import Mapping, Sequence

from scripts.benches import loop_work, results, turns

STEPS = 50  # in a loop
OPTIMIZER = "sgd"
IDEAL = "ideal"
# What of the ideal the step of some milliseconds has to reach; a short one is for looking at.
BOUNDS = {"cnn 10 ms": 0.8}
CASES = ("mlp 1 ms", "cnn 10 ms")
ONE_THREAD = {
    "tensorflow": {},  # `contend` sets it
    "jax": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"},
}
# Ways, each with the replicas of its processes, and whether these train together.
WAYS: Mapping[str, tuple[Sequence[int], bool]] = {
    IDEAL: ((1, 1), False),
    "2 virtual replicas": ((2,), False),
    "2 processes": ((1, 1), True),
}


def contend(replicas: int, num_workers: int) -> None:
    """One process of a way."""
    import keras
    import tensorflow as tf

    from scripts.benches import loop_contenders

    if keras.backend.backend() == "tensorflow":
        tf.config.threading.set_intra_op_parallelism_threads(1)

    def make(name: str, steps: int) -> turns.Run:
        case = loop_work.CASES[name]
        case = dataclasses.replace(case, batch=case.batch // 2 * replicas * num_workers)
        return loop_contenders.ours(case, OPTIMIZER, replicas, steps, num_workers=num_workers)

    turns.serve(make)


class Way:
    """The processes of one way, told and heard together; the slower one counts."""

    def __init__(self, name: str, backend: str, stack: contextlib.ExitStack):
        replicas, together = WAYS[name]
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(replicas))]
        self._processes = []
        for index, number in enumerate(replicas):
            environ = {"KERAS_BACKEND": backend, **ONE_THREAD[backend]}
            if together:
                task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                environ["TF_CONFIG"] = json.dumps(task)
            flags = [f"--replicas={number}", f"--workers={len(replicas) if together else 1}"]
            process = turns.Contender("scripts.bench_scaling", name, flags, environ)
            stack.callback(process.close)
            self._processes.append(process)

    def ask(self, case: str | None, loops: int) -> turns.Answer:
        """Trains loops of each process."""
        for process in self._processes:
            process.tell(case, STEPS, loops)
        heard = [process.hear() for process in self._processes]
        return {key: max(answer[key] for answer in heard) for key in ("ms", "cpu_ms")}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def measure(report: results.Report, ways: Mapping[str, Way], case: str, rounds: int, backend: str) -> None:
    """One model on one backend."""
    loops = loop_work.CASES[case].loops
    for way in ways.values():
        way.ask(case, 1)
    taken = turns.alternate({name: functools.partial(way.ask, None, loops) for name, way in ways.items()}, rounds)
    for name in ways:
        if name != IDEAL:
            note = f"{turns.step(taken, name)} / {turns.step(taken, IDEAL)}"
            ratios = turns.ratios(taken, name, IDEAL)
            bound = BOUNDS.get(case)
            report.add(f"{case}, {backend}", f"{name} / two apart", ratios, at_least=bound, note=note)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=11)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(loop_work.CASES)}")
    parser.add_argument("--backends", default=",".join(ONE_THREAD))
    for name in ("contender", "replicas", "workers"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contend(int(arguments.replicas), int(arguments.workers))
        return 0
    report = results.Report("scaling", arguments.json)
    for backend in arguments.backends.split(","):
        with contextlib.ExitStack() as stack:
            ways = {name: Way(name, backend, stack) for name in WAYS}
            for case in arguments.cases.split(","):
                measure(report, ways, case, arguments.rounds, backend)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
