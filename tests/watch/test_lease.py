"""Who may write in a model_dir: real files, real processes, and machines that are pretended by their ids."""

import dataclasses
import os
import queue
import shutil
import signal
import threading

import pytest

from trainer.errors import ConfigError, RetryError
from trainer.watch import lease as lease_lib
from trainer.watch import status as status_lib

GUARD_SECS = 60
LONG_SECS = 10_000.0  # a lease that does not go stale in a test
SHORT_SECS = 0.5


@pytest.fixture
def acquire():
    """`lease.acquire`; what a test does not release is released after it."""
    leases = []

    def call(model_dir, lease_secs=LONG_SECS, **callbacks):
        leases.append(lease_lib.acquire(str(model_dir), lease_secs, **callbacks))
        return leases[-1]

    yield call
    for lease in leases:
        lease.release("stopped", 75)


def elsewhere(model_dir, **changes) -> status_lib.Status:
    """Leaves the lease of a run on another machine, and returns it."""
    model_dir.mkdir(exist_ok=True)
    fields = {"owner": "other", "host": "tpu-vm-7", "boot_id": "another", "pid": 4711, "step": 1200} | changes
    status = dataclasses.replace(status_lib.new_status(None), **fields)
    status_lib.StatusFile(str(model_dir)).store(status)
    return status


def wait_until(condition) -> None:
    while not condition():
        threading.Event().wait(0.01)


def written(model_dir) -> status_lib.Status:
    status = status_lib.read(str(model_dir))
    assert status is not None
    return status


def test_one_file_tells_who_how_far_and_how_it_ended(tmp_path, acquire):
    assert status_lib.read(str(tmp_path / "run")) is None
    lease = acquire(tmp_path / "run", SHORT_SECS)
    lease.confirm()
    first = written(tmp_path / "run")
    assert (first.state, first.pid, first.step, first.exit_code) == ("running", os.getpid(), None, None)
    lease.update(step=40, phase="training")
    wait_until(lambda: written(tmp_path / "run").step == 40 and written(tmp_path / "run").beats > 2)
    assert written(tmp_path / "run").phase == "training"
    lease.release("finished", 0, "all steps done")
    lease.release("failed", 1)  # of a clean-up that comes later
    last = written(tmp_path / "run")
    assert (last.state, last.exit_code, last.reason, last.step) == ("finished", 0, "all steps done", 40)
    assert os.listdir(tmp_path / "run") == ["status.json"]
    again = acquire(tmp_path / "run")
    again.confirm()
    assert (written(tmp_path / "run").state, written(tmp_path / "run").step) == ("running", 40)


def test_a_run_that_lives_elsewhere_keeps_its_lease(tmp_path, acquire):
    status = elsewhere(tmp_path)
    done = threading.Event()

    def beat():
        while not done.wait(0.05):
            status.beats += 1
            status_lib.StatusFile(str(tmp_path)).store(status)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RetryError, match=r"in use by another run \(host tpu-vm-7, pid 4711, step 1200"):
            acquire(tmp_path, 4)
    finally:
        done.set()
        thread.join()
    assert written(tmp_path).owner == "other"


def test_a_run_that_lives_on_this_machine_keeps_its_lease_whatever_its_age(tmp_path, acquire):
    elsewhere(tmp_path, boot_id=status_lib.new_status(None).boot_id, pid=os.getpid())
    os.utime(tmp_path / "status.json", (0, 0))  # it may hang, or be stopped, and go on later
    with pytest.raises(RetryError, match="in use by another run"):
        acquire(tmp_path)


@pytest.mark.parametrize("file_time", ["now", "future"])
def test_a_lease_that_does_not_change_is_taken_over(tmp_path, acquire, caplog, file_time):
    elsewhere(tmp_path)
    if file_time == "future":  # the clock of the storage has jumped back
        os.utime(tmp_path / "status.json", (2**32, 2**32))
    acquire(tmp_path, SHORT_SECS).confirm()
    assert written(tmp_path).pid == os.getpid()
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "held by a run that may be dead (host tpu-vm-7, pid 4711, step 1200); watching it for 0.5 s",
        "taking over from a run that is dead (host tpu-vm-7, pid 4711, step 1200)",
    ]


def test_a_lease_that_is_old_by_the_clock_of_the_storage_is_taken_over_at_once(tmp_path, acquire, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)  # that of this machine tells nothing
    elsewhere(tmp_path)
    age = os.stat(tmp_path / "status.json").st_mtime - 2 * LONG_SECS
    os.utime(tmp_path / "status.json", (age, age))
    acquire(tmp_path, LONG_SECS).confirm()  # to watch it would take hours
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_later_process_of_the_same_id_does_not_keep_a_dead_lease(tmp_path, acquire):
    elsewhere(tmp_path, boot_id=status_lib.new_status(None).boot_id, pid=os.getpid(), process_start="1")
    acquire(tmp_path).confirm()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"owner": "x"}', '{"step": 1, "unheard": 2}'])
def test_what_cannot_be_understood_is_watched_before_it_is_replaced(tmp_path, acquire, caplog, text):
    (tmp_path / "status.json").write_text(text)
    acquire(tmp_path, SHORT_SECS).confirm()
    assert "watching it" in caplog.text


