"""The trainer on a TPU by name, whose node is not there yet or not any more: real processes against a loopback API.

Its bucket is on loopback too, since a TPU on another machine takes gs:// only. The worker has no TPU: a run that has
found a READY node ends there.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests import gcs
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.tpu_api_server import PROJECT, ZONE, Node, TpuApi

WORKER = """
import socket
import tensorflow as tf
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]}, job_name="worker", task_index=0)
print(port, flush=True)
server.join()
"""
Start = Callable[[str], subprocess.Popen]


@pytest.fixture
def api() -> Iterator[TpuApi]:
    with TpuApi({"slow": Node("CREATING"), "spot": Node("PREEMPTED")}) as server:
        yield server


@pytest.fixture
def start(api: TpuApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts the trainer on the named TPU, with a directory in the bucket for it."""
    directory = tmp_path_factory.mktemp("servers")
    processes = []
    with gcs.serve(directory) as storage:
        environ = clean_environ() | storage.environ() | api.environ(directory)

        def popen(tpu: str) -> subprocess.Popen:
            command = [sys.executable, "-m", "trainer.main", "--dataset=synthetic", "--train_steps=1"]
            command += [f"--model_dir={storage.url}/{tpu}", f"--tpu={tpu}", f"--tpu_zone={ZONE}"]
            command += [f"--tpu_project={PROJECT}", "--mode=train"]
            processes.append(popen_text(command, environ))
            return processes[-1]

        yield popen
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def worker() -> Iterator[tuple[str, int]]:
    process = popen_text([sys.executable, "-c", WORKER], clean_environ() | {"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert process.stdout is not None
    while not (line := process.stdout.readline()).strip().isdecimal():
        assert line, "the worker has ended"
    yield "127.0.0.1", int(line)
    process.kill()
    process.communicate()


def popen_text(command: list[str], environ: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def words_of(process: subprocess.Popen, code: int) -> str:
    """What a process says until it ends, with `code`."""
    out, _ = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == code, out[-3000:]
    return out


@pytest.mark.slow
def test_preempted_recreated_and_stopped_while_it_waits(start: Start, api: TpuApi, worker: tuple[str, int]) -> None:
    slow, spot = start("slow"), start("spot")
    out = words_of(spot, 75)
    assert f"TPU spot (project {PROJECT}, zone {ZONE}; --tpu=spot) is PREEMPTED" in out and "launch tpu-vm" in out

    api.nodes["spot"] = [Node("CREATING"), Node("READY", worker)]
    out = words_of(start("spot"), 78)
    waiting, ready, reached = (out.index(text) for text in ("which is CREATING", "(READY)", "has no TPU"))
    assert waiting < ready < reached

    assert slow.stdout is not None
    assert any("waiting for TPU slow" in line for line in slow.stdout)
    slow.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM before training began" in words_of(slow, 75)
