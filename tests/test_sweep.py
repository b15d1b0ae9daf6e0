"""--mode=sweep_lr: the learning rate of each step, where a loss comes apart, what it leaves and refuses."""

import json
import math
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import Trainer
from tests.devices import one_replica
from trainer import config, replicated, sweep, sweep_picture
from trainer.errors import ConfigError
from trainer.modes import sweep_lr
from trainer.sweep import Point, Range, Sweep

ONLY_FILES = {"sweep_lr.json", "sweep_lr.svg"}
EXAMPLES, FEATURES = 32, 4
RANGE = Range(1e-4, 1e2, 120)


# --- against what is known ---


def linear(
    optimizer: keras.optimizers.Optimizer, gain: float = 1.0, bad: float = 0.0
) -> tuple[replicated.Replicated, tf.data.Dataset, float]:
    """Least squares; its batches, always of the same X; and the learning rate beyond which gradient descent diverges.

    That is 2 / (largest eigenvalue of the Hessian), 2 X^T X / n for the mean of squares. Each batch has noise of its
    own in y: without any, descent first shrinks what then has to grow to nothing.
    """
    random = np.random.default_rng(0)
    x = gain * random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    noise = random.normal(size=(RANGE.steps, EXAMPLES, 1))
    y = (3 * x @ random.normal(size=(FEATURES, 1)) / gain + noise).astype("float32")
    limit = 2 / np.linalg.eigvalsh(2 * x.T @ x / EXAMPLES).max()
    keras.utils.clear_session()
    given = keras.Input((FEATURES,))
    model = keras.Model(given, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(given))
    model.compile(optimizer, "mse", jit_compile=False)
    spec = keras.KerasTensor((EXAMPLES, FEATURES)), keras.KerasTensor((EXAMPLES, 1))
    trained = replicated.Replicated(model, one_replica(), spec)
    return trained, tf.data.Dataset.from_tensor_slices(y).map(lambda y: (x + bad, y)), limit


def measured(trained: replicated.Replicated, batches: tf.data.Dataset, asked: Range = RANGE) -> Sweep:
    sweep_lr.replace_schedule(trained, asked)
    return sweep_lr.measure(trained, iter(batches), asked, list)


def test_gradient_descent_diverges_where_the_largest_eigenvalue_says() -> None:
    """And each step has the learning rate of the formula, whatever the schedule of the run."""
    schedule = keras.optimizers.schedules.CosineDecay(1e-9, 5)
    trained, batches, limit = linear(keras.optimizers.SGD(schedule), gain=0.2)
    found = measured(trained, batches)
    assert found.ended == sweep.DIVERGED
    least = found.points[found.least].learning_rate
    assert limit / 2 < least < limit * 2
    assert found.suggestion == pytest.approx(least / 10)
    rates = [point.learning_rate for point in found.points]
    expected = RANGE.low * (RANGE.high / RANGE.low) ** (np.arange(len(rates)) / (RANGE.steps - 1))
    np.testing.assert_allclose(rates, expected, rtol=1e-4)
    np.testing.assert_allclose(found.points[0].loss, np.mean(next(iter(batches))[1].numpy() ** 2), rtol=1e-5)
    assert limit * 10 > rates[-1], "it stops soon behind"


def test_a_learning_rate_that_is_a_number_rises_too_and_the_end_is_told() -> None:
    trained, batches, _ = linear(keras.optimizers.Adam(1e-3))
    found = measured(trained, batches, Range(1e-3, 0.3, 60))
    assert [point.learning_rate for point in found.points[::59]] == pytest.approx([1e-3, 0.3], rel=1e-4)
    assert (found.ended, found.suggestion) == (sweep.COMPLETE, None)
    assert "raise --sweep_to=0.3" in sweep.headline(found)


