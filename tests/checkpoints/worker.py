"""Processes that save and restore, for tests that kill them or give them another storage: `Workers` starts them.

One process imports TensorFlow, once, and forks for every call before TensorFlow has begun anything. What it is asked is
a function of this module by name; a call ends with the code of its process, negative where a signal ended it.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tests.conftest import clean_environ
from tests.gcs import Fault, Gcs
from trainer import storage
from trainer.checkpoints import bundle
from trainer.checkpoints.store import Checkpoints
from trainer.errors import ConfigError, RetryError

ROOT = pathlib.Path(__file__).parent.parent
QUICK = (0.01, 0.02)  # waits between tries


def state(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    """Arrays that only this step has."""
    random = np.random.default_rng(step)
    return {
        "model/dense/kernel": random.standard_normal((size, 10), np.float32),
        "model/dense/bias": random.standard_normal(10).astype(np.float32),
        "optimizer/iterations": np.array(step, np.int64),
    }


def store(directory: str, **options: Any) -> Checkpoints:
    """Checkpoints that try again quickly."""
    defaults: dict[str, Any] = {"keep": 2, "keep_best": 1, "best_metric": "loss", "best_goal": "min"}
    return Checkpoints(directory, **(defaults | {"retry_waits_secs": QUICK} | options))


def assert_state(saved: Any, step: int, size: int = 1000) -> None:
    """That this is the checkpoint of `step`, bit for bit."""
    assert saved is not None and saved.step == step, saved
    expected = state(step, size)
    assert saved.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert saved.arrays[name].dtype == array.dtype and saved.arrays[name].shape == array.shape, name
        assert saved.arrays[name].tobytes() == array.tobytes(), name


@dataclasses.dataclass
class Workers:
    """A process that forks one process a call."""

    process: subprocess.Popen

    def call(self, name: str, *args: Any) -> tuple[int, str]:
        """The exit code of a function of this module in a process of its own, and what it printed on failing."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([name, args]), file=self.process.stdin, flush=True)
        code, text = json.loads(self.process.stdout.readline())
        return code, text


