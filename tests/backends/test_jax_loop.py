"""The loop on JAX between its input and its devices: what it waits for, loses, leaves behind and keeps.

Pytest runs on TensorFlow, so a process of its own trains on JAX (jax_loop_worker.py).
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

GUARD_SECS = 300
# As in jax_loop_worker.py, which imports JAX.
STEPS, LAST_GOOD = 20, 4
# A state and a batch a step, kept for 2,000 of them, would be 90 MB.
GROWTH_BYTES = 20e6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: pathlib.Path = tmp_path_factory.mktemp("loop") / "found.json"
    environ = os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.backends.jax_loop_worker", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_waiting_for_input_is_told_from_training(found) -> None:
    slow, at_once = found["waits"]["slow"], found["waits"]["at_once"]
    assert slow["waited"] > 0.5 * slow["total"]
    assert at_once["waited"] < 0.1 * slow["waited"]


@pytest.mark.nightly  # on a quiet machine: it holds seconds of two calls to each other
def test_devices_that_work_do_not_wait(found) -> None:
    # The input is slower than the step, so each batch is asked for too early; while the step runs, nobody waits.
    both, alone = found["waits"]["slow_step"], found["waits"]["slow_step_alone"]
    assert 0.0 < both["waited"] < both["total"] - 0.5 * alone["total"]


def test_a_slow_input_loses_and_repeats_no_batch(found) -> None:
    assert found["steps"] == STEPS
    assert found["same"]


def test_an_input_that_fails_does_so_at_its_step_and_again(found) -> None:
    assert found["failed"]["steps"] == LAST_GOOD
    assert len(found["failed"]["errors"]) == 2
    assert all("a record that cannot be read" in error for error in found["failed"]["errors"])


def test_what_reads_ahead_ends_with_its_iterator(found) -> None:
    assert not found["threads_left"]


def test_steps_keep_nothing(found) -> None:
    assert len(found["growth"]["arrays"]) == 1
    assert found["growth"]["freed"], "the state that a call was given is still there after it"
    assert found["growth"]["bytes"] < GROWTH_BYTES


def test_what_is_compiled_grows_with_the_layers_not_with_their_square(found) -> None:
    # The judgement of all gradients, repeated in the update of each weight, would make it ten times as much.
    few, many = found["instructions"].values()
    assert many < 1.1 * 4 * few


def test_what_jax_cannot_train_is_told_what_to_do(found) -> None:
    said = found["refused"]
    assert "train_step(state, data)" in said["OwnTrainStep"]
    assert "does not call self.optimizer.stateless_apply" in said["PastTheOptimizer"]
    assert "trains a model by one optimizer. Received: sgd" in said["TwoOptimizers"]
