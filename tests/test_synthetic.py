"""Runs on --dataset=synthetic: no records, and all that is promised of runs on real ones."""

import json
import pathlib

import numpy as np
import pytest

from tests.conftest import Trainer, metrics_of, state_of

pytestmark = pytest.mark.slow

LIKE_DIGITS = ["--dataset=synthetic:digits", "--model=cnn", "--train_steps=60", "--eval_every_steps=20"]
OWN_SIZE = ["--dataset=synthetic", "--image_size=8", "--num_classes=10"]


def test_a_killed_run_goes_on_with_the_same_examples(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = trainer.run(f"--model_dir={whole}", *LIKE_DIGITS)
    assert "synthetic:digits/1.0.0: 1,500 train, 297 test" in done.stdout
    process = trainer.start(f"--model_dir={killed}", *LIKE_DIGITS)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 40/60  eval"))
    process.kill()
    process.communicate()
    trainer.run(f"--model_dir={killed}", *LIKE_DIGITS)
    starts = json.loads((killed / "provenance.json").read_text())["starts"]
    assert starts[1]["step"] in (20, 40)
    for name, array in state_of(whole).items():
        np.testing.assert_array_equal(state_of(killed)[name], array, err_msg=name)
    assert metrics_of(killed) == metrics_of(whole)
    last = metrics_of(whole)[-1]
    assert last["eval/accuracy"] > 0.9, "61 examples are learnt by heart"


def test_replicas_share_it_as_they_share_records(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    plain = ["--model=mlp", "--mode=train", "--train_steps=8", "--data_dir=none", *OWN_SIZE]
    for replicas in (1, 2):
        trainer.run(f"--model_dir={tmp_path / str(replicas)}", f"--replicas={replicas}", *plain)
    one, two = state_of(tmp_path / "1"), state_of(tmp_path / "2")
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_options_of_reading_are_refused(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    refused = trainer.run(f"--model_dir={tmp_path}", *OWN_SIZE, "--shuffle_mib=3", code=78).stderr
    assert "no record of --dataset=synthetic is read" in refused
    assert "Received: shuffle_mib, data_dir" in refused
    refused = trainer.run(f"--model_dir={tmp_path}", "--dataset=synthetic:digitz", code=78).stderr
    assert "No dataset 'digitz' (did you mean 'digits'?)" in refused
