"""JAX' devices: what is asked for and what there is, two real processes, and one of them killed."""

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.test_cluster import free_ports, tf_config

PRELUDE = """
import json, os, signal, sys, threading
from trainer import backend, cluster, hardware
backend.choose("jax")
from trainer.errors import TrainerError

def connected(timeout=60, **flags):
    target = hardware.resolve(**{"tpu": None, "backend": "jax", **flags})
    return cluster.connect(cluster.locate(target, timeout_secs=timeout), connect_timeout_secs=timeout)

def say(value):
    print(json.dumps(value), flush=True)

def attempt(**flags):
    try:
        say(connected(**flags).description)
    except TrainerError as error:
        say([error.exit_code, str(error)])
"""
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script with `connected`, `attempt` and `say` in a process that ends with the test at the latest."""
    processes = []

    def popen(script: str, **environ: str) -> subprocess.Popen:
        env = {name: value for name, value in clean_environ().items() if not name.startswith(("JAX", "XLA"))} | environ
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield popen
    for process in processes:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen, code: int = 0) -> tuple[list, str]:
    """What it said, and its standard error, of a process that has ended with `code`."""
    out, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err[-3000:]}"
    return [json.loads(line) for line in out.splitlines() if line.startswith(("{", "[", '"'))], err


def test_this_machine(start: Start) -> None:
    found, _ = said(
        start("""
            os.environ["JAX_PLATFORMS"] = "tpu"
            attempt()
            del os.environ["JAX_PLATFORMS"]
            made = connected(replicas=3)
            say([made.kind, made.num_replicas, made.num_workers, made.num_hosts, made.is_chief, made.description])
            os.environ["JAX_PLATFORMS"] = "cuda"
            attempt()
            del os.environ["JAX_PLATFORMS"]
            attempt(replicas=2)
            with made.watched(say):
                say(made.agree([4, -1]))
        """)
    )
    platforms, here, no_cuda, in_use, agreed = found
    assert platforms[0] == 78 and "JAX_PLATFORMS=tpu without --tpu leaves nothing to train on" in platforms[1]
    assert here == ["cpu", 3, 1, 1, True, "CPU: JAX: 3 virtual replica(s) on this machine"]
    assert no_cuda[0] == 78 and "has no GPU here, and JAX_PLATFORMS=cuda asks for one" in no_cuda[1]
    assert in_use[0] == 78 and in_use[1].startswith("Cannot set up --replicas: something uses JAX already")
    assert agreed == [4, -1]


@pytest.mark.slow
def test_two_processes(start: Start) -> None:
    """They add up over a proxy that would swallow them, keep their handler of SIGTERM, and part in peace."""
    ports = free_ports(2)
    script = """
        got = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: got.set())
        made = connected(replicas=2)
        say([made.num_replicas, made.num_workers, made.num_hosts, made.worker_index, made.is_chief])
        with made.watched(say):
            say(made.agree([made.worker_index + 1, 2**40]))
            os.kill(os.getpid(), signal.SIGTERM)
            say([got.wait(60)])
    """
    proxy = "http://127.0.0.1:1"
    pair = [start(script, TF_CONFIG=tf_config(ports, index), http_proxy=proxy) for index in range(2)]
    for index, process in enumerate(pair):
        found, err = said(process)
        assert found == [[4, 2, 2, index, index == 0], [3, 2**41], [True]]
        assert not err, "nothing to tell a user"


@pytest.mark.slow
def test_a_chief_that_is_killed_ends_its_worker_with_75(start: Start) -> None:
    """Of JAX' own accord the worker dies of SIGABRT, without last words."""
    ports = free_ports(2)
    script = """
        from trainer.watch import stopping
        made = connected()
        with made.watched(stopping.Stops().end):
            made.agree([1])
            say("trains")
            threading.Event().wait()  # as in a collective of a TPU, which waits for ever
    """
    chief, worker = [start(script, TF_CONFIG=tf_config(ports, index)) for index in range(2)]
    for process in (chief, worker):
        assert '"trains"\n' in iter(process.stdout.readline, "")
    chief.send_signal(signal.SIGKILL)
    _, err = said(worker, 75)
    [line] = err.splitlines()
    assert f"worker 0 at 127.0.0.1:{ports[0]} is dead, or cannot be reached any more" in line
    assert "The same command goes on from the last checkpoint" in line


def test_no_process_is_left_behind(start: Start) -> None:
    """A chief whose workers never come ends, and its coordination service with it."""
    ports = free_ports(2)
    script = """
        import subprocess
        started = []
        popen = subprocess.Popen.__init__
        def remember(self, *args, **kwargs):
            popen(self, *args, **kwargs)
            started.append(self)
        subprocess.Popen.__init__ = remember
        attempt(timeout=0.5)
        say([process.wait(60) for process in started])
    """
    [late, ended], _ = said(start(script, TF_CONFIG=tf_config(ports, 0)))
    assert late[0] == 75 and f"worker 1 at 127.0.0.1:{ports[1]}" in late[1]
    assert ended[-1] == -signal.SIGKILL
