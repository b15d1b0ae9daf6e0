"""Optimizers and schedules against their definition, and on several replicas."""

import fnmatch
import inspect
import math
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.spec import Array, Spec
from tests import optimizers_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import models, optimizers, patterns
from trainer.config import FIELDS, Config
from trainer.errors import ConfigError
from trainer.optimizers.layerwise import Lamb, Lars
from trainer.optimizers.schedules import Schedule
from trainer.options.optimizer import LAYERWISE, NO_DECAY, OPTIMIZERS, SCHEDULES
from trainer.plan import LearningRate

CONSTANT = LearningRate("constant", 0.1, train_steps=100)
# Those that do more than Keras' base class does for them; sgd and adamw are trained by test_replicated.py too.
OF_THEIR_OWN_KIND = ("adafactor", "lamb", "lars", "muon", "nadam")
OTHERS = tuple(sorted(OPTIMIZERS.keys() - {*OF_THEIR_OWN_KIND}))

# --- schedules ---


def expected(planned: LearningRate, steps: np.ndarray) -> np.ndarray:
    """The formulas, float64, of [N] steps."""
    t, w, end = steps.astype(np.float64), planned.warmup_steps, planned.train_steps
    rest = np.clip((end - t) / (end - w), 0, 1)
    final = planned.final_factor
    after = {
        "constant": lambda: np.ones_like(t),
        "cosine": lambda: final + (1 - final) * np.sin(np.pi / 2 * rest) ** 2,  # (1 + cos(pi (1 - rest))) / 2
        "polynomial": lambda: final + (1 - final) * rest**planned.decay_power,
        "exponential": lambda: planned.decay_factor ** ((t - w) / planned.decay_every_steps),
        "step": lambda: np.prod([np.where(t < at, 1, planned.decay_factor) for at in planned.decay_steps], axis=0),
        "rsqrt": lambda: np.sqrt(w / np.maximum(t, w)),
        "wsd": lambda: final + (1 - final) * np.clip((end - t) / (end - planned.decay_steps[0]), 0, 1),
    }[planned.schedule]()
    return planned.peak * np.where(t < w, t / max(w, 1), after)


def planned_for(schedule: str, scale: int, warmup: int = 50) -> LearningRate:
    """A schedule over 1,000 x `scale` steps."""
    return LearningRate(
        schedule,
        0.3,
        train_steps=1000 * scale,
        warmup_steps=warmup * scale,
        decay_steps=(900 * scale,) if schedule == "wsd" else (300 * scale, 600 * scale, 601 * scale),
        decay_every_steps=120 * scale,
        decay_factor=0.5,
        decay_power=2.0,
        final_factor=0.0 if schedule == "cosine" else 0.01,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_is_its_formula_at_every_step(schedule: str) -> None:
    for warmup in (50, 1, 0) if schedule != "rsqrt" else (50, 1):
        planned = planned_for(schedule, 1, warmup)
        steps = np.arange(1001)
        np.testing.assert_allclose(Schedule(planned)(steps), expected(planned, steps), rtol=1e-6)
    assert float(Schedule(planned_for(schedule, 1))(25)) == pytest.approx(0.15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_of_more_steps_than_float32_counts(schedule: str) -> None:
    planned = planned_for(schedule, 10**6)  # 1e9, and float32 counts to 1.7e7
    marks = [0, planned.warmup_steps, *planned.decay_steps, planned.train_steps]
    steps = np.array([mark + near for mark in marks for near in (-100, -1, 0, 1, 100) if mark + near >= 0])
    compiled = tf.function(Schedule(planned), jit_compile=True, input_signature=[tf.TensorSpec([], tf.int64)])
    found = np.array([compiled(step) for step in steps])
    np.testing.assert_allclose(found, expected(planned, steps), rtol=1e-6)


# --- what Keras takes ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_are_those_of_the_constructor(name: str) -> None:
    signature = inspect.signature(optimizers.KINDS[name].__init__).parameters
    options_of_their_own = {"learning_rate", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"}
    options_of_their_own |= {"ema_momentum", "ema_overwrite_frequency", "gradient_accumulation_steps"}
    elsewhere = {"self", "name", "kwargs", "of_every_optimizer", "loss_scale_factor", "adam_weight_decay"}
    takes = {key: p.default for key, p in signature.items() if key not in options_of_their_own | elsewhere}
    ours = {"momentum": 0.0} if name == "sgd" else {"exclude_layers": None} if name == "muon" else {}
    useless = {"relative_step": True} if name == "adafactor" else {}
    assert {**OPTIMIZERS[name], **ours, **useless} == takes


def test_every_optimizer_of_keras_has_a_name() -> None:
    # MultiOptimizer and its OptimizerMap are made of others; what is wrong with the schedule-free one says options/.
    left_out = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap", "ScheduleFreeAdamW"}
    there = {n.lower() for n in vars(keras.optimizers) if n[0].isupper() and n not in left_out}
    assert there | {"lars"} == {*OPTIMIZERS} == {*optimizers.KINDS} == {*FIELDS["optimizer"].metadata["choices"]}


def test_what_is_given_arrives() -> None:
    given = {"momentum": 1, "nesterov": True}
    built = optimizers.build(Config(optimizer="sgd", optimizer_options=given, clipvalue=0.5), CONSTANT)
    assert (built.momentum, built.nesterov, built.clipvalue, built.weight_decay) == (1.0, True, 0.5, None)
    assert optimizers.build(Config(optimizer="sgd"), CONSTANT).momentum == 0.9
    with pytest.raises(ConfigError, match=r"optimizer_options of sgd cannot be used: .*between \[0, 1\]"):
        optimizers.build(Config(optimizer="sgd", optimizer_options={"momentum": 1.5}), CONSTANT)


# --- weight decay ---


def decayed_by(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> set[str]:
    """Variables that a step with gradients of 0 makes smaller by the factor that decay is meant to have."""
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape))
    optimizer.build(model.trainable_variables)
    optimizer.apply([np.zeros(v.shape, "float32") for v in model.trainable_variables])
    after = {v.path: v.numpy() for v in model.trainable_variables}
    found = {path for path, values in after.items() if (values != 1.0).any()}
    for path in found:
        np.testing.assert_allclose(after[path], 1 - 0.1 * 0.5, rtol=1e-5, err_msg=path)
    return found


def transformer() -> keras.Model:
    """Everything that is left out, beside what is not, in layers whose names mislead."""
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 8, name="token_and_position_embedding")(tokens)
    x = x + keras.layers.Embedding(6, 8, name="position_embedding")(keras.ops.arange(6))
    x = x + keras.layers.MultiHeadAttention(2, 4, name="scale_free")(keras.layers.RMSNormalization(name="rms")(x), x)
    x = keras.layers.Dense(8, name="debiased")(keras.layers.LayerNormalization(name="layer_norm")(x))
    x = keras.layers.BatchNormalization(name="batch_norm")(x)
    return keras.Model(tokens, keras.layers.Dense(2, name="alphabeta")(x))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("ftrl", *LAYERWISE)])
