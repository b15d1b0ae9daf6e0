"""A run that is asked to stop: by signals, at any moment, whatever its main thread does."""

import signal
import subprocess
import sys
import time

import pytest

PRELUDE = """
import os, signal, sys, threading, time
from trainer.watch import stopping
stops = stopping.install()
"""
# A clock that an administrator, or NTP, moves about.
JUMPING_CLOCK = """
import itertools
jumps = itertools.cycle([0.0, 1e9, -1e9])
time.time = lambda: next(jumps)
"""
ENDLESS_LOOP = """
import tensorflow as tf
@tf.function
def endless():
    return tf.while_loop(lambda i: i >= 0, lambda i: tf.math.floormod(i + 1, 1000), [tf.constant(0)])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_the_first_signal_ends_the_process_at_once(python, number):
    child = python(PRELUDE + "stops.on_exit(lambda reason: print('clean', reason)); print('ready'); time.sleep(1e6)")
    child.wait_for("ready")
    child.send(number)
    code, out, err = child.end()
    assert code == 75
    assert err == f"trainer: stopped by {number.name} before training began; run again\n"
    assert out == f"clean {number.name}\n"


def test_a_signal_during_the_import_of_tensorflow_ends_the_process(python):
    child = python(PRELUDE + "print('installed'); import tensorflow; print('imported'); time.sleep(1e6)")
    child.wait_for("installed")
    child.send(signal.SIGTERM)
    assert child.end()[0] == 75


def test_a_clean_up_that_hangs_or_fails_does_not_keep_the_process(python):
    child = python(
        PRELUDE
        + """
stopping._CLEAN_UP_SECS = 0.5
stops.on_exit(lambda reason: time.sleep(1e6))
stops.on_exit(lambda reason: 1 / 0)
print('ready')
time.sleep(1e6)
"""
    )
    child.wait_for("ready")
    child.send(signal.SIGTERM)
    assert child.end()[0] == 75


def test_what_fails_over_a_clean_up_does_not_have_the_last_word(python):
    child = python(
        PRELUDE
        + """
stopping._CLEAN_UP_SECS = 1.0
removed = threading.Event()
stops.on_exit(lambda reason: (removed.set(), time.sleep(1e6)))
print('ready')
removed.wait()
stops.settle()
os._exit(78)
"""
    )
    child.wait_for("ready")
    child.send(signal.SIGTERM)
    assert child.end()[0] == 75


@pytest.mark.parametrize("grace_secs", [1000, 0.5])
def test_what_a_run_has_come_to_stays_so_while_its_report_is_written(python, grace_secs):
    child = python(
        PRELUDE
        + f"""
with stops.deferred({grace_secs}, print):
    stops.over(0)
print('ready')
while stops.reason is None or {grace_secs} < 1:
    time.sleep(0.01)
print('written')
"""
    )
    child.wait_for("ready")
    child.send(signal.SIGTERM)
    assert child.end() == (0, "written\n" * (grace_secs > 1), "")


def test_a_finished_run_that_is_stopped_over_its_report_has_finished(python, tmp_path):
    child = python(
        PRELUDE
        + f"""
from trainer import config, guard, run_dir
from trainer.callbacks.clock import Clock

def report():
    print('writing')
    while stops.reason is None:
        time.sleep(0.01)
    print('written')

settings = config.merge({{'model_dir': {str(tmp_path)!r}, 'dataset': 'synthetic', 'model': 'mlp'}})
folder = run_dir.RunDir(settings.model_dir)
with guard.watching(settings, folder, Clock(0.0), stops, is_chief=True, afterwards=report) as watched:
    watched.take_over(num_devices=1)
    with stops.deferred(1000):
        pass
"""
    )
    child.wait_for("writing")
    child.send(signal.SIGTERM)
    code, out, _ = child.end()
    assert code == 0 and out.endswith("written\n")


def test_a_failed_run_stays_failed_whoever_stops_it_then(python):
    child = python(PRELUDE + "stops.over(78); stops.over(0); print('ready'); time.sleep(1e6)")
    child.wait_for("ready")
    child.send(signal.SIGTERM)
    assert child.end()[::2] == (78, "")


def test_without_a_stop_nothing_has_to_settle(python):
    assert python(PRELUDE + "stops.settle(); print('went on')").end()[:2] == (0, "went on\n")


@pytest.mark.parametrize("callback", ["print", "lambda reason: time.sleep(1e6)", "lambda reason: 1 / 0"])
def test_while_training_a_signal_is_noted_and_the_loop_ends_itself(python, callback):
    child = python(
        PRELUDE
        + f"""
with stops.deferred(1000, {callback}):
    print('training', stops.reason, stops.remaining_secs())
    while stops.reason is None:
        time.sleep(0.01)
    assert 900 < stops.remaining_secs() < 1000
    print('saved after', stops.reason)
