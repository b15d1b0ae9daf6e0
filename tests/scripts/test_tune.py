"""`scripts/tune`: the loop with real processes that act as trials, and whole studies of the real trainer."""

import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
from optuna.trial import TrialState

from scripts.launchers.study import Parameter, Study
from scripts.tuning import picture, report
from scripts.tuning import trial as trial_lib
from scripts.tuning.history import JOURNAL, History, reason
from scripts.tuning.trial import TrialProcess
from scripts.tuning.tuner import Tuner
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.scripts import walkthrough
from trainer.errors import ConfigError, RetryError

RATE = Parameter("learning_rate", "double", min=1e-4, max=1e-1, scale="log")
UNITS = Parameter("model_options.units", "integer", min=1, max=64)
KIND = Parameter("optimizer", "categorical", values=("sgd", "adamw"))
# A trial that evaluates `values` at steps 1, 2, ... and ends with the next of `codes`; with none left it goes on until
# it is told to stop. It counts how often it was started.
ACTING = """
import json, os, pathlib, signal, sys
folder, values, codes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write("x")
start = (folder / "starts").stat().st_size - 1
with (folder / "metrics.jsonl").open("w") as file:
    for step, value in enumerate(values, 1):
        file.write(json.dumps({"step": step, "train/loss": 1}) + "\\n")
        file.write(json.dumps({"step": step, "eval/loss": 1, "eval/accuracy": value}) + "\\n")
    file.write('{"step": 99, "eval/acc')
if start >= len(codes):
    signal.pause()
print("first line\\nlast words:\\n  and why")
sys.exit(codes[start])
"""


@pytest.fixture
def quick(monkeypatch):
    """Without the pauses that are for real runs."""
    monkeypatch.setattr(trial_lib, "_FIRST_PAUSE_SECS", 0.01)
    monkeypatch.setattr("scripts.tuning.tuner._POLL_SECS", 0.05)


def a_study(trials=4, parallel=1, algorithm="random", parameters=(RATE, KIND)) -> Study:
    return Study("accuracy", "max", trials, parallel, algorithm, parameters)


def a_history(folder: pathlib.Path, study: Study, *, seed=0, early_stopping=False, **definition) -> History:
    return History(folder, study, definition, seed=seed, early_stopping=early_stopping)


def run(folder: pathlib.Path, study: Study, acts: dict, *, history: History | None = None) -> tuple[History, list[str]]:
    """Runs a study whose trials act as `acts` says by number: (values, exit codes)."""
    history, said = history or a_history(folder, study), []

    def start(number, values):
        arguments = [json.dumps(argument) for argument in acts[number]]
        command = [sys.executable, "-c", ACTING, str(folder / f"trial-{number}"), *arguments]
        return TrialProcess(command, folder / f"trial-{number}", folder / f"trial-{number}.log")

    Tuner(study, history, start, said.append).run()
    return history, said


def starts(folder: pathlib.Path) -> int:
    return (folder / "starts").stat().st_size


def test_every_way_a_trial_can_end_is_told(tmp_path, quick):
    study = a_study(trials=6, parallel=2)
    acts = {
        0: ([0.25, 0.5], [75, 75, 0]),  # stopped early twice
        1: ([0.9], [78]),
        2: ([0.75, 0.7], [0]),  # the last evaluation counts
        3: ([], [0]),
        4: (["NaN"], [0]),
        5: ([0.1], [75] * 6),
    }
    history, said = run(tmp_path, study, acts)
    trials = history.trials
    assert [trial.value for trial in trials] == [0.5, None, 0.7, None, None, None]
    assert [starts(tmp_path / f"trial-{number}") for number in range(6)] == [3, 1, 1, 1, 1, 6]
    assert reason(trials[1]) == "exit code 78: last words: and why"
    assert reason(trials[3]) == "it evaluated nothing"
    assert reason(trials[4]) == "accuracy is nan"
    assert "exit code 75" in reason(trials[5])
    assert len(said) == 6
    assert any(re.fullmatch(r"trial 2 \(\d of 6\): accuracy 0.7; best 0.7 of trial 2", line) for line in said)
    assert any(line.startswith("trial 1 (") and "failed, exit code 78: last words: and why" in line for line in said)
    assert history.best.number == 2
    table = report.table(study, trials).splitlines()
    assert [line.split()[0] for line in table] == ["trial", "2", "0", "1", "3", "4", "5"]
    records = json.loads(report.to_json(study, trials, history.best))
    assert (records["best"], records["trials"][2]["evaluations"]) == (2, {"1": 0.75, "2": 0.7})