def test_weight_decay_leaves_out_biases_norms_and_positions(name: str) -> None:
    optimizer = optimizers.build(Config(optimizer=name, weight_decay=0.5), CONSTANT)
    attention = {f"scale_free/{part}/kernel" for part in ("query", "key", "value", "attention_output")}
    kernels = {"token_and_position_embedding/embeddings", "debiased/kernel", "alphabeta/kernel"}
    assert decayed_by(optimizer, transformer()) == {*attention, *kernels}


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_weight_decay_of_built_in_models_is_that_of_their_kernels(name: str) -> None:
    spec = Spec(Array((32, 32, 3), "uint8"), Array((), "int32"), 10, "classification")
    model = models.find(name, {}).build(spec)
    decayed = decayed_by(optimizers.build(Config(optimizer="sgd", weight_decay=0.5), CONSTANT), model)
    assert decayed == {v.path for v in model.trainable_variables if v.name.endswith("kernel")}
    assert len(decayed) >= 2


def test_no_decay_takes_patterns_of_whole_names() -> None:
    config = Config(optimizer="sgd", weight_decay=0.5, no_decay="token*/*, debiased/bias,scale_free/*,*a")
    decayed = decayed_by(optimizers.build(config, CONSTANT), transformer())
    left_out = ["token*", "scale_free*", "*a", "debiased/bias"]
    every = [variable.path for variable in transformer().trainable_variables]
    assert decayed == {path for path in every if not any(fnmatch.fnmatchcase(path, p) for p in left_out)}
    everything = optimizers.build(Config(optimizer="sgd", weight_decay=0.5, no_decay=""), CONSTANT)
    assert len(decayed_by(everything, transformer())) == len(every)


def test_a_pattern_that_fits_nothing_is_refused_but_for_the_default_ones() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
    misspelt = optimizers.build(Config(weight_decay=0.5, no_decay=f"{NO_DECAY}, out/kernal"), CONSTANT)
    with pytest.raises(
        ConfigError, match=r"no_decay fits no variable. Received: out/kernal. Variables are:\n .*out/ker"
    ):
        misspelt.build(model.trainable_variables)
    assert len(patterns.split(NO_DECAY)) == 7


# --- optimizers for large batches, against NumPy ---

SHAPES = {"kernel": (5, 4), "bias": (4,), "dead": (3, 3), "zero": (2, 2)}


def numpy_lars(w: dict, gradients: list[dict], rate: float, decay: float, trust: float, momentum: float) -> dict:
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for step in gradients:
        for name, g in step.items():
            if name == "bias":
                scaled = rate
            else:
                length = np.linalg.norm(g) + decay * np.linalg.norm(w[name])
                scaled = rate * trust * np.linalg.norm(w[name]) / length if np.linalg.norm(w[name]) > 0 else rate
                scaled *= trust if np.linalg.norm(w[name]) == 0 else 1
                g = g + decay * w[name]
            velocity[name] = momentum * velocity[name] + scaled * g
            w[name] = w[name] - velocity[name]
    return w


