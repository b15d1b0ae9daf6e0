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
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scripts.benches import results, turns

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


def ours(case: Case, replicas: int, xla: bool) -> turns.Run:
    """The loop of this project on the backend of this process."""
    import keras

    from data.spec import Array, Spec
    from scripts.benches import ours as project
    from trainer import models, tasks

    share = case.batch // replicas
    spec = Spec(Array(case.image, "uint8"), Array((), "int32"), NUM_CLASSES)

    def compiled() -> keras.Model:
        model = models.find(case.model, case.options).build(spec)
        model.compile(
            keras.optimizers.SGD(case.learning_rate, momentum=MOMENTUM),
            tasks.loss(spec),
            weighted_metrics=tasks.metrics(spec),
            jit_compile=False,
        )
        return model

    batch_spec = (keras.KerasTensor((share, *case.image), "uint8"), keras.KerasTensor((share,), "int32"))
    trained, run = project.loop(
        compiled, project.connected(replicas), batch_spec, lambda: dataset(case, share), xla=xla
    )
    shapes = {name: shape for name, (shape, _) in trained.signature().items() if name.endswith("/kernel")}
    trained.load_state(dict(zip(shapes, kernels(list(shapes.values())), strict=True)))
    return run


def contend(contender: str, replicas: int) -> None:
    """The process of a contender."""

    def make(case: str, _: int) -> turns.Run:
        if contender in (PLAIN, CHECKED):
            from scripts.benches import flax_loop

            return flax_loop.plain(CASES[case], replicas, checked=contender == CHECKED)
        return ours(CASES[case], replicas, CONTENDERS[contender][1])

    turns.serve(make)


# What the bench does with them.


def measure(
    report: results.Report, name: str, contenders: Mapping[str, turns.Contender], rounds: int, steps: int, where: str
) -> None:
    """Measures and prints one case."""
    print(f"{name}: {CASES[name].model} {dict(CASES[name].options)}, {CASES[name].batch} x {CASES[name].image}")
    if not turns.lose_alike(turns.losses(contenders, name, EQUAL_STEPS), PLAIN, TOLERANCE):
        report.fail(f"{name}, {where}", f"losses differ by more than {TOLERANCE:g}")
        return
    ways = {who: functools.partial(one.ask, None, steps, 1) for who, one in contenders.items()}
    turns.alternate(ways, 1)
    taken = turns.alternate(ways, rounds)
    for who in contenders:
        if who != PLAIN:
            bound = CASES[name].bound if who == "jax" else None
            note = f"{turns.step(taken, who)} / {turns.step(taken, PLAIN)}"
            ratios = turns.ratios(taken, who, PLAIN)
            report.add(f"{name}, {where}", f"{who} / plain loop of Flax", ratios, at_least=bound, note=note)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=11)
    parser.add_argument("--steps_per_loop", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contend(arguments.contender, arguments.replicas)
        return 0
    report = results.Report("backends", arguments.json)
    cases = [name for name in arguments.cases.split(",") if arguments.replicas == 1 or name not in NORMALISED]
    environ = {name: {"KERAS_BACKEND": backend} for name, (backend, _) in CONTENDERS.items()}
    where = f"{arguments.replicas} replica{'s' if arguments.replicas > 1 else ''}"
    flags = [f"--replicas={arguments.replicas}"]
    with turns.contenders("scripts.bench_backends", CONTENDERS, flags, environ) as contenders:
        for name in cases:
            measure(report, name, contenders, arguments.rounds, arguments.steps_per_loop, where)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
