"""Mixed float16: what a report says of gradients, and overflows of scaled gradients that are passed over."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from data.spec import Array, Spec
from tests import precision_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.precision_worker import BAD_STEP, FIRST, GROWTH_STEPS, SCALE, SECOND, STEPS, VANISHED
from trainer import models, rules, tasks
from trainer.callbacks import Loop
from trainer.callbacks.underflow import FEW, MANY, Underflow

REPLICAS = (1, 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `precision_worker` stored."""
    path = tmp_path_factory.mktemp("precision") / "found.npz"
    command = [sys.executable, "-m", "tests.precision_worker", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=GUARD_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


def share_below(gradients: np.ndarray) -> float:
    """Of float16's normal numbers, beside weights whose gradients vanish."""
    below = (gradients != 0) & (np.abs(gradients) < np.finfo(np.float16).smallest_normal)
    return (below.sum() + VANISHED) / ((gradients != 0).sum() + VANISHED)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_gradients_below_the_normal_numbers_are_counted_once_a_report(found: dict, num_replicas: int) -> None:
    """Exactly, without those of layers in float32, and the same on each number of replicas."""
    of = {
        name: float(found[f"underflow/{num_replicas}/{name}/gradient_underflow"])
        for name in ("first", "same", "next", "resumed")
    }
    assert of["first"] == pytest.approx(share_below(FIRST), rel=1e-6)
    assert of["next"] == pytest.approx(share_below(SECOND), rel=1e-6)
    assert of["next"] != pytest.approx(of["first"], rel=0.1)
    assert of["same"] == of["resumed"] == of["first"], "the first step of a report speaks for it, also after a restart"
    assert found[f"underflow/{num_replicas}/first/loss_scale"] == 1
    assert found[f"underflow/{num_replicas}/first/gradient_overflow"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_an_overflow_halves_the_scale_and_does_nothing_else(found: dict, num_replicas: int) -> None:
    of = {key.split("/", 2)[2]: v for key, v in found.items() if key.startswith(f"overflow/{num_replicas}/")}
    scale, good, expected = SCALE, 0, []
    for step in range(STEPS):
        good = 0 if step == BAD_STEP else good + 1
        scale = scale / 2 if step == BAD_STEP else scale
        if good == GROWTH_STEPS:
            scale, good = scale * 2, 0
        expected.append(scale)
    assert expected[BAD_STEP] == SCALE / 2 and max(expected[BAD_STEP:]) >= SCALE, "the plan holds a recovery"
    assert [float(of[f"whole/scale/{step + 1}"]) for step in range(STEPS)] == expected
    assert int(of["whole/halted"]) == -1, "it is no failure"
    assert np.isfinite(of["whole/loss"])
    np.testing.assert_array_equal(of["whole/weights"], of["without/weights"])
    assert float(of["whole/overflow"]) == pytest.approx(1 / STEPS)
    assert float(of["without/overflow"]) == 0
    assert np.any(of["whole/weights"])


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", REPLICAS)
def test_a_resumed_run_goes_on_with_its_scale_and_counts(found: dict, num_replicas: int) -> None:
    of = {key.split("/", 2)[2]: v for key, v in found.items() if key.startswith(f"overflow/{num_replicas}/")}
    np.testing.assert_array_equal(of["resumed/weights"], of["whole/weights"])
    for key in (f"scale/{STEPS}", "overflow", "loss"):
        assert of[f"resumed/{key}"] == pytest.approx(of[f"whole/{key}"], rel=1e-6)


@pytest.mark.slow
def test_one_and_two_replicas_end_alike(found: dict) -> None:
    one, two = (found[f"overflow/{n}/whole/weights"] for n in REPLICAS)
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-3 * np.abs(one).max())
    for key in ("whole/overflow", f"whole/scale/{STEPS}"):
        assert found[f"overflow/1/{key}"] == found[f"overflow/2/{key}"]


def test_underflow_is_told_once_until_it_is_better() -> None:
    told: list[int] = []
    callback = Underflow(lambda message, step: told.append(step) or message.index("mixed_bfloat16"))
    shares = [None, MANY / 2, MANY * 1.2, MANY * 1.2, (FEW + MANY) / 2, MANY * 1.2, FEW / 2, MANY * 1.2]
    for step, share in enumerate(shares):
        logs = {} if share is None else {"gradient_underflow": share}
        callback.on_loop_end(Loop(step, step + 1, 1.0, 0.0, logs, 0.1, first=False))
    assert told == [3, 8]


@pytest.mark.parametrize("name", [name for name in rules.built_in_models() if name in ("cnn", "mlp")])
def test_logits_and_loss_are_float32(name: str) -> None:
    spec = Spec(Array((16, 16, 3), "uint8"), Array((), "int32"), 7, task="classification")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = models.find(name, {}).build(spec)
        loss = tasks.loss(spec)
    finally:
        keras.config.set_dtype_policy("float32")
    assert {layer.compute_dtype for layer in model.layers} >= {"float16"}, "the body is not"
    assert model.output.dtype == "float32"
    assert loss(np.zeros(4, "int32"), np.zeros((4, 7), "float32")).dtype == "float32"


def test_the_worker_plants_what_it_says() -> None:
    smallest = float(np.finfo(np.float16).smallest_normal)
    assert 0 < precision_worker.TINY < smallest <= precision_worker.FINE