def test_a_step_that_is_not_finite_ends_it_and_the_very_first_is_refused() -> None:
    trained, batches, _ = linear(keras.optimizers.SGD(1.0))
    one = next(iter(batches))
    turned = (
        tf.data.Dataset.from_tensors(one)
        .repeat(7)
        .concatenate(tf.data.Dataset.from_tensors((one[0] * math.nan, one[1])))
    )
    found = measured(trained, turned)
    assert (found.ended, len(found.points)) == (sweep.NOT_FINITE, 7)
    with pytest.raises(ConfigError, match="very first step .* Received: --sweep_from=0.0001"):
        measured(*linear(keras.optimizers.SGD(1.0), bad=math.nan)[:2])


class Fixed(keras.optimizers.SGD):
    """Its learning rate is nobody's business."""

    learning_rate = property(lambda self: 0.1)


class Deaf(keras.optimizers.SGD):
    """It takes what it is given for a hint."""

    learning_rate = property(lambda self: 0.1, lambda self, value: None)


@pytest.mark.parametrize(("kind", "text"), [(Fixed, "setter"), (Deaf, "0.1 after it was set to 0.0001")])
def test_a_learning_rate_that_cannot_be_set_is_refused(kind: type, text: str) -> None:
    trained, batches, _ = linear(kind(1.0))
    with pytest.raises(ConfigError, match=f"cannot be swept. Received: .*{text}"):
        measured(trained, batches)


class Own(keras.Model):
    """Trains by hand."""

    def train_step(self, data: tuple) -> dict:
        self.seen = getattr(self, "seen", None) or keras.metrics.Mean(name="seen")
        if self.applies:
            weights = self.trainable_variables
            self.optimizer.apply_gradients([(tf.ones_like(w.value), w) for w in weights])
        self.seen.update_state(1.0)
        return {"seen": self.seen.result()}


@pytest.mark.parametrize(("applies", "text"), [(True, "Received: .*seen.* Name it loss"), (False, "does not train by")])
def test_a_train_step_without_a_loss_or_an_optimizer_is_refused(applies: bool, text: str) -> None:
    plain, batches, _ = linear(keras.optimizers.SGD(1.0))
    model = Own(plain.model.inputs, plain.model.outputs)
    model.seen, model.applies = keras.metrics.Mean(name="seen"), applies
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    spec = keras.KerasTensor((EXAMPLES, FEATURES)), keras.KerasTensor((EXAMPLES, 1))
    with pytest.raises(ConfigError, match=text):
        measured(replicated.Replicated(model, one_replica(), spec), batches)


# --- the suggestion ---


def swept(loss: Callable[[float], float], *, noise: float = 0.0, seed: int = 0, ended: str = sweep.DIVERGED) -> Sweep:
    asked = Range(1e-6, 10.0, 200)
    rates = asked.low * (asked.high / asked.low) ** (np.arange(asked.steps) / (asked.steps - 1))
    random = np.random.default_rng(seed)
    losses = [loss(rate) + noise * random.normal() for rate in rates]
    return Sweep(asked, tuple(Point(float(r), float(v), 1.0) for r, v in zip(rates, losses, strict=True)), ended)


def valley(rate: float) -> float:
    """From 2.3 down to 0.3, steepest at 1e-3, and up again from 0.1 on."""
    return 0.3 + 2.0 / (1 + (rate / 1e-3) ** 1.5) + (rate / 0.3) ** 3


def test_noise_hardly_moves_the_suggestion() -> None:
    quiet = swept(valley).suggestion
    assert 3e-3 < quiet < 3e-2
    noisy = [swept(valley, noise=0.3, seed=seed).suggestion for seed in range(30)]
    assert all(quiet / 4 < found < quiet * 4 for found in noisy)


def test_nothing_is_suggested_where_nothing_is_learned() -> None:
    for seed in range(30):
        flat = swept(lambda rate: 2.3, noise=0.3, seed=seed, ended=sweep.COMPLETE)
        assert flat.suggestion is None
        assert "never fell by more than it varies" in sweep.headline(flat)
    assert swept(lambda rate: 2.3 + rate).suggestion is None, "it only rises"


@pytest.mark.parametrize(
    ("losses", "apart"),
    [
        ([2.3, 0.3, 1.5], True),
        ([2.3, 0.3, 1.0], False),  # not yet half the way back
        ([2.3, 0.001, 0.1], False),  # a hundred times nearly nothing
        ([2.3, 2.4, 2.3], False),
        ([2.3, 10.0], True),
        ([-1.0, -5.0, 9.0], False),
        ([-1.0, -5.0, 11.0], True),
    ],
)
def test_what_counts_as_coming_apart(losses: list[float], apart: bool) -> None:
    assert sweep.has_diverged(losses) == apart


