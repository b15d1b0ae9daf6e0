"""The user's own model of the README, by its own commands: it trains, resumes, exports, and is compiled for a TPU."""

import pathlib
import re
import shlex

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import ROOT, Trainer, state_of

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## Your own model") :]
MODEL, COMMANDS = re.findall(r"```(?:python)?\n(.*?)```", SECTION, re.DOTALL)[:2]


def test_the_model_of_the_readme(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mixer.py").write_text(MODEL, encoding="utf-8")
    train, preflight = (shlex.split(line)[3:] for line in COMMANDS.strip().splitlines())
    short = ["--train_steps=4", "--eval_every_steps=4", f"--data_dir={trainer.data_dir}"]
    trainer.run(*train, *short, cwd=tmp_path, environ={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    run = tmp_path / "runs" / "mixer"
    assert state_of(run)["model/patches/kernel"].shape == (2, 2, 1, 32), "--model_options.width=32"
    served = tf.saved_model.load(str(run / "export")).signatures["serving_default"]
    logits = served(image=tf.zeros((2, 8, 8, 1), tf.uint8))["logits"].numpy()
    assert logits.shape == (2, 10) and np.isfinite(logits).all()
    environ = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "HOME": str(tmp_path)}  # of which results are kept
    told = trainer.run(*preflight, cwd=tmp_path, environ=environ).stdout
    assert re.search(r"v5e-8 +8 +16 +fits", told)