def numpy_lamb(w: dict, gradients: list[dict], rate: float, decay: float) -> dict:
    mean = {name: np.zeros_like(value) for name, value in w.items()}
    square = {name: np.zeros_like(value) for name, value in w.items()}
    for count, step in enumerate(gradients, start=1):
        for name, g in step.items():
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.999 * square[name] + 0.001 * g**2
            update = mean[name] / (1 - 0.9**count) / (np.sqrt(square[name] / (1 - 0.999**count)) + 1e-7)
            ratio = 1.0
            if name != "bias":
                update = update + decay * w[name]
                lengths = np.linalg.norm(w[name]), np.linalg.norm(update)
                ratio = lengths[0] / lengths[1] if min(lengths) > 0 else 1.0
            w[name] = w[name] - rate * ratio * update
    return w


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_layerwise_optimizer_is_that_of_numpy_over_20_steps(kind: type) -> None:
    rng = np.random.default_rng(0)
    begin = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    begin["zero"] *= 0
    gradients = [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(20)]
    for step in gradients:
        step["dead"] *= 0  # nothing but decay
    variables = [keras.Variable(value.astype("float32"), name=name) for name, value in begin.items()]
    name = kind.__name__.lower()
    config = Config(
        optimizer=name, weight_decay=0.02, optimizer_options={"trust_coefficient": 0.1} if kind is Lars else {}
    )
    optimizer = optimizers.build(config, LearningRate("constant", 0.1, 100))
    for step in gradients:
        optimizer.apply([step[v.name].astype("float32") for v in variables], variables)
    if kind is Lars:
        found = numpy_lars(begin, gradients, 0.1, 0.02, 0.1, 0.9)
    else:
        found = numpy_lamb(begin, gradients, 0.1, 0.02)
    for variable in variables:
        np.testing.assert_allclose(variable, found[variable.name], rtol=1e-6, atol=1e-6, err_msg=variable.name)


# --- on replicas ---


def states_of(tmp_path: pathlib.Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What `optimizers_worker` stores."""
    command = [sys.executable, "-m", "tests.optimizers_worker", str(tmp_path / "states.npz"), *names]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=2 * GUARD_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(tmp_path / "states.npz"))


def below(found: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Arrays whose names begin with `prefix`, without it; metrics, sums over replicas, are for others to compare."""
    names = [key for key in found if key.startswith(prefix) and not key.startswith(f"{prefix}metrics/")]
    return {name.removeprefix(prefix): found[name] for name in names}


def check_replicas(found: dict[str, np.ndarray], name: str) -> None:
    """Two replicas train as one does, and a run that resumes as one that does not."""
    one, two = (below(found, f"{name}/{n}/uninterrupted/") for n in (1, 2))
    assert one.keys() == two.keys()
    assert any("average" in key for key in one)
    for key, array in one.items():
        np.testing.assert_allclose(two[key], array, rtol=0, atol=1e-5, err_msg=f"{name}, 2 replicas: {key}")
    for n in (1, 2):
        resumed = below(found, f"{name}/{n}/resumed/")
        for key, array in below(found, f"{name}/{n}/uninterrupted/").items():
            np.testing.assert_array_equal(resumed[key], array, err_msg=f"{name}, {n} replicas, resumed: {key}")


@pytest.mark.slow
def test_optimizers_on_replicas_and_averages(tmp_path: pathlib.Path) -> None:
    found = states_of(tmp_path, OF_THEIR_OWN_KIND)
    for name in OF_THEIR_OWN_KIND:
        check_replicas(found, name)
    for n in (1, 2):
        steps = range(optimizers_worker.EMA_STEPS)
        check_averages([below(found, f"{optimizers_worker.EMA_OF}/{n}/{step}/") for step in steps])


@pytest.mark.nightly
def test_all_other_optimizers_on_replicas(tmp_path: pathlib.Path) -> None:
    found = states_of(tmp_path, OTHERS)
    for name in OTHERS:
        check_replicas(found, name)


def check_averages(states: list[dict[str, np.ndarray]]) -> None:
    """The average begins with the weights after the first step, and keeps `EMA_MOMENTUM` of itself at each further."""
    keep = optimizers_worker.EMA_MOMENTUM
    names = [key.removeprefix("model/") for key in states[0] if key.startswith("model/")]
    assert len(names) == 5
    for name in names:
        average = states[0][f"model/{name}"].astype(np.float64)
        for step, state in enumerate(states):
            average = keep * average + (1 - keep) * state[f"model/{name}"]
            flat = name.replace("/", "_")
            [kept] = [a for key, a in state.items() if "average" in key and flat in key.replace("/", "_")]
            np.testing.assert_allclose(kept, average, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
        assert math.dist(average.ravel(), states[-1][f"model/{name}"].ravel()) > 1e-3, "it lags behind"