sys.exit(33)
"""
    )
    assert child.wait_for("training") == "training None None"
    child.send(signal.SIGTERM)
    child.wait_for("saved after SIGTERM")
    assert child.end()[0] == 33


def test_the_alert_of_a_request_does_not_wait_for_the_loop_in_tensorflow(python):
    child = python(
        PRELUDE
        + ENDLESS_LOOP
        + "with stops.deferred(1000, lambda reason: print('alert', reason)): print('training'); endless()"
    )
    child.wait_for("training")
    child.send(signal.SIGINT)
    child.wait_for("alert SIGINT")
    child.send(signal.SIGINT)  # leaves at once, in the middle of the loop
    code, _, err = child.end()
    assert code == 75
    assert "stopped at once by a second SIGINT; there is no checkpoint yet" in err


def test_a_loop_in_tensorflow_that_does_not_end_is_left_within_the_grace(python):
    grace_secs = 4
    child = python(
        PRELUDE
        + JUMPING_CLOCK
        + ENDLESS_LOOP
        + f"""
stops.saved_step = 1200
stops.on_exit(lambda reason: time.sleep(1e6))
with stops.deferred({grace_secs}):
    print('training')
    endless()
"""
    )
    child.wait_for("training")
    sent = time.monotonic()
    child.send(signal.SIGTERM)
    code, _, err = child.end()
    assert time.monotonic() - sent < grace_secs  # the promise itself
    assert code == 75
    assert (
        "trainer: the loop in flight and its checkpoint did not end within --grace_secs=4 of SIGTERM; "
        "what was done since the checkpoint of step 1200 will be done again" in err
    )


def test_the_deadline_holds_for_what_follows_a_stopped_training(python):
    child = python(
        PRELUDE
        + """
with stops.deferred(1):
    print('training')
    while stops.reason is None:
        time.sleep(0.01)
time.sleep(1e6)
"""
    )
    child.wait_for("training")
    child.send(signal.SIGTERM)
    code, _, err = child.end()
    assert code == 75
    assert "what follows training did not end within --grace_secs=1" in err


def test_after_training_a_first_signal_ends_the_process_at_once(python):
    child = python(PRELUDE + "\nwith stops.deferred(1000): pass\nprint('trained'); time.sleep(1e6)")
    child.wait_for("trained")
    child.send(signal.SIGTERM)
    code, _, err = child.end()
    assert (code, err) == (75, "trainer: stopped by SIGTERM after training; run again\n")


def test_a_second_sigterm_changes_nothing(python):
    child = python(
        PRELUDE
        + """
with stops.deferred(1000):
    print('training')
    while stops.reason is None:
        time.sleep(0.01)
    print('noted')
    while not stops.take_profile_request():
        time.sleep(0.01)
sys.exit(33)
"""
    )
    child.wait_for("training")
    child.send(signal.SIGTERM)
    child.wait_for("noted")
    for _ in range(20):
        child.send(signal.SIGTERM)
    child.send(signal.SIGUSR1)  # behind them in the queue
    assert child.end()[0] == 33


def test_sigusr1_asks_for_one_profile_and_kills_at_no_stage(python):
    child = python(
        PRELUDE
        + """
def await_profile(stage):
    print(stage)
    while not stops.take_profile_request():
        time.sleep(0.01)
    assert not stops.take_profile_request()
await_profile('before')
with stops.deferred(1000):
    await_profile('while')
await_profile('after')
assert stops.reason is None
"""
    )
    for stage in ("before", "while", "after"):
        child.wait_for(stage)
        child.send(signal.SIGUSR1)
    assert child.end()[0] == 0


def test_signals_are_still_seen_after_c_code_took_sigterm_and_python_took_it_back(python):
    # What MultiWorkerMirroredStrategy does, and trainer/cluster.py after it.
    child = python(
        PRELUDE
        + """
import ctypes
SIG_IGN = ctypes.c_void_p(1)
ctypes.CDLL(None).signal(signal.SIGTERM, SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
with stops.deferred(1000):
    print('training', stops.reason)
    while stops.reason is None:
        time.sleep(0.01)
sys.exit(33)
"""
    )
    assert child.wait_for("training") == "training None"
    child.send(signal.SIGTERM)
    assert child.end()[0] == 33


def test_a_signal_to_a_forked_child_is_not_taken_for_one_to_the_run(python):
    child = python(
        PRELUDE
        + """
with stops.deferred(1000):
    for number in (signal.SIGTERM, signal.SIGINT):
        forked = os.fork()
        if not forked:
            time.sleep(1e6)
        os.kill(forked, number)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -number
    os.kill(os.getpid(), signal.SIGUSR1)
    while not stops.take_profile_request():  # behind them in the queue
        time.sleep(0.01)
    assert stops.reason is None
"""
    )
    assert child.end()[0] == 0


def test_a_notice_counts_like_a_signal(python):
    child = python(
        PRELUDE
        + """
with stops.deferred(1):
    stops.saved_step = 7
    stops.request('preemption notice')
    stops.request('maintenance notice')
    print(stops.reason)
    time.sleep(1e6)
"""
    )
    child.wait_for("preemption notice")
    code, _, err = child.end()
    assert code == 75
    assert "--grace_secs=1 of preemption notice" in err


def test_nothing_that_main_imports_first_imports_tensorflow():
    modules = "trainer.watch.stopping, trainer.watch.notices, trainer.watch.alerts, trainer.redact"
    code = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
