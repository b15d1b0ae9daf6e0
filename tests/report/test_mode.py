"""--mode=report as a process and from its config: what it writes, leaves alone and refuses; and the end of a run."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from tests.report import made
from trainer import config as config_lib
from trainer import run_dir
from trainer.errors import ConfigError
from trainer.modes import report
from trainer.watch import status


def asked(model_dir: pathlib.Path, **options) -> config_lib.Config:
    return config_lib.merge({"mode": "report", "model_dir": str(model_dir), **options})


def test_a_run_that_is_at_work_is_not_disturbed(tmp_path: pathlib.Path) -> None:
    """And nothing is imported that connects, or trains."""
    path = made.run(tmp_path / "run")
    running = {**dataclasses.asdict(status.new_status(None)), "phase": "training"}  # of this very process
    (path / "status.json").write_text(json.dumps(running))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    program = (
        "import sys; from trainer import main; from trainer.watch import stopping; "
        "code = main.main(sys.argv, stopping.Stops()); "
        "print(sorted({'trainer.experiment', 'trainer.cluster', 'trainer.models'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--mode=report", f"--model_dir={path}"],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr
    assert f"report  {path}/report.html" in done.stdout and "[]" in done.stdout
    after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert "running" in after.pop(path / run_dir.REPORT).decode()
    assert after == before


def test_runs_go_by_name_below_model_dir_or_by_directory(tmp_path: pathlib.Path) -> None:
    made.run(tmp_path / "series" / "monday")
    other = made.run(tmp_path / "elsewhere" / "tuesday")
    assert report.report(asked(tmp_path / "series", runs=f"monday, {other}/")) == 0
    page = (tmp_path / "series" / "report.html").read_text()
    assert "2 runs: monday, tuesday" in page


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"runs": "monday,gone"}, "there is no gone, or nothing in it. .* Received: --runs with 'gone'"),
        (
            {"runs": "monday,notes"},
            "notes is no run: it has neither config.json nor status.json.*one. Received: --runs",
        ),
        ({"runs": "monday,torn"}, "torn tells nothing of a run: config.json cannot be read: .* Received: --runs"),
        ({"model_dir": "torn"}, "torn tells nothing of a run: config.json cannot be read: .* Received: --model_dir"),
        ({}, "model_dir is a series: give the directory of one run, or --runs=monday"),
        ({"model_dir": "notes"}, "notes is no run"),
        ({"model_dir": "gone"}, "there is no .*gone, or nothing in it. .* Received: --model_dir="),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: pathlib.Path, options: dict, text: str) -> None:
    made.run(tmp_path / "monday")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    model_dir = tmp_path / options.pop("model_dir", ".")
    with pytest.raises(ConfigError, match=text):
        report.report(asked(pathlib.Path(os.path.normpath(model_dir)), **options))
    assert not list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize("runs", ["monday", "monday,", ",", "monday,monday", "monday,monday/"])
def test_fewer_than_two_runs_are_refused(tmp_path: pathlib.Path, runs: str) -> None:
    with pytest.raises(
        ConfigError, match="runs must be two or more different runs with commas between. Received: 'mon|,'"
    ):
        asked(tmp_path, runs=runs)


def test_runs_are_for_the_report_only() -> None:
    with pytest.raises(ConfigError, match="runs is for mode=report; leave it out of train"):
        config_lib.merge({"mode": "train", "dataset": "d", "model_dir": "m", "runs": "a,b"})


def test_a_page_that_cannot_be_written_ends_no_run(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.run(tmp_path / "run")
    (path / "report.html").mkdir()  # what no file can replace
    report.leave(run_dir.RunDir(str(path)), None)
    assert caplog.text.count("the report is not written") == 1
    monkeypatch.setattr(report, "look", lambda path: pytest.fail("there is no time for it"))
    report.leave(run_dir.RunDir(str(path)), 5.0)
    assert "no time" not in caplog.text


def test_a_run_leaves_its_page(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = [
        f"--model_dir={tmp_path}/run",
        "--model=mlp",
        "--train_steps=6",
        "--eval_every_steps=3",
        "--log_every_steps=2",
    ]
    done = trainer.run(*flags)
    assert f"report       {tmp_path}/run/report.html" in done.stdout
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">finished<" in page and "in one start" in page and "loss by step: train" in page
    assert "All 297 examples of the split test, by the weights of step 6." in page and "data:image/png;base64," in page
    [alert] = (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()
    assert (json.loads(alert)["event"], json.loads(alert)["step"]) == ("finished", 6)
