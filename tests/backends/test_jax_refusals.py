"""What a step would assign and lose on JAX is refused.

Pytest runs on TensorFlow, so a process of its own has JAX (jax_refusals_worker.py).
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

GUARD_SECS = 300


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    environ = os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.backends.jax_refusals_worker"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_assignments_to_what_is_not_the_models(told: dict[str, str]) -> None:
    for case, variable, line in (("counting", "count", "count.assign("), ("drawing", "seed", "keras.random.normal(")):
        assert "assigns to the variable" in told[case] and variable in told[case]
        assert line in told[case]  # the user's


def test_what_only_reads_others_trains(told: dict[str, str]) -> None:
    assert told["reading"] == ""
