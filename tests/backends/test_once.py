"""What is traced once is what each replica would have computed, and what cannot be is traced as ever."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `once_worker` prints."""
    command = [sys.executable, "-m", "tests.backends.once_worker"]
    environ = clean_environ() | {"KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_one_trace_serves_all_replicas(found: dict[str, Any]) -> None:
    assert found["pure"] == {"traces": 1, "found": [2.0, 2.0]}


def test_each_replica_is_itself(found: dict[str, Any]) -> None:
    assert found["own"] == {"traces": 1, "found": [1.0, 2.0]}


@pytest.mark.parametrize(("case", "each"), [("meets", 2.0), ("variable", 3.0)])
def test_what_needs_its_replica_is_traced_on_each(found: dict[str, Any], case: str, each: float) -> None:
    assert found[case] == {"traces": 3, "found": [each, each]}  # the one that could not be, and one a replica


def test_an_error_of_the_users_is_told_as_ever(found: dict[str, Any]) -> None:
    assert found["error"] == "of the user"
