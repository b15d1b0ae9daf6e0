"""Our loop on TensorFlow and on JAX against a plain loop of Flax and Optax: same model, data and optimizer, in one run.

    python -m scripts.bench_backends [--rounds=11] [--steps_per_loop=100] [--replicas=1] [--cases=mlp,cnn]

Needs the extras jax and bench. First all contenders have to lose alike: the same weights and batches give the same
losses over 20 steps, or the bench fails. Then they take turns, loop by loop, so that a machine whose speed drifts slows
all of them; a ratio is the median over rounds, its spread the quartiles. Exits 1 where losses differ or a bound is
missed.

Keras has one backend a process, so a contender is a process; one works, the others wait for their turn.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

EQUAL_STEPS, TOLERANCE = 20, 1e-4
MOMENTUM = 0.9
NUM_CLASSES, NUM_BATCHES = 10, 50
# Each contender: the backend of Keras, and whether our TensorFlow engine compiles with XLA. The last two are not ours:
# the plain loop, and the same with steps that are not finite left out by Optax, as ours leave them out.
PLAIN, CHECKED = "flax", "flax, checked"
CONTENDERS = {
    "tensorflow": ("tensorflow", False),
    "tensorflow xla": ("tensorflow", True),
    "jax": ("jax", False),
    PLAIN: ("jax", False),
    CHECKED: ("jax", False),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A built-in model with its options, the shape of an image, examples a step, and the least ours on JAX may do."""

    model: str
    options: Mapping[str, Any]
    image: tuple[int, int, int]
    batch: int
    learning_rate: float = 0.01
    bound: float | None = None


CASES = {
    "small": Case("mlp", {"units": [32]}, (8, 8, 1), 32),
    "mlp": Case("mlp", {"units": [512, 512, 512]}, (28, 28, 1), 128, learning_rate=0.001, bound=0.95),
    "cnn": Case("cnn", {"filters": [16, 32], "batch_norm": False, "dropout": 0.0}, (28, 28, 1), 32, bound=0.95),
    # A small rate: a larger one is chaotic here, and makes 1e-2 of the last digits of a convolution within 20 steps.
    "resnet18": Case(
        "resnet",
        {"depth": 18, "width": 8, "stem": "small", "zero_gamma": False},
        (32, 32, 3),
        16,
        learning_rate=1e-4,
        bound=0.95,
    ),
}
# Replicas have statistics of their own shares, and the plain loop those of the global batch.
NORMALISED = ("resnet18",)

# A call trains that many steps and returns the loss of the last one, or a mean over them.
Run = Callable[[int], float]


# What a contender does: in a process of its own.


def dataset(case: Case, share: int) -> Any:
    """Batches of `share` examples: images [share, H, W, C] uint8 and labels [share] int32, for ever."""
    import tensorflow as tf

    generator = np.random.default_rng(1)
    examples = NUM_BATCHES * case.batch
    images = generator.integers(0, 256, (examples, *case.image), np.uint8)
    labels = generator.integers(0, NUM_CLASSES, examples, np.int32)
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(share, drop_remainder=True)
    return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)


