"""`--mode=doctor` as a whole process: on a clean machine, with nothing to be reached, and where TensorFlow aborts."""

import json
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Trainer
from tests.tpu_api_server import TpuApi

ON_GS = ("--dataset=gs://bucket/data/digits", "--data_dir=gs://bucket/data", "--model_dir=gs://other-bucket/run")
NAMED_TPU = ("--tpu=my-tpu", "--tpu_zone=us-central2-b", "--tpu_project=p")


@pytest.fixture
def refusing() -> int:
    """A port that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    held = []

    def accept() -> None:
        while True:
            try:
                held.append(server.accept())
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
    for connection, _ in held:
        connection.close()


@pytest.fixture
def nothing_at(tmp_path: pathlib.Path) -> Callable[[int], dict[str, str]]:
    """Environment in which all of Google is at one port of this machine."""

    def environ(port: int) -> dict[str, str]:
        address = f"127.0.0.1:{port}"
        with TpuApi({}) as api:
            variables = api.environ(tmp_path)
        return variables | {
            "TPU_API_DISCOVERY_URL": f"http://{address}/discovery",
            "GCE_METADATA_HOST": address,
            "https_proxy": f"http://{address}",
            "no_proxy": "127.0.0.1,localhost",
        }

    return environ


@pytest.mark.slow
def test_a_clean_machine(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    done = trainer.run("--mode=doctor", f"--model_dir={tmp_path}/run", "--log_format=json")
    *entries, verdict = map(json.loads, done.stdout.splitlines())
    assert {entry["status"] for entry in entries} == {"pass", "skipped"} and not done.stderr
    passed = {entry["check"] for entry in entries if entry["status"] == "pass"}
    wanted = {
        "Python",
        "TensorFlow build",
        "requirements",
        "TensorFlow",
        "page size",
        "memory",
        "TMPDIR",
        "target",
        "batch",
    }
    assert passed >= wanted | {"model_dir", "dataset", "split train", "split test", "shards", "checkpoint room"}
    assert verdict["message"].endswith("nothing stands in the way of a run") and verdict["exit_code"] == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nothing_can_be_reached(trainer: Trainer, refusing: int, nothing_at: Callable[[int], dict[str, str]]) -> None:
    done = trainer.run("--mode=doctor", *NAMED_TPU, *ON_GS, code=75, environ=nothing_at(refusing))
    failed = [line for line in done.stdout.splitlines() if "  fail  " in line]
    assert any("TPU node" in line and "Cannot look up TPU my-tpu" in line for line in failed)
    assert sum("gs://" in line for line in failed) >= 2, "places on gs://, each or all"
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("may succeed later without a change (exit code 75)")


@pytest.mark.nightly  # it takes the limits of both rounds
def test_everything_is_silent(trainer: Trainer, silent: int, nothing_at: Callable[[int], dict[str, str]]) -> None:
    done = trainer.run("--mode=doctor", *NAMED_TPU, *ON_GS, code=75, environ=nothing_at(silent))
    assert done.stdout.count("no answer within") + done.stdout.count("does not answer within") >= 3
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_tensorflow_aborts(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.write(2, b'2026: F tpu.cc] no such symbol\\n')\nos.abort()\n")
    environ = {"PYTHONPATH": f"{tmp_path}:{pathlib.Path(__file__).parents[2]}"}
    done = trainer.run("--mode=doctor", f"--model_dir={tmp_path}/run", code=78, environ=environ)
    assert done.stdout.count("  fail  ") == 1
    words = " ".join(done.stdout.split())
    assert "it cannot be used: its process ended by SIGABRT: 2026: F tpu.cc] no such symbol" in words
    assert done.stdout.count("which cannot be used here") >= 1 and "1 fail" in done.stdout.splitlines()[-1]
    assert not done.stderr