def test_smoothing_is_adams() -> None:
    losses = np.random.default_rng(0).normal(size=30)
    weights = [0.9 ** np.arange(step, -1, -1) for step in range(30)]
    expected = [np.average(losses[: step + 1], weights=weights[step]) for step in range(30)]
    np.testing.assert_allclose(sweep.smooth(list(losses), 0.9), expected)


# --- report ---


def test_the_picture_stands_alone_and_marks_the_suggestion() -> None:
    found = swept(valley)
    root = ElementTree.fromstring(sweep_picture.svg(found, "a & b"))
    text = ElementTree.tostring(root, encoding="unicode")
    assert not re.search(r"href|url\(|@import|<script|var\(", text)
    assert "prefers-color-scheme: dark" in text
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", f"{found.suggestion:.2g}", "0.001"} <= set(labels)
    lines = {line.attrib["class"]: line.attrib for line in root.iter("{http://www.w3.org/2000/svg}line")}
    ticks = [float(e.attrib["x"]) for e in root.iter("{http://www.w3.org/2000/svg}text") if e.text in ("0.01", "0.1")]
    apart = float(lines["least"]["x1"]) - float(lines["suggestion"]["x1"])
    assert apart == pytest.approx(ticks[1] - ticks[0], abs=0.3), "a tenth is a decade"
    (track,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(pair.split(",")[1]) for pair in track.attrib["points"].split()]
    assert len(heights) == 200
    assert max(heights) == heights[found.least], "y points down"
    flat = sweep_picture.svg(swept(lambda rate: 0.0), "flat")
    assert "suggestion" not in {e.attrib["class"] for e in ElementTree.fromstring(flat) if "class" in e.attrib}


def test_options_that_make_no_range_are_refused() -> None:
    run = {"model_dir": "m", "dataset": "d", "mode": "sweep_lr"}
    with pytest.raises(ConfigError, match="rises from sweep_from to sweep_to. Received: 1 and 0.1"):
        config.merge({**run, "sweep_from": 1.0, "sweep_to": 0.1})
    with pytest.raises(ConfigError, match="sweep_steps is for mode=sweep_lr"):
        config.merge({**run, "mode": "train", "sweep_steps": 50})
    with pytest.raises(ConfigError, match="sweep_lr belongs to no series"):
        config.merge({**run, "run_id": "{date}", "init_from": "last"})


# --- whole runs ---


@pytest.mark.slow
def test_it_takes_the_flags_of_a_run_and_disturbs_none(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    """On the run's replicas, and from the weights that a fine-tuning run begins with."""
    flags = [f"--model_dir={tmp_path}", "--model=mlp", "--model_options=units=[16]", "--global_batch_size=32"]
    trainer.run(*flags, "--train_steps=200", "--learning_rate=0.02", "--mode=train")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # Flags of a training run that would refuse to go on from this model_dir: nothing is trained, so nothing is refused.
    tuned = ["--seed=7", "--warmup=10 steps", f"--init_from={tmp_path}", "--replicas=2"]
    done = trainer.run(*flags, *tuned, "--mode=sweep_lr", "--sweep_steps=60", "--sweep_from=1e-5")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() - before.keys()} == ONLY_FILES
    assert {path: after[path] for path in before} == before
    found = json.loads((tmp_path / "sweep_lr.json").read_text())
    assert found["steps"][0]["loss"] < 1, "that of a model which has learned nothing is above 2"
    assert found["text"] in done.stdout
    assert found["text"] in (tmp_path / "sweep_lr.svg").read_text()
    rates = [step["learning_rate"] for step in found["steps"]]
    assert len(rates) == 60 or found["ended"] != sweep.COMPLETE
    assert rates[:2] == pytest.approx([1e-5, 1e-5 * 1e6 ** (1 / 59)], rel=1e-4)
