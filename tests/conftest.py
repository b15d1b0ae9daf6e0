"""What tests share: the digits dataset, the trainer as a process, and what a run left behind."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from trainer import backend

ROOT = pathlib.Path(__file__).parent.parent
GUARD_SECS = 300  # ends a process that hangs; no test depends on how long anything takes


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data_dir that holds the digits dataset."""
    directory = tmp_path_factory.mktemp("datasets")
    subprocess.run(
        [sys.executable, "-m", "data.build", "digits", f"--data_dir={directory}"],
        cwd=ROOT,
        check=True,
        timeout=GUARD_SECS,
    )
    return directory


@dataclasses.dataclass
class Trainer:
    """Runs `python -m trainer.main` on the digits."""

    data_dir: pathlib.Path

    def command(self, *flags: str) -> list[str]:
        """The command line; flags given later win."""
        run = [sys.executable, "-m", "trainer.main", f"--backend={backend.chosen()}"]
        return [*run, "--dataset=digits", f"--data_dir={self.data_dir}", *flags]

    def start(self, *flags: str, environ: dict[str, str] | None = None, cwd: pathlib.Path = ROOT) -> subprocess.Popen:
        """A running process with its output on pipes."""
        return subprocess.Popen(
            self.command(*flags),
            cwd=cwd,
            env=clean_environ() | (environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *flags: str, code: int = 0, environ: dict[str, str] | None = None, cwd: pathlib.Path = ROOT
    ) -> subprocess.CompletedProcess:
        """A finished process that must have ended with `code`."""
        process = self.start(*flags, environ=environ, cwd=cwd)
        out, err = process.communicate(timeout=GUARD_SECS)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def trainer(digits_dir: pathlib.Path) -> Trainer:
    """The trainer as a process."""
    return Trainer(digits_dir)


def clean_environ() -> dict[str, str]:
    """This process' environment without what would send a run to other hardware, and without what jax has set in it."""
    ours = ("TPU", "KUBE_GOOGLE", "TF_CONFIG", "CLUSTER_SPEC", "AIP_", "TF_CPP_MIN_LOG_LEVEL")
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)} | {"PYTHONPATH": str(ROOT)}


def metrics_of(model_dir: pathlib.Path) -> list[dict]:
    """Records of metrics.jsonl, without what depends on the clock."""
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    clock = ("examples_per_sec", "tokens_per_sec", "step_ms", "input_wait_ms", "host_memory_mib")
    timed = {f"train/{name}" for name in clock}
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def state_of(model_dir: pathlib.Path) -> dict:
    """Every array of the newest checkpoint, by name."""
    from trainer.checkpoints import store

    return dict(store.load(str(model_dir)).arrays)


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody has, all different."""
    sockets = [socket.socket() for _ in range(number)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