def test_a_study_whose_first_trials_all_fail_ends(tmp_path, quick):
    with pytest.raises(ConfigError, match=r"no trial succeeds; the last of 3: trial 2 failed.*last words: and why"):
        run(tmp_path, a_study(trials=9), {number: ([], [78]) for number in range(9)})
    assert not (tmp_path / "trial-3").exists()


def test_a_metric_that_is_not_evaluated_is_told_at_once(tmp_path, quick):
    study = Study("acuracy", "max", 2, 2, "random", (RATE,))
    with pytest.raises(ConfigError, match="no metric 'acuracy'; they have accuracy, loss"):
        run(tmp_path, study, {0: ([0.5], [0]), 1: ([0.5], [0])})
    assert [trial.state for trial in a_history(tmp_path, study).trials] == [TrialState.RUNNING] * 2


def test_trials_below_the_median_are_ended_early(tmp_path, quick):
    study = a_study(trials=8)
    history = a_history(tmp_path, study, early_stopping=True)
    for _ in range(5):
        trial = history.ask()
        assert not history.report(trial, {1: 0.5, 2: 0.8})
        history.complete(trial, 0.8)
    acts = {5: ([0.6, 0.9], [0]), 6: ([0.55, 0.6], []), 7: ([0.2], [])}
    history, said = run(tmp_path, study, acts, history=history)
    states = [trial.state for trial in history.trials[5:]]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
    assert history.trials[6].intermediate_values == {1: 0.55, 2: 0.6}
    assert sum("ended early" in line for line in said) == 2
    assert [starts(tmp_path / f"trial-{number}") for number in (6, 7)] == [1, 1]


def suggestions(folder: pathlib.Path, study: Study, *, restarts: bool = False, seed: int = 0) -> list[dict]:
    folder.mkdir()
    history, found = a_history(folder, study, seed=seed), []
    while (trial := history.ask()) is not None:
        found.append(dict(trial.params))
        history.complete(trial, -abs(trial.params["model_options.units"] - 20))
        if restarts:
            history = a_history(folder, study, seed=seed)
    return found


@pytest.mark.parametrize("algorithm", ["random", "bayesian"])
def test_the_same_study_makes_the_same_suggestions_however_often_it_is_started(tmp_path, algorithm):
    study = a_study(trials=14, algorithm=algorithm, parameters=(RATE, UNITS, KIND))
    found = suggestions(tmp_path / "a", study)
    assert found == suggestions(tmp_path / "b", study, restarts=True)
    assert found != suggestions(tmp_path / "c", study, seed=1)
    assert len({json.dumps(trial) for trial in found}) == 14
    assert all(1e-4 <= t["learning_rate"] <= 1e-1 and 1 <= t["model_options.units"] <= 64 for t in found)


def test_a_grid_tries_every_combination_once(tmp_path):
    lengths = Parameter("model_options.units", "integer", min=1, max=3)
    found = suggestions(tmp_path / "a", a_study(trials=99, algorithm="grid", parameters=(lengths, KIND)), restarts=True)
    expected = [(units, kind) for units in (1, 2, 3) for kind in ("sgd", "adamw")]
    assert [(trial["model_options.units"], trial["optimizer"]) for trial in found] == expected