def kernels(shapes: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Initial kernels, in the order in which a model's layers are made (He et al. 2015, arXiv:1502.01852)."""
    generator = np.random.default_rng(0)
    for shape in shapes:
        yield generator.normal(0.0, (2.0 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32)


def ours(case: Case, replicas: int, xla: bool) -> Run:
    """The loop of this project on the backend of this process."""
    import keras

    from data.spec import Array, Spec
    from trainer import models, replicated, tasks

    devices = connected(replicas)
    share = case.batch // replicas
    spec = Spec(Array(case.image, "uint8"), Array((), "int32"), NUM_CLASSES)
    with devices.scope():
        model = models.find(case.model, case.options).build(spec)
        model.compile(
            keras.optimizers.SGD(case.learning_rate, momentum=MOMENTUM),
            tasks.loss(spec),
            weighted_metrics=tasks.metrics(spec),
            jit_compile=False,
        )
    batch_spec = (keras.KerasTensor((share, *case.image), "uint8"), keras.KerasTensor((share,), "int32"))
    trained = replicated.Replicated(model, devices, batch_spec, xla=xla)
    shapes = {name: shape for name, (shape, _) in trained.signature().items() if name.endswith("/kernel")}
    trained.load_state(dict(zip(shapes, kernels(list(shapes.values())), strict=True)))
    batches = iter(devices.distribute(lambda _: dataset(case, share)))

    def run(steps: int) -> float:
        trained.reset_metrics()
        return trained.run_train_loop(batches, steps).logs["loss"]

    return run


@functools.cache
def connected(replicas: int) -> Any:
    """The devices of this process; they can be set up once."""
    from trainer import cluster, hardware

    return cluster.connect(hardware.resolve(tpu=None, replicas=replicas, environ={}), connect_timeout_secs=60)


def contend(contender: str, replicas: int) -> None:
    """Answers the messages on stdin, a line each, until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # others' words are no answers
    run: Run | None = None
    for line in sys.stdin:
        case, steps = json.loads(line)
        if case is not None:
            run = None  # first gone, then another
            if contender in (PLAIN, CHECKED):
                from scripts import bench_flax

                run = bench_flax.plain(CASES[case], replicas, checked=contender == CHECKED)
            else:
                run = ours(CASES[case], replicas, CONTENDERS[contender][1])
        begun, cpu = time.perf_counter(), time.process_time()
        losses = [run(1) for _ in range(steps)] if case is not None else [run(steps)]
        secs, cpu = time.perf_counter() - begun, time.process_time() - cpu
        print(json.dumps({"losses": losses, "ms": 1e3 * secs / steps, "cpu_ms": 1e3 * cpu / steps}), file=answers)
        answers.flush()


# What the bench does with them.


class Contender:
    """The process of one, and what it is asked."""

    def __init__(self, name: str, replicas: int):
        command = [sys.executable, "-m", "scripts.bench_backends", f"--contender={name}", f"--replicas={replicas}"]
        environ = os.environ | {"KERAS_BACKEND": CONTENDERS[name][0], "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environ
        )

    def ask(self, case: str | None, steps: int) -> dict[str, Any]:
        """Trains a case anew, one step a loop, or goes on with one loop of the last case."""
        self._process.stdin.write(json.dumps([case, steps]) + "\n")
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        raise SystemExit(f"a contender ended with {self._process.wait()}: {' '.join(self._process.args)}")


def agree(losses: Mapping[str, Sequence[float]]) -> bool:
    """Whether all lose like the plain loop; prints the largest difference."""
    gaps = {name: float(np.max(np.abs(np.subtract(found, losses[PLAIN])))) for name, found in losses.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    print(f"  losses of {EQUAL_STEPS} steps: {losses[PLAIN][0]:.4f} to {losses[PLAIN][-1]:.4f}, ", end="")
    print(f"largest difference {gaps[worst]:.1e} ({worst} and {PLAIN})")
    return all(gap <= TOLERANCE for gap in gaps.values())


def measure(name: str, contenders: Mapping[str, Contender], rounds: int, steps: int) -> bool:
    """Measures and prints one case; returns whether losses agree and the bound is kept."""
    print(f"{name}: {CASES[name].model} {dict(CASES[name].options)}, {CASES[name].batch} x {CASES[name].image}")
    if not agree({who: one.ask(name, EQUAL_STEPS)["losses"] for who, one in contenders.items()}):
        print(f"  the losses DIFFER by more than {TOLERANCE}: nothing is measured")
        return False
    for one in contenders.values():
        one.ask(None, steps)
    turns: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        turns.append({who: contenders[who].ask(None, steps) for who in order})
    for who in contenders:
        ms, cpu = (statistics.median(turn[who][key] for turn in turns) for key in ("ms", "cpu_ms"))
        low, ratio, high = statistics.quantiles([turn[PLAIN]["ms"] / turn[who]["ms"] for turn in turns], n=4)
        line = f"  {who:15s} {1e3 / ms:7.0f} steps/s  {ms:7.3f} ms a step, {cpu:7.3f} ms of CPU"
        print(f"{line}  {ratio:5.2f} of the plain loop ({low:.2f} to {high:.2f})")
        if who == "jax":
            ours_on_jax = ratio
    bound = CASES[name].bound
    print(f"  {'no bound' if bound is None else f'bound {bound}: ' + ('kept' if ours_on_jax >= bound else 'MISSED')}")
    return bound is None or ours_on_jax >= bound


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps_per_loop", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contend(arguments.contender, arguments.replicas)
        return 0
    contenders = {name: Contender(name, arguments.replicas) for name in CONTENDERS}
    cases = [name for name in arguments.cases.split(",") if arguments.replicas == 1 or name not in NORMALISED]
    kept = [measure(name, contenders, arguments.rounds, arguments.steps_per_loop) for name in cases]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
