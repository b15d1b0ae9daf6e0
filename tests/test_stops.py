"""A run that is asked to stop: it saves exactly there, in time, and the next start goes on as if nothing had been."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.conftest import ROOT, Trainer, clean_environ, metrics_of, state_of
from tests.test_survives import ENDLESS, ended, last_words, trains, two_workers
from tests.watch.http_server import HttpServer
from tests.watch.test_notices import Metadata, wait_for_long_polls
from trainer.checkpoints.directory import MARKER

pytestmark = pytest.mark.slow

FLAGS = [
    "--model=mlp",
    "--train_steps=3000",
    "--eval_every_steps=1500",
    "--checkpoint_every_steps=1000",
    "--log_every_steps=100",
    "--steps_per_loop=7",
]
# Says in a file that it is there, and takes its time, as the options say.
SLOW_MODEL = """
import dataclasses
import pathlib
import time

import keras
import tensorflow as tf

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    import_secs: float = 0.0
    train_secs: float = 0.0
    eval_secs: float = 0.0


class Slow(keras.layers.Layer):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def call(self, x, training=False):
        def wait(x):
            with open(HERE / ("train" if training else "eval"), "a") as file:
                file.write(".")
            time.sleep(self.options.train_secs if training else self.options.eval_secs)
            return x

        y = tf.numpy_function(wait, [x], tf.float32, stateful=True)
        return tf.stop_gradient(tf.ensure_shape(y, x.shape) - x) + x


def build(options, spec):
    if options.import_secs:
        (HERE / "build").touch()
        time.sleep(options.import_secs)
    given = keras.Input(spec.inputs.shape, dtype=spec.inputs.dtype)
    x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(given))
    return keras.Model(given, keras.layers.Dense(spec.num_classes)(Slow(options)(x)))