def test_a_tuner_that_is_stopped_goes_on_with_the_same_trials(tmp_path, quick):
    study = a_study(trials=3, parallel=2)
    real = a_history(tmp_path, study)

    class StopsItself:
        """Sends this process SIGTERM once both trials have evaluated."""

        def __getattr__(self, name):
            return getattr(real, name)

        def report(self, trial, values):
            if all((tmp_path / f"trial-{number}" / "metrics.jsonl").exists() for number in (0, 1)):
                os.kill(os.getpid(), signal.SIGTERM)
            return real.report(trial, values)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RetryError, match="goes on"):
        run(tmp_path, study, {0: ([0.5], []), 1: ([0.6], [])}, history=StopsItself())
    assert signal.getsignal(signal.SIGTERM) == before
    tried = [trial.params for trial in real.trials]
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"op_code": 6, "trial')  # a line that a kill has cut
    pathlib.Path(tmp_path / f"{JOURNAL}.lock").touch()
    history, said = run(tmp_path, study, {0: ([0.5], [1, 0]), 1: ([0.6], [1, 0]), 2: ([0.7], [0])})
    assert said[:2] == ["trial 0 goes on", "trial 1 goes on"]
    assert [trial.value for trial in history.trials] == [0.5, 0.6, 0.7]
    assert [trial.params for trial in history.trials][:2] == tried
    assert [starts(tmp_path / f"trial-{number}") for number in range(3)] == [2, 2, 1]


def test_another_study_is_refused_with_the_differences_and_more_trials_are_not(tmp_path):
    a_history(tmp_path, a_study(trials=4), train_steps=5, metric="accuracy")
    a_history(tmp_path, a_study(trials=9, parallel=3), train_steps=5, metric="accuracy")
    with pytest.raises(ConfigError, match=r"another study.*\n  train_steps: 5 -> 6\n  width: nothing -> 1"):
        a_history(tmp_path, a_study(), train_steps=6, metric="accuracy", width=1)


def test_the_picture_shows_every_trial(tmp_path, quick):
    study = a_study(trials=4)
    history, _ = run(tmp_path, study, {0: ([0.5], [0]), 1: ([0.7], [0]), 2: ([], [1]), 3: ([0.6], [0])})
    root = ElementTree.fromstring(picture.svg(study, history.trials, history.best))
    shapes = [
        (e.tag.split("}")[1], e.get("class")) for e in root.iter() if e.get("class") in ("best", "complete", "failed")
    ]
    assert shapes == [("circle", "complete"), ("circle", "best"), ("path", "failed"), ("circle", "complete")]
    heights = [float(e.get("cy")) for e in root.iter() if e.get("cy")]
    assert heights[1] < heights[2] < heights[0], "better is higher up"
    assert "best 0.7, of trial 1" in root.get("aria-label")
    for height in (0.0, 0.5):  # of equal values there is no range to draw
        one = tmp_path / str(height)
        one.mkdir()
        history, _ = run(one, a_study(trials=2), {0: ([height], [0]), 1: ([height], [0])})
        ElementTree.fromstring(picture.svg(study, history.trials, history.best))


# --- the real trainer ---


@pytest.fixture
def place(tmp_path, digits_dir) -> pathlib.Path:
    """A directory with the study of the walk-through and a config."""
    study = walkthrough.file("study.toml")
    (tmp_path / "study.toml").write_text(study.replace("trials = 20", "trials = 2"))
    config = {"dataset": "digits", "data_dir": str(digits_dir), "model": "mlp", "model_dir": "elsewhere"}
    config |= {"train_steps": 6, "eval_every_steps": 3, "log_every_steps": 3}
    (tmp_path / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items()))
    return tmp_path


