"""A config file, and the options of a run, on gs://."""

import json
import subprocess
import sys

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.gcs import Fault, Gcs, gcs
from trainer import config
from trainer.config import Config
from trainer.errors import EXIT_CONFIG, EXIT_RETRY

__all__ = ["gcs"]

pytestmark = pytest.mark.slow


def _print_config(storage: Gcs, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.main", "--print_config", *arguments],
        cwd=ROOT,
        env=clean_environ() | storage.environ(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_config_file(gcs: Gcs) -> None:
    gcs.write("run.toml", b"dataset = 'digits'\nmodel_dir = 'gs://b/run'\nseed = 3\n")
    found = json.loads(_print_config(gcs, f"--config={gcs.url}/run.toml", "--model=mlp").stdout)
    assert (found["dataset"], found["seed"], found["model"]) == ("digits", 3, "mlp")


def test_eval_goes_by_the_options_of_the_run(gcs: Gcs) -> None:
    trained = Config(model_dir=f"{gcs.url}/run", dataset="digits", model="mlp", seed=7)
    gcs.write("run/config.json", config.to_json(trained).encode())
    found = json.loads(_print_config(gcs, "--mode=eval", f"--model_dir={gcs.url}/run").stdout)
    assert (found["dataset"], found["model"], found["seed"]) == ("digits", "mlp", 7)


@pytest.mark.nightly
def test_a_file_that_is_not_there_and_a_bucket_that_does_not_answer(gcs: Gcs) -> None:
    done = _print_config(gcs, f"--config={gcs.url}/none.toml", code=EXIT_CONFIG)
    assert "the file cannot be read. Name one that is there" in done.stderr
    gcs.write("run.toml", b"")
    gcs.set_faults(Fault(code=503, times=None, path="run.toml"))
    done = _print_config(gcs, f"--config={gcs.url}/run.toml", code=EXIT_RETRY)
    assert "the storage does not answer" in done.stderr
