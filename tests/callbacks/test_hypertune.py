"""Metrics for a tuning job of Vertex AI: the file that the real cloudml-hypertune writes."""

import json
import logging
import pathlib

import pytest

from tests.conftest import Trainer, metrics_of
from trainer.callbacks import hypertune


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "not" / "there" / "yet.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "7")
    return path


@pytest.mark.slow
def test_a_trial_reports_every_evaluation(trainer: Trainer, tmp_path):
    path = tmp_path / "hypertune" / "output.metrics"
    environ = {"CLOUD_ML_TRIAL_ID": "3", "CLOUD_ML_HP_METRIC_FILE": str(path)}
    flags = ["--model=mlp", "--train_steps=4", "--eval_every_steps=2", "--mode=train_and_eval"]
    trainer.run(f"--model_dir={tmp_path / 'run'}", *flags, environ=environ)
    told = [
        (line["trial"], int(line["global_step"]), name, float(line[name]))
        for line in read(path)
        for name in line.keys() - {"trial", "global_step", "timestamp", "checkpoint_path"}
    ]
    evaluations = [record for record in metrics_of(tmp_path / "run" / "trial-3") if "eval/accuracy" in record]
    assert [record["step"] for record in evaluations] == [2, 4]
    assert sorted(told) == sorted(
        ("3", record["step"], name.removeprefix("eval/"), value)
        for record in evaluations
        for name, value in record.items()
        if name != "step"
    )


def test_it_is_wanted_in_a_trial_only(monkeypatch):
    for name in ("CLOUD_ML_TRIAL_ID", "CLOUD_ML_HP_METRIC_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert not hypertune.is_wanted()
    monkeypatch.setenv("CLOUD_ML_TRIAL_ID", "1")
    assert hypertune.is_wanted()


def test_what_is_no_number_is_left_out_with_a_warning(file, caplog):
    hypertune.Hypertune().on_evaluation(10, {"loss": float("nan"), "accuracy": 0.5})
    [line] = read(file)
    assert (line["accuracy"], line["global_step"], line["trial"]) == ("0.5", "10", "7")
    assert "loss is nan at step 10" in caplog.text


def test_a_file_that_cannot_be_written_is_a_warning_and_tried_again(file, caplog):
    file.parent.parent.touch()  # a file where a directory has to be
    reporter = hypertune.Hypertune()
    with caplog.at_level(logging.WARNING):
        reporter.on_evaluation(1, {"accuracy": 0.25})
    assert "not told of accuracy at step 1" in caplog.text
    file.parent.parent.unlink()
    reporter.on_evaluation(2, {"accuracy": 0.5})
    file.unlink()
    file.mkdir()
    reporter.on_evaluation(3, {"accuracy": 0.75})
    assert "not told of accuracy at step 3" in caplog.text
    file.rmdir()
    reporter.on_evaluation(4, {"accuracy": 1.0})
    assert [line["global_step"] for line in read(file)] == ["2", "3", "4"]