def tune(place: pathlib.Path, *words: str) -> subprocess.Popen:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "tune"),
        "--study=study.toml",
        "--config=run.toml",
        "--out=runs/tune",
    ]
    return subprocess.Popen(
        [*command, *words],
        cwd=place,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.nightly
def test_a_killed_study_of_real_runs_goes_on_and_loses_nothing(place):
    out = place / "runs" / "tune"
    first = tune(place)
    wait_for(lambda: all((out / f"trial-{number}" / "status.json").exists() for number in (0, 1)), first)
    second = tune(place)
    assert "another tuner is at work" in second.communicate(timeout=GUARD_SECS)[1]
    assert second.returncode == 75
    first.kill()
    first.communicate()
    again = tune(place)
    printed, errors = again.communicate(timeout=GUARD_SECS)
    assert again.returncode == 0, printed + errors
    found = json.loads((out / "tune.json").read_text())
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 2
    assert sorted(path.name for path in out.glob("trial-*") if path.is_dir()) == ["trial-0", "trial-1"]
    for trial in found["trials"]:
        run_dir = out / f"trial-{trial['trial']}"
        config = json.loads((run_dir / "config.json").read_text())
        assert config["learning_rate"] == trial["parameters"]["learning_rate"]
        assert config["model_options"] == {"dropout": trial["parameters"]["model_options.dropout"]}
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        evaluated = {str(line["step"]): line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
        assert trial["evaluations"] == evaluated
        assert trial["accuracy"] == evaluated["6"]
    assert max(trial["accuracy"] for trial in found["trials"]) == found["trials"][found["best"]]["accuracy"]
    assert "not to model_dir=elsewhere" in printed
    [told] = re.findall(r"^Train with the best: python -m (.*)$", printed, re.MULTILINE)
    command = [sys.executable, "-m", *shlex.split(told.replace("...", "runs/best")), "--print_config"]
    done = subprocess.run(command, cwd=place, env=clean_environ(), capture_output=True, text=True, timeout=GUARD_SECS)
    config = json.loads(done.stdout)
    assert config["learning_rate"] == found["trials"][found["best"]]["parameters"]["learning_rate"]
    assert config["train_steps"] == 6


@pytest.mark.nightly
def test_no_real_trial_outlives_a_killed_tuner(place):
    process = tune(place, "--", "--train_steps=100000", "--eval_every_steps=100000")
    running = place / "runs" / "tune" / "trial-0" / "status.json"
    wait_for(lambda: running.exists() and json.loads(running.read_text())["step"], process)
    process.kill()
    process.communicate()
    ends_at = time.monotonic() + GUARD_SECS
    while json.loads(running.read_text())["state"] != "stopped":
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--seed=-1"], "--seed must be at least 0"),
        (["--", "--mode=train"], "leave out mode"),
        (["--", "--run_id={date}"], "leave out run_id"),
        (["--", "--tpu=local"], "one trial at a time"),
        (["--", "--learning_rate=x"], "learning_rate takes a number"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, flags, told):
    text = '[study]\nmetric = "accuracy"\ngoal = "max"\ntrials = 4\nparallel = 2\n'
    (tmp_path / "study.toml").write_text(f'{text}[parameters.optimizer]\ntype = "categorical"\nvalues = ["sgd"]\n')
    (tmp_path / "run.toml").write_text('dataset = "digits"\n')
    process = tune(tmp_path, *flags)
    errors = process.communicate(timeout=GUARD_SECS)[1]
    assert told in errors
    assert process.returncode in (2, 78)
    assert not (tmp_path / "runs").exists()


def test_every_command_of_the_walk_through_is_understood(place):
    commands = walkthrough.commands("scripts/tune")
    assert len(commands) == 2
    (place / "runs" / "tune").mkdir(parents=True)
    (place / "runs" / "tune" / "tune.lock").touch()
    with (place / "runs" / "tune" / "tune.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that it says that all is well but for another tuner
        for command in commands:
            words = shlex.split(command)
            words = [sys.executable, str(ROOT / words[0]), *words[1:]]
            done = subprocess.run(words, cwd=place, env=clean_environ(), capture_output=True, text=True)
            assert "another tuner is at work" in done.stderr