@contextlib.contextmanager
def workers(environ: Mapping[str, str] | None = None) -> Iterator[Workers]:
    """Workers until the block ends, with more environment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoints.worker"],
        cwd=ROOT,
        env=clean_environ() | {"TF_CPP_MIN_LOG_LEVEL": "2"} | dict(environ or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Workers(process)
    finally:
        process.kill()
        process.communicate()


# What can be called.


def save_and_die(directory: str, before: int, operation: int | None = None, after_secs: float | None = None) -> None:
    """Saves steps until it is killed: before the given file operation of step `before + 1`, or after some time."""
    checkpoints = store(directory, keep=1, keep_best=0)
    checkpoints.newest()
    if after_secs is not None:
        threading.Timer(after_secs, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for step in range(before + 1, sys.maxsize):
            checkpoints.save(step, state(step, size=200_000), {})
    if operation is not None:
        _kill_before(operation)
    checkpoints.save(before + 1, state(before + 1), {})
    checkpoints.wait()


def _kill_before(operation: int) -> None:
    left = [operation]

    def counted(work: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return work(*args, **kwargs)

        return call

    for module, names in (
        (os, ("mkdir", "fsync", "replace", "rmdir", "unlink")),
        (storage.tf.io.gfile, ("remove", "rmtree")),
        (storage.tf.raw_ops, ("SaveV2", "RestoreV2")),
    ):
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def save_to_bucket(server: dict) -> None:
    """Saves, keeps few, finds again; leaves nothing that is not complete."""
    gcs = Gcs(**server)
    checkpoints = store(f"{gcs.url}/run/checkpoints", keep=1)
    assert checkpoints.newest() is None
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.2)):
        checkpoints.save(step, state(step), {"metrics": {"loss": loss}})
    checkpoints.wait()
    assert_state(checkpoints.newest(), 4)
    assert_state(checkpoints.best(), 2)
    # An upload of several chunks, of which the connection takes one.
    gcs.set_faults(Fault(drop="request", method="PUT", path="upload_id"))
    checkpoints.save(5, state(5, size=20_000), {})
    checkpoints.wait()
    assert_state(checkpoints.newest(), 5, size=20_000)
    kept = {name.split("/")[2] for name in gcs.objects()}
    assert kept == {"2", "5"}, gcs.objects()
    name = next(name for name in gcs.objects() if name.startswith("run/checkpoints/5/") and ".data" in name)
    gcs.write(name, b"\x00" + gcs.read(name)[1:])
    assert_state(store(checkpoints.directory).newest(), 2)


def save_through_faults(server: dict) -> None:
    """A bucket that fails and recovers loses nothing, whichever request it fails."""
    gcs = Gcs(**server)
    checkpoints = store(f"{gcs.url}/run/checkpoints", on_failure=_raise)
    faults = [
        Fault(code=503, times=2),
        Fault(code=429, times=2, method="PUT|POST"),
        Fault(drop="request", times=2, method="PUT"),
        Fault(drop="response", times=2),
        Fault(code=503, times=2, path="COMMIT.json"),
        Fault(lose=True, method="PUT", path="upload_id"),
        Fault(lose=True, method="POST", path="rewriteTo.*data-00000-of-00001$"),
    ]
    for step, fault in enumerate(faults):
        gcs.set_faults(fault)
        checkpoints.save(step, state(step), {})
        checkpoints.wait()
        gcs.set_faults()
        assert_state(store(checkpoints.directory).newest(), step)
        kept = [name for name in gcs.objects() if f"checkpoints/{step}/" in name and not name.endswith("/")]
        assert len(kept) == 3, f"of tries that failed nothing is left: {kept}"


def _raise(message: str) -> None:
    raise AssertionError(message)


def fail_on_bucket(server: dict) -> None:
    """A bucket that stays away ends the run with another try; one that denies does not."""
    gcs = Gcs(**server)
    alerts: list[str] = []
    checkpoints = store(f"{gcs.url}/run/checkpoints", on_failure=alerts.append, retry_waits_secs=(0.01,))
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    gcs.set_faults(Fault(lose=True, times=None, method="POST", path="rewriteTo.*data-00000-of-00001$"))
    checkpoints.save(9, state(9), {})
    _expect(RetryError, "not kept as it was written", checkpoints.wait)
    assert not [name for name in gcs.objects() if "checkpoints/9/a" in name], gcs.objects()
    alerts.clear()
    gcs.set_faults()
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    gcs.set_faults(Fault(code=503, times=None, method="PUT|POST"))
    checkpoints.save(2, state(2), {})
    _expect(RetryError, "safe is of step 1", checkpoints.wait)
    assert len(alerts) == 1 and "step 2" in alerts[0], alerts
    gcs.set_faults(Fault(code=403, times=None, method="PUT|POST"))
    for step in (3, 4):
        checkpoints.save(step, state(step), {})
    checkpoints.close()
    _expect(ConfigError, "3 saves in a row.*403", lambda: checkpoints.save(5, state(5), {}))
    gcs.set_faults(Fault(code=403, times=None))
    _expect(ConfigError, "no permission: storage.objects", lambda: store(checkpoints.directory).newest())
    gcs.set_faults()
    assert_state(store(checkpoints.directory).newest(), 1)


def save_one_to_bucket(server: dict) -> None:
    """Saves step 1."""
    checkpoints = store(f"{Gcs(**server).url}/run/checkpoints")
    checkpoints.save(1, state(1), {})
    checkpoints.wait()


def find_nothing_on_bucket(server: dict, fault: dict) -> None:
    """A bucket that cannot be read is no bucket without checkpoints: the run would begin anew over them."""
    gcs = Gcs(**server)
    gcs.set_faults(Fault(**fault))
    _expect(RetryError, "Run again", store(f"{gcs.url}/run/checkpoints").newest)
    gcs.set_faults()
    assert_state(store(f"{gcs.url}/run/checkpoints").newest(), 1)


def _expect(kind: type[Exception], text: str, work: Callable[[], Any]) -> None:
    import re

    try:
        got = work()
    except kind as error:
        assert re.search(text, str(error), re.DOTALL), str(error)
    else:
        raise AssertionError(f"no {kind.__name__} but {got}")


def save_beside_a_remote_worker(directory: str) -> None:
    """With a remote worker as the default device, files are this process' own. The worker's directory is another."""
    import tensorflow as tf

    with _remote_worker(directory) as (address, device):
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"worker": [address]}), protocol="grpc")
        os.chdir(directory)
        with tf.device(device):
            assert tf.constant(1.0).device == device
            bundle.write("here", state(1) | {"bf": np.ones(3, tf.bfloat16.as_numpy_dtype)})
            bundle.verify("here", state(1))
            checkpoints = store("checkpoints")
            checkpoints.save(1, state(1), {})
            checkpoints.wait()
            assert_state(checkpoints.newest(), 1)
        assert pathlib.Path("here.index").exists()


@contextlib.contextmanager
def _remote_worker(directory: str) -> Iterator[tuple[str, str]]:
    there = pathlib.Path(directory, "of-the-worker")
    there.mkdir()
    program = (
        "import socket, tensorflow as tf\n"
        "with socket.socket() as s: s.bind(('127.0.0.1', 0)); address = '127.0.0.1:%d' % s.getsockname()[1]\n"
        "server = tf.distribute.Server(tf.train.ClusterSpec({'worker': [address]}), 'worker', 0)\n"
        "print(address, flush=True)\n"
        "server.join()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=there, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), "/job:worker/replica:0/task:0/device:CPU:0"
    finally:
        process.kill()
        process.communicate()
    assert list(there.iterdir()) == []


def _run(name: str, args: list) -> tuple[int, str]:
    """The call in a fork; what it prints and its traceback go through a pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        code = 0
        try:
            globals()[name](*args)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            code = 1
        os._exit(code)
    os.close(writing)
    with open(reading, errors="replace") as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
