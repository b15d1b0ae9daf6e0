"""The same runs on Keras' JAX backend: processes, files, exit codes, and weights that go to the other backend."""

import json
import pathlib

import numpy as np
import pytest

from tests.conftest import GUARD_SECS, Trainer, free_ports, metrics_of, state_of

pytestmark = pytest.mark.slow

JAX = "--backend=jax"
# As in test_end_to_end.py: two processes share batch statistics and dropout masks as little as two replicas do.
PLAIN = ["--model=cnn", "--model_options=batch_norm=false, dropout=0", "--train_steps=50", "--eval_every_steps=20"]
# Batch norm and dropout on: their state has to come back too.
ODD = ["--model=cnn", "--train_steps=60", "--eval_every_steps=20", "--checkpoint_every_steps=7", "--log_every_steps=10"]
ODD += ["--steps_per_loop=5", "--shuffle_mib=0.05"]


@pytest.fixture(scope="module")
def begun(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """--init_from of weights for both backends, whose initializers draw others."""
    model_dir = tmp_path_factory.mktemp("begun")
    Trainer(digits_dir).run(f"--model_dir={model_dir}", *PLAIN, "--train_steps=1", "--mode=train")
    return f"--init_from={model_dir}"


@pytest.fixture(scope="module")
def on_jax(digits_dir: pathlib.Path, begun: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """50 steps on one replica of JAX."""
    model_dir = tmp_path_factory.mktemp("jax")
    done = Trainer(digits_dir).run(f"--model_dir={model_dir}", *PLAIN, begun, JAX)
    assert done.stderr == "", "the console shows only what its user can use"
    return model_dir


def test_a_run_learns_on_jax_what_it_learns_on_tensorflow(
    trainer: Trainer, begun: str, on_jax: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    trainer.run(f"--model_dir={tmp_path}", *PLAIN, begun)
    _assert_same_run(on_jax, tmp_path, tolerance=1e-4)


def test_two_processes_end_with_the_same_weights(
    trainer: Trainer, begun: str, on_jax: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        flags = [f"--model_dir={tmp_path}", *PLAIN, begun, JAX, "--steps_per_loop=7"]
        workers.append(trainer.start(*flags, environ={"TF_CONFIG": json.dumps(task)}))
    outputs = [worker.communicate(timeout=GUARD_SECS) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert outputs[1] == ("", ""), "only the chief speaks"
    _assert_same_run(tmp_path, on_jax, tolerance=1e-5)


def test_killed_run_ends_with_the_same_bits(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trainer.run(f"--model_dir={whole}", *ODD, JAX)
    process = trainer.start(f"--model_dir={killed}", *ODD, JAX)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 40/60  eval"))
    process.kill()
    process.communicate()
    assert "-> 60," in trainer.run(f"--model_dir={killed}", *ODD, JAX).stdout, "it went on instead of starting again"
    state, expected = state_of(killed), state_of(whole)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
    assert metrics_of(killed) == metrics_of(whole), "each record once, with the same values"


@pytest.mark.parametrize(("of", "by"), [([JAX], []), ([], [JAX])], ids=["of JAX", "of TensorFlow"])
def test_weights_of_one_backend_evaluate_the_same_on_the_other(
    trainer: Trainer, tmp_path: pathlib.Path, of: list[str], by: list[str]
) -> None:
    flags = [f"--model_dir={tmp_path}", *ODD, "--train_steps=20"]
    trainer.run(*flags, *of)
    trainer.run(*flags, *by, "--mode=eval")
    evaluations = [
        {name: value for name, value in record.items() if name.startswith("eval/")}
        for record in metrics_of(tmp_path)
        if "eval/loss" in record
    ]
    assert len(evaluations) == 2
    assert evaluations[1] == pytest.approx(evaluations[0], abs=1e-6)


@pytest.mark.nightly
def test_a_run_goes_on_on_the_other_backend(trainer: Trainer, begun: str, on_jax: pathlib.Path, tmp_path: pathlib.Path):
    process = trainer.start(f"--model_dir={tmp_path}", *PLAIN, begun)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 40/50  eval"))
    process.kill()
    process.communicate()
    assert "-> 50," in trainer.run(f"--model_dir={tmp_path}", *PLAIN, begun, JAX).stdout
    _assert_same_run(tmp_path, on_jax, tolerance=1e-4)


def _assert_same_run(model_dir: pathlib.Path, expected_dir: pathlib.Path, *, tolerance: float) -> None:
    state, expected = state_of(model_dir), state_of(expected_dir)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        if not name.startswith("metrics/"):  # a report of other length may be in the making
            np.testing.assert_allclose(state[name], array, rtol=0, atol=tolerance, err_msg=name)
    ours = {(r["step"], key): v for r in metrics_of(model_dir) for key, v in r.items()}
    theirs = {(r["step"], key): v for r in metrics_of(expected_dir) for key, v in r.items()}
    assert ours == pytest.approx(theirs, abs=tolerance)