"""


class Slow:
    """Runs of SLOW_MODEL."""

    def __init__(self, trainer: Trainer, folder: pathlib.Path):
        self.trainer, self.folder = trainer, folder
        (folder / "theirs").mkdir()
        (folder / "theirs" / "slow.py").write_text(SLOW_MODEL)
        self.model_dir = folder / "run"

    def start(self, *flags: str, **options: float) -> subprocess.Popen:
        given = ",".join(f"{name}={value:.6f}" for name, value in options.items())
        return self.trainer.start(
            f"--model_dir={self.model_dir}",
            "--model=theirs.slow",
            f"--model_options={given}",
            "--allow_config_change",
            *flags,
            cwd=self.folder,
        )

    def wait_for(self, process: subprocess.Popen, what: str, times: int = 0) -> None:
        """Until the model was called for this: build, train, eval."""
        path = self.folder / "theirs" / what
        while not path.exists() or path.stat().st_size < times:
            assert process.poll() is None, process.communicate()
            threading.Event().wait(0.01)


@pytest.fixture
def slow(trainer: Trainer, tmp_path: pathlib.Path) -> Slow:
    return Slow(trainer, tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    model_dir = tmp_path_factory.mktemp("uninterrupted")
    Trainer(digits_dir).run(f"--model_dir={model_dir}", *FLAGS)
    return model_dir


def stop(trainer: Trainer, model_dir: pathlib.Path, number: signal.Signals) -> int:
    """Starts the run, and stops it soon after; returns the step at which it says it did."""
    process = trainer.start(f"--model_dir={model_dir}", *FLAGS)
    assert process.stdout is not None
    assert any("loss" in line for line in process.stdout), process.communicate()
    process.send_signal(number)
    return stopped_at(ended(process, 75), number.name)


def stopped_at(err: str, reason: str) -> int:
    found = re.fullmatch(
        rf"trainer: stopped by {reason} at step ([\d,]+) of [\d,]+, which is saved\. .*", last_words(err)[-1]
    )
    assert found, err
    return int(found[1].replace(",", ""))


def newest(model_dir: pathlib.Path) -> int:
    return max(int(path.parent.name) for path in model_dir.glob(f"checkpoints/*/{MARKER}"))


def assert_same(model_dir: pathlib.Path, expected_dir: pathlib.Path) -> None:
    state, expected = state_of(model_dir), state_of(expected_dir)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
    assert metrics_of(model_dir) == metrics_of(expected_dir)


def test_it_stops_where_it_is_and_goes_on_from_there(
    trainer: Trainer, uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    first = stop(trainer, tmp_path, signal.SIGTERM)
    assert newest(tmp_path) == first
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 75, first)
    assert ">stopped<" in (tmp_path / "report.html").read_text()
    second = stop(trainer, tmp_path, signal.SIGINT)
    assert newest(tmp_path) == second > first
    trainer.run(f"--model_dir={tmp_path}", *FLAGS)
    assert_same(tmp_path, uninterrupted)
    starts = json.loads((tmp_path / "receipt.json").read_text())["starts"]
    assert [start["exit_code"] for start in starts] == [75, 75, 0]
    assert [start["from_step"] for start in starts] == [0, first, second]
    assert json.loads((tmp_path / "receipt.json").read_text())["seconds"]["recomputed"] == 0
    alerts = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(alert["event"], alert["step"]) for alert in alerts][-1] == ("finished", newest(tmp_path))
    assert [alert["event"] for alert in alerts[:-1]] == ["preempted", "preempted"]


def test_a_call_is_so_short_that_the_grace_holds(slow: Slow) -> None:
    """Steps of 0.2 s, of which 1000 may be a call, for all the user cares."""
    flags = ["--mode=train", "--train_steps=100000", "--steps_per_loop=1000", "--log_every_steps=1000"]
    flags += ["--eval_every_steps=1000", "--checkpoint_every_steps=1000"]
    process = slow.start(*flags, "--grace_secs=8", train_secs=0.2)
    slow.wait_for(process, "train", times=5)  # the first call is a single step
    process.send_signal(signal.SIGTERM)
    err = ended(process, 75)
    assert newest(slow.model_dir) == stopped_at(err, "SIGTERM") < 40


@pytest.mark.nightly
def test_a_step_longer_than_the_grace_is_warned_of(slow: Slow) -> None:
    process = slow.start("--mode=train", "--train_steps=4", "--grace_secs=2", train_secs=1.5)
    err = ended(process, 0)
    assert err.count("a request to stop may not leave the time to save within --grace_secs=2") == 1


@pytest.mark.nightly
def test_a_compilation_longer_than_the_grace_is_no_such_step(slow: Slow) -> None:
    process = slow.start("--mode=train", "--train_steps=20", "--grace_secs=2")
    assert "a request to stop" not in ended(process, 0)


def test_a_second_interrupt_leaves_at_once(slow: Slow) -> None:
    process = slow.start("--mode=train", "--train_steps=10", "--grace_secs=1000", train_secs=10000)
    slow.wait_for(process, "train")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "preempted: asked to stop by SIGINT" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    err = ended(process, 75)
    assert last_words(err) == [
        "trainer: stopped at once by a second SIGINT; there is no checkpoint yet: the run will begin again"
    ]


def test_stopped_during_start_up(slow: Slow) -> None:
    process = slow.start(import_secs=10000)
    slow.wait_for(process, "build")
    process.send_signal(signal.SIGTERM)
    assert last_words(ended(process, 75)) == ["trainer: stopped by SIGTERM before training began; run again"]
    assert not slow.model_dir.exists()


def test_an_evaluation_that_was_stopped_is_done_again(slow: Slow) -> None:
    flags = ["--train_steps=20", "--eval_every_steps=10", "--steps_per_loop=1", "--checkpoint_every_steps=1000"]
    process = slow.start(*flags, eval_secs=0.3)
    slow.wait_for(process, "eval")
    process.send_signal(signal.SIGTERM)
    assert stopped_at(ended(process, 75), "SIGTERM") == newest(slow.model_dir) == 10
    assert "eval/loss" not in (slow.model_dir / "metrics.jsonl").read_text()
    ended(slow.start(*flags), 0)
    assert [record["step"] for record in metrics_of(slow.model_dir) if "eval/loss" in record] == [10, 20]


@pytest.mark.parametrize("asked", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_two_workers_stop_at_the_same_step(trainer: Trainer, tmp_path: pathlib.Path, asked: int) -> None:
    workers = two_workers(trainer, tmp_path, *ENDLESS)
    try:
        trains(workers[0], tmp_path)
        workers[asked].send_signal(signal.SIGTERM)
        reasons = ["a request to another worker"] * 2
        reasons[asked] = "SIGTERM"
        chief, other = (ended(worker, 75) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    step = stopped_at(chief, reasons[0])
    assert f"worker 1: stopped by {reasons[1]} at step {step:,} of" in last_words(other)[-1]
    assert newest(tmp_path) == step


def test_a_notice_of_preemption_stops_the_run(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    metadata = Metadata()
    with HttpServer(metadata) as server:
        process = trainer.start(f"--model_dir={tmp_path}", *ENDLESS, environ={"GCE_METADATA_HOST": server.address})
        try:
            trains(process, tmp_path)
            wait_for_long_polls(server)
            metadata.set("preempted", "TRUE")
            assert newest(tmp_path) <= stopped_at(ended(process, 75), "preemption notice") == newest(tmp_path)
        finally:
            process.kill()
            process.communicate()


def profiles(model_dir: pathlib.Path) -> list[pathlib.Path]:
    return list((model_dir / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))


@pytest.mark.nightly
def test_a_signal_profiles_a_running_job(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    process = trainer.start(f"--model_dir={tmp_path}", *ENDLESS)
    try:
        trains(process, tmp_path)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert any(line.startswith("profile of steps ") for line in process.stdout), process.communicate()
        process.send_signal(signal.SIGTERM)
        stopped_at(ended(process, 75), "SIGTERM")
    finally:
        process.kill()
        process.communicate()
    assert len(profiles(tmp_path)) == 1


@pytest.mark.nightly
def test_steps_that_were_asked_for_are_profiled(
    trainer: Trainer, uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = trainer.run(f"--model_dir={tmp_path}", *FLAGS, "--profile_steps=103,109")
    assert "profile of steps 103 to 108: " in done.stdout
    assert len(profiles(tmp_path)) == 1
    assert_same(tmp_path, uninterrupted)


@pytest.mark.nightly
def test_supervise_carries_a_run_over_a_kill(
    trainer: Trainer, uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "scripts/supervise", "--max_backoff_secs=0.1", "--"]
    command += trainer.command(f"--model_dir={tmp_path}", *FLAGS)
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert any("loss" in line for line in process.stdout), process.communicate()
    os.kill(json.loads((tmp_path / "status.json").read_text())["pid"], signal.SIGKILL)
    err = ended(process, 0)
    assert "supervise: killed by signal 9" in err
    assert_same(tmp_path, uninterrupted)
