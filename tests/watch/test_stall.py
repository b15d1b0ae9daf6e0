"""A run without progress: real processes whose main thread hangs in Python, hangs in TensorFlow, or does not hang."""

import signal
import threading

import pytest

PRELUDE = """
import os, sys, threading, time
from trainer.watch import stall
model_dir = sys.argv[1]
"""
HANGING = """
import tensorflow as tf
@tf.function
def endless():
    return tf.while_loop(lambda i: i >= 0, lambda i: tf.math.floormod(i + 1, 1000), [tf.constant(0)])
def the_function_that_hangs():
    endless()
"""


def test_a_run_that_hangs_in_tensorflow_shows_its_stacks_and_ends_for_another_try(python, tmp_path):
    child = python(
        PRELUDE
        + HANGING
        + """
watch = stall.StallWatch(1.0, lambda message: print("alert", message), model_dir)
watch.start()
the_function_that_hangs()
""",
        tmp_path,
    )
    said = child.wait_for("alert")
    code, _, err = child.end()
    assert code == 75
    (file,) = tmp_path.glob("stall-*Z.txt")
    assert said == f"alert no progress for --stall_secs=1; run again (exit code 75). Stacks of all threads: {file}"
    assert said.removeprefix("alert ") in err
    for stacks in (file.read_text(), err):
        assert "in the_function_that_hangs" in stacks
        assert stacks.lower().count("thread 0x") >= 2


@pytest.mark.parametrize("on_stall", ["lambda message: time.sleep(1e6)", "lambda message: 1 / 0"])
def test_neither_storage_nor_an_alert_that_fails_keeps_it(python, tmp_path, on_stall):
    (tmp_path / "file").write_text("no directory")
    child = python(
        PRELUDE
        + f"""
stall._LAST_WORDS_SECS = 0.5
stall.StallWatch(0.2, {on_stall}, model_dir).start()
time.sleep(1e6)
""",
        tmp_path / "file",
    )
    code, _, err = child.end()
    assert code == 75
    assert "Stacks of all threads: on standard error" in err
    assert "Thread 0x" in err


def test_progress_pauses_and_a_stopped_process_are_no_stall(python, tmp_path):
    child = python(
        PRELUDE
        + """
ends = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ends.set()), daemon=True).start()
stall.StallWatch(None, print).start()
watch = stall.StallWatch(1.0, print, model_dir)
watch.start()
with watch.patient():
    time.sleep(1.5)
print("training")
while not ends.is_set():
    watch.beat()
    time.sleep(0.05)
watch.stop()
time.sleep(1.5)
""",
        tmp_path,
    )
    child.wait_for("training")
    child.send(signal.SIGSTOP)
    threading.Event().wait(1.5)  # longer than what counts as a stall
    child.send(signal.SIGCONT)
    threading.Event().wait(1.5)  # for the watch to find out
    child.tell("end")
    assert child.end()[:2] == (0, "")
