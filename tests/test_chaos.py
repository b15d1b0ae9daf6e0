"""A run that is hurt at random moments ends as one that was left in peace: `scripts/chaos.py`, short here and long."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, clean_environ

LONG_SECS = 1800  # ends what hangs


def chaos(digits_dir: pathlib.Path, *flags: str) -> str:
    """What it prints; it must have found no difference."""
    done = subprocess.run(
        [sys.executable, "scripts/chaos.py", f"--data_dir={digits_dir}", *flags],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LONG_SECS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("no difference\n")
    print(done.stdout)
    return done.stdout


def hit(output: str) -> set[str]:
    """The kinds of hurts that came about."""
    found = re.search("^hit: (.*)$", output, re.MULTILINE)
    assert found is not None
    return {name.split(" x ")[1] for name in found[1].split(", ")}


KILLS = {f"kill {phase}" for phase in ("startup", "restore", "evaluate", "save", "export", "train")}
SIGNALS = {"SIGINT", *(f"SIGTERM {phase}" for phase in ("startup", "train", "save", "evaluate"))}
DAMAGES = {"flip", "truncate", "missing"}


@pytest.mark.slow
def test_a_run_that_is_hurt_ends_as_a_quiet_one(digits_dir: pathlib.Path) -> None:
    output = chaos(digits_dir, "--kills=6", "--seed=1")
    assert hit(output) == {"SIGTERM train", "flip", "full disk", *KILLS - {"kill startup", "kill train"}}


@pytest.mark.nightly
@pytest.mark.timeout(LONG_SECS)
@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["--storage=local"], {"full disk"}),
        (["--storage=local", "--replicas=2"], {"full disk"}),
        (["--storage=local", "--workers=2"], {"full disk"}),
        (["--storage=gs"], {"503", "drop"}),
    ],
    ids=["local", "replicas", "workers", "gs"],
)
def test_a_run_that_is_hurt_for_long(digits_dir: pathlib.Path, flags: list[str], more: set[str]) -> None:
    assert hit(chaos(digits_dir, "--kills=25", *flags)) == KILLS | SIGNALS | DAMAGES | more


@pytest.mark.nightly
@pytest.mark.timeout(LONG_SECS)
def test_sigterm_ends_with_75_within_the_grace_50_times_of_50(digits_dir: pathlib.Path) -> None:
    # tests/test_stops.py sends it in start-up, training and evaluation each time.
    output = chaos(digits_dir, "--kills=50", "--only=SIGTERM")
    assert "signals: 50, exit codes {75: 50};" in output