def test_a_killed_run_is_known_to_be_dead(tmp_path, acquire, python):
    holder = python(HOLDER, tmp_path, LONG_SECS, "same")
    holder.wait_for("acquired")
    with pytest.raises(RetryError, match=f"pid {holder.process.pid}"):
        acquire(tmp_path)
    holder.send(signal.SIGKILL)
    os.waitid(os.P_PID, holder.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead, too
    acquire(tmp_path).confirm()


def test_a_run_that_was_suspended_until_another_took_over_stops(tmp_path, acquire, python):
    holder = python(HOLDER, tmp_path, SHORT_SECS, "another machine")
    holder.wait_for("acquired")
    holder.send(signal.SIGSTOP)
    lease = acquire(tmp_path, SHORT_SECS)
    holder.send(signal.SIGCONT)
    said = holder.wait_for("lost RetryError")
    assert f"Another run (host {written(tmp_path).host}, pid {os.getpid()}, step 7) has taken over" in said
    assert holder.end()[0] == 75
    lease.confirm()
    assert written(tmp_path).pid == os.getpid()


def test_a_model_dir_that_is_removed_is_lost_and_not_made_again(tmp_path, acquire):
    lost: queue.Queue = queue.Queue()
    run = tmp_path / "run"
    lease = acquire(run, SHORT_SECS, on_lost=lost.put)
    shutil.rmtree(run)
    error = lost.get(timeout=GUARD_SECS)
    assert isinstance(error, ConfigError)
    assert f"model_dir was removed under the run, which cannot go on. Received: '{run}'" in str(error)
    assert lease.lost is error
    with pytest.raises(ConfigError):
        lease.confirm()
    lease.release("failed", 78)
    assert not run.exists()


def test_a_model_dir_that_is_removed_and_made_again_is_not_ours(tmp_path, acquire):
    lease = acquire(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="model_dir was removed"):
        lease.confirm()
    lease.release("failed", 78)
    assert os.listdir(tmp_path / "run") == []


def test_a_lost_lease_is_never_written_again(tmp_path, acquire):
    lost: queue.Queue = queue.Queue()
    lease = acquire(tmp_path, SHORT_SECS, on_lost=lost.put)
    other = elsewhere(tmp_path)
    assert isinstance(lost.get(timeout=GUARD_SECS), RetryError)
    with pytest.raises(RetryError, match="tpu-vm-7"):
        lease.confirm()
    lease.release("finished", 0)
    assert written(tmp_path) == other


def test_storage_that_fails_for_a_while_is_told_once_and_hurts_nothing(tmp_path, acquire):
    troubles: queue.Queue = queue.Queue()
    lease = acquire(tmp_path, SHORT_SECS, on_trouble=troubles.put)
    (tmp_path / "status.json.part").mkdir()  # what is written cannot be
    assert "status.json cannot be renewed" in troubles.get(timeout=GUARD_SECS)
    beats = written(tmp_path).beats
    with pytest.raises(queue.Empty):
        troubles.get(timeout=3 * SHORT_SECS / lease_lib._BEATS_PER_LEASE)
    (tmp_path / "status.json.part").rmdir()
    wait_until(lambda: written(tmp_path).beats > beats)
    assert lease.lost is None


def test_callbacks_that_fail_do_not_end_the_heartbeat(tmp_path, acquire, caplog):
    lease = acquire(tmp_path, SHORT_SECS, on_trouble=lambda message: 1 / 0)
    (tmp_path / "status.json.part").mkdir()
    wait_until(lambda: "A callback of the lease failed" in caplog.text)
    (tmp_path / "status.json.part").rmdir()
    beats = written(tmp_path).beats
    wait_until(lambda: written(tmp_path).beats > beats)
    assert lease.lost is None


@pytest.mark.parametrize(("locks", "rounds"), [("with locks", 60), ("without locks", 6)])
def test_of_two_that_start_in_the_same_moment_one_remains(tmp_path, python, locks, rounds):
    racers = [python(RACER, locks, slow) for slow in (1, 0)]
    for racer in racers:
        racer.wait_for("ready")
    for turn in range(rounds):
        for racer in racers:
            racer.tell(str(tmp_path / str(turn)))
        ends = [racer.wait_for("end") for racer in racers]
        assert sorted(ends) == ["end lost", "end won"], f"turn {turn}"
        for racer in racers:
            racer.tell("next")


# Holds a lease until it is lost: model_dir, lease_secs, where it pretends to run. Its clock jumps.
HOLDER = """
import itertools, os, sys, time
jumps = itertools.cycle([0.0, 1e9, -1e9])
time.time = lambda: next(jumps)
from trainer.watch import lease, status
if sys.argv[3] != "same":
    status._boot_id = lambda: sys.argv[3]
def lost(error):
    print("lost", type(error).__name__, error)
    held.release("failed", 1)
    os._exit(75)
held = lease.acquire(sys.argv[1], float(sys.argv[2]), on_lost=lost)
held.confirm()
held.update(step=7)
while float(sys.argv[2]) < 10 and status.read(sys.argv[1]).step != 7:
    time.sleep(0.01)
print("acquired")
time.sleep(1e6)
"""

# Takes the lease of each directory that it is told, at once, and says whether it got and kept it.
RACER = """
import contextlib, sys, time
from trainer.errors import RetryError
from trainer.watch import lease, status
if sys.argv[1] == "without locks":  # as on gs:// and on some file systems of networks
    lease._SETTLE_SECS = 0.3
    status.StatusFile.locked = lambda self: contextlib.nullcontext(False)
    status._pid_namespace = lambda: ""  # nor can one see the process of the other
    if sys.argv[2] == "1":  # reads first and writes last: the other must not be sure of itself by then
        new_status = lease.new_status
        lease.new_status = lambda found: (time.sleep(0.1), new_status(found))[1]
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
