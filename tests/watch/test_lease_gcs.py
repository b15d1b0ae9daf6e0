"""The lease on gs://, through TensorFlow's own client and an object server on loopback."""

import json
import signal

import pytest

from tests import gcs

pytestmark = pytest.mark.slow

# Holds a lease of the run until it is lost: model_dir, lease_secs, where it pretends to run.
HOLDER = """
import os, sys, threading, time
from trainer.watch import lease, status
status._boot_id = lambda: sys.argv[3]
def lost(error):
    print("lost", type(error).__name__, error)
    held.release("failed", 1)
    os._exit(75)
held = lease.acquire(sys.argv[1], float(sys.argv[2]), on_lost=lost)
held.confirm()
held.update(step=7, phase="training")
while status.read(sys.argv[1]).step != 7:
    time.sleep(0.01)
print("acquired")
sys.stdin.readline()
if held.lost is not None:
    threading.Event().wait()  # for `lost`, which ends the process
held.release("finished", 0)
"""

RACER = """
import sys
from trainer.errors import RetryError
from trainer.watch import lease, status
lease._SETTLE_SECS = 1.0
status._pid_namespace = lambda: ""  # another machine
print("ready")
while directory := sys.stdin.readline().strip():
    held = None
    try:
        held = lease.acquire(directory, 3)
        held.confirm()
        print("end won")
    except RetryError:
        print("end lost")
    sys.stdin.readline()
    if held:
        held.release("stopped", 75)
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    with gcs.serve(tmp_path_factory.mktemp("gcs")) as server:
        yield server


def status_of(storage, run: str) -> dict:
    return json.loads(storage.read(f"{run}/status.json"))


def test_a_silent_lease_is_taken_over_and_a_finished_one_is_free(python, storage):
    run = f"{storage.url}/stale"
    first = python(HOLDER, run, 3, "machine 1", environ=storage.environ())
    first.wait_for("acquired")
    first.send(signal.SIGSTOP)
    second = python(HOLDER, run, 3, "machine 2", environ=storage.environ())
    second.wait_for("acquired")
    first.send(signal.SIGCONT)
    assert "lost RetryError Another run" in first.wait_for("lost")
    second.tell("finish")
    assert second.end()[0] == 0
    status = status_of(storage, "stale")
    assert (status["state"], status["exit_code"], status["step"], status["pid"]) == (
        "finished",
        0,
        7,
        second.process.pid,
    )
    assert not [name for name in storage.objects() if "lease-probe" in name or ".part" in name]


def test_a_run_whose_objects_are_removed_ends_and_does_not_make_them_again(python, storage):
    child = python(HOLDER, f"{storage.url}/removed", 1, "machine 1", environ=storage.environ())
    child.wait_for("acquired")
    storage.remove("removed/status.json")
    assert "lost ConfigError model_dir was removed under the run" in child.wait_for("lost")
    assert child.end()[0] == 75
    assert "removed/status.json" not in storage.objects()


def test_of_two_that_start_in_the_same_moment_one_remains(python, storage):
    racers = [python(RACER, environ=storage.environ()) for _ in range(2)]
    for racer in racers:
        racer.wait_for("ready")
    for turn in range(4):
        for racer in racers:
            racer.tell(f"{storage.url}/race-{turn}")
        ends = [racer.wait_for("end") for racer in racers]
        assert sorted(ends) == ["end lost", "end won"], f"turn {turn}"
        for racer in racers:
            racer.tell("next")
