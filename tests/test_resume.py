"""A run killed anywhere and started again ends as one that was never killed."""

import pathlib
import shutil

import numpy as np
import pytest

from tests.conftest import Trainer, metrics_of, state_of

pytestmark = pytest.mark.slow

# Batch norm and dropout on: their state has to come back too. Checkpoints, evaluations, reports and epochs (11.7 steps)
# end on different steps.
FLAGS = [
    "--model=cnn",
    "--train_steps=240",
    "--eval_every_steps=24",
    "--checkpoint_every_steps=7",
    "--log_every_steps=10",
    "--steps_per_loop=5",
    "--shuffle_mib=0.05",
]


@pytest.fixture(scope="module")
def uninterrupted(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    model_dir = tmp_path_factory.mktemp("uninterrupted")
    Trainer(digits_dir).run(f"--model_dir={model_dir}", *FLAGS)
    return model_dir


def _kill_at(trainer: Trainer, model_dir: pathlib.Path, line_start: str) -> None:
    """Starts a run and kills it as soon as it prints a line that starts so."""
    process = trainer.start(f"--model_dir={model_dir}", *FLAGS)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(line_start):
            process.kill()
            break
    else:
        pytest.fail(f"the run ended before it printed {line_start!r}: {process.communicate()}")
    process.communicate()


def test_killed_run_ends_with_the_same_bits(
    trainer: Trainer, uninterrupted: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    _kill_at(trainer, tmp_path, "dataset")  # before its first step
    _kill_at(trainer, tmp_path, "step 48/240  eval")
    done = trainer.run(f"--model_dir={tmp_path}", *FLAGS)
    assert "-> 240," in done.stdout, "it went on instead of starting again"
    state, expected = state_of(tmp_path), state_of(uninterrupted)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
    assert metrics_of(tmp_path) == metrics_of(uninterrupted), "each record once, with the same values"


def test_the_newest_and_the_best_checkpoints_are_kept(uninterrupted: pathlib.Path) -> None:
    evaluated = {r["step"]: r["eval/loss"] for r in metrics_of(uninterrupted) if "eval/loss" in r}
    best = min(evaluated, key=lambda step: evaluated[step])
    steps = {int(path.name) for path in (uninterrupted / "checkpoints").iterdir()}
    assert steps == {231, 238, 240, best}


def test_other_options_are_refused_with_a_diff(trainer: Trainer, uninterrupted: pathlib.Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    done = trainer.run(f"--model_dir={uninterrupted}", *FLAGS, "--seed=1", "--learning_rate=0.5", code=78)
    assert "seed: 0 -> 1" in done.stderr
    assert "learning_rate: 0.001 -> 0.5" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}


def test_other_data_is_refused(trainer: Trainer, uninterrupted: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    text = (run / "provenance.json").read_text()
    (run / "provenance.json").write_text(text.replace("1500 examples", "1400 examples"))
    done = trainer.run(f"--model_dir={run}", *FLAGS, code=78)
    assert "data: digits/1.0.0 train: 1400 examples in 4 shards" in done.stderr
    assert "-> digits/1.0.0 train: 1500 examples in 4 shards" in done.stderr


def test_checkpoint_of_another_model_is_refused(trainer: Trainer, uninterrupted: pathlib.Path) -> None:
    flags = [*FLAGS, "--model_options=units=7", "--allow_config_change"]
    done = trainer.run(f"--model_dir={uninterrupted}", *flags, code=78)
    assert "does not fit this model in every variable" in done.stderr
