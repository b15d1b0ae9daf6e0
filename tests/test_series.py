"""Runs of one job, night after night: which run a start is of, what serves, what stays."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import random
from collections.abc import Iterator

import pytest

from tests.conftest import Trainer, state_of
from trainer import config as config_lib
from trainer import rules, run_dir, series
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.modes.promote import close_run
from trainer.watch import lease, status

RETRY, CONFIG = 75, 78
MORNING = datetime.datetime(2026, 1, 31, 3, 30, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


def _wanted(root: pathlib.Path, **options: object) -> Config:
    return Config(
        model_dir=str(root), dataset="digits", run_id="{date}", best_metric="accuracy", best_goal="max", **options
    )


class Ticks:
    """A scheduler's starts, with all that a run writes but its training."""

    def __init__(self, wanted: Config):
        self.wanted = wanted
        self.trained: list[str] = []
        self.trained_on: list[str] = []
        self.evaluated: list[str] = []

    def choose(self, now: datetime.datetime, data: str) -> tuple[Config, series.Series]:
        chosen, of = series.choose(self.wanted, {}, now)
        if not of.can_go_on_with(data):
            chosen, of = series.choose(self.wanted, {}, now, data)
        return chosen, of

    @contextlib.contextmanager
    def run(self, now: datetime.datetime, data: str) -> Iterator[tuple[run_dir.RunDir, series.Series] | None]:
        """A start: None where there is nothing to do. An exception inside is the end that it has."""
        chosen, of = self.choose(now, data)
        folder = run_dir.RunDir(chosen.model_dir)
        if of.has_nothing_new(data) or (of.current and of.current.state == "finished"):
            yield None
            return
        held = lease.acquire(folder.path, self.wanted.lease_secs)
        folder.start(chosen, {"time": now.isoformat(timespec="seconds"), "data": data})
        ended, code = "stopped", RETRY
        try:
            yield folder, of
            ended, code = "finished", 0
        except InterruptedError:
            pass
        finally:
            held.release(ended, code)

    def train(self, now: datetime.datetime, data: str, accuracy: float) -> None:
        """A start that trains to its end."""
        with self.run(now, data) as begun:
            if begun is None:
                return
            folder, of = begun
            pathlib.Path(folder.export_dir).mkdir(exist_ok=True)
            pathlib.Path(folder.export_dir, "accuracy").write_text(str(accuracy))
            self.trained.append(os.path.basename(folder.path))
            self.trained_on.append(data)
            close_run(of, folder, 10, {"accuracy": accuracy}, self.evaluate, is_chief=True)

    def evaluate(self, path: str) -> dict[str, float]:
        self.evaluated.append(os.path.basename(path))
        return {"accuracy": float(pathlib.Path(path, "export", "accuracy").read_text())}


def _serving(root: pathlib.Path) -> dict:
    return json.loads((root / series.POINTER).read_text())


def test_a_month_of_nights(tmp_path: pathlib.Path) -> None:
    """Some nights bring no data, some starts are killed: at each morning the best so far serves, and few runs stay."""
    chance = random.Random(0)
    ticks = Ticks(_wanted(tmp_path, if_new_data=True, promote_margin=0.0105, keep_runs=3))
    accuracy: dict[str, float] = {}
    served: list[str] = []
    data, nothing_new, killed = 0, 0, 0
    for night in range(31):
        now = MORNING + night * DAY
        new = night % 5 < 3
        data += new
        before = len(ticks.trained)
        value = round(0.5 + night / 100 + chance.random() / 10, 3)
        if chance.random() < 0.4:
            with ticks.run(now, f"data {data}") as begun:
                if begun is not None:
                    killed += 1
                    raise InterruptedError
            if chance.random() < 0.5 or not served:  # else it is for the next night
                ticks.train(now + datetime.timedelta(hours=1), f"data {data}", value)
        else:
            ticks.train(now, f"data {data}", value)
        if len(ticks.trained) == before:
            nothing_new += 1
        else:
            accuracy[ticks.trained[-1]] = value
            if not served or value > accuracy[served[-1]] + 0.0105:
                served.append(ticks.trained[-1])
        assert _serving(tmp_path)["run"] == str(tmp_path / served[-1])
        assert float(pathlib.Path(_serving(tmp_path)["export"], "accuracy").read_text()) == accuracy[served[-1]]
        there = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        unfinished = there - set(ticks.trained)  # left behind when its data changed, it goes as it gets old
        assert there - unfinished == set(ticks.trained[-3:]) | set(served[-2:])
        assert all(name > min(ticks.trained[-3:]) for name in unfinished)
    assert nothing_new > 6 and killed > 3 and len(served) > 5, "the month must hold what it is about"
    assert len(set(ticks.trained)) == len(ticks.trained) > 12
    assert len(set(ticks.trained_on)) == len(ticks.trained_on), "no data is trained on twice"


def test_a_killed_run_comes_before_a_new_one(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path))
    with ticks.run(MORNING, "data"):
        raise InterruptedError
    chosen, of = ticks.choose(MORNING + DAY, "data")
    assert chosen.model_dir == str(tmp_path / "2026-01-31") and of.current.state == "stopped"
    ticks.train(MORNING + DAY, "data", 0.5)
    assert ticks.choose(MORNING + DAY, "data")[0].model_dir == str(tmp_path / "2026-02-01")


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("change", ["options", "data", "failed"])
def test_a_run_that_cannot_go_on_is_left_behind(tmp_path: pathlib.Path, change: str, keep: int) -> None:
    """It goes once it is older than all that is kept."""
    ticks = Ticks(_wanted(tmp_path))
    ticks.train(MORNING - DAY, "data", 0.5)
    with ticks.run(MORNING, "data"):
        raise InterruptedError
    if change == "options":
        ticks.wanted = dataclasses.replace(ticks.wanted, learning_rate=0.5)
    if change == "failed":
        file = status.StatusFile(str(tmp_path / "2026-01-31"))
        file.store(dataclasses.replace(file.load(), state="failed", exit_code=CONFIG))
    data = "other data" if change == "data" else "data"
    ticks.wanted = dataclasses.replace(ticks.wanted, keep_runs=keep)
    ticks.train(MORNING + DAY, data, 0.5)
    assert ticks.trained == ["2026-01-30", "2026-02-01"]
    there = {path.name for path in tmp_path.iterdir()}
    assert there == ({"2026-02-01"} if keep == 1 else {"2026-01-30", "2026-01-31", "2026-02-01"})


def test_a_name_without_a_time_is_always_the_same_run(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(dataclasses.replace(_wanted(tmp_path), run_id="one"))
    with ticks.run(MORNING, "data"):
        raise InterruptedError
    ticks.wanted = dataclasses.replace(ticks.wanted, run_id="two")
    assert ticks.choose(MORNING, "data")[0].model_dir == str(tmp_path / "two")


def test_warm_start_is_of_the_last_finished_run_and_stays_so(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, init_from="last"))
    assert ticks.choose(MORNING, "data")[0].init_from is None
    ticks.train(MORNING, "data", 0.5)
    with ticks.run(MORNING + DAY, "data"):
        raise InterruptedError
    ticks.train(MORNING + DAY, "data", 0.6)
    first, second = tmp_path / "2026-01-31", tmp_path / "2026-02-01"
    assert json.loads((second / "config.json").read_text())["init_from"] == str(first)
    # The second has finished since, and would be the last.
    assert series.choose(ticks.wanted, {}, MORNING + DAY)[0].init_from == str(first)


def test_new_data_cannot_be_told_without_checksums(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, if_new_data=True))
    ticks.train(MORNING, "digits train: records without a manifest, none left out", 0.5)
    with pytest.raises(ConfigError, match=r"python -m data\.audit"):
        ticks.train(MORNING + DAY, "digits train: records without a manifest, none left out", 0.5)


def test_a_run_that_is_at_work_is_not_removed(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, keep_runs=1))
    with contextlib.ExitStack() as stack:
        at_work = lease.acquire(str(tmp_path / "2026-01-01"), 60)
        stack.callback(at_work.release, "stopped", RETRY)
        run_dir.RunDir(str(tmp_path / "2026-01-01")).start(ticks.wanted, {"time": "2026-01-01", "data": "data"})
        (tmp_path / "notes").mkdir()
        ticks.train(MORNING, "other", 0.5)
        assert {path.name for path in tmp_path.iterdir()} == {"2026-01-01", "2026-01-31", "notes"}
    ticks.train(MORNING + DAY, "other", 0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"2026-02-01", "notes"}


def test_a_removal_cut_short_is_completed(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, keep_runs=1))
    ticks.train(MORNING, "data", 0.5)
    (tmp_path / "2026-01-31" / status.NAME).unlink()
    assert ticks.choose(MORNING + DAY, "data")[1].last is None, "half a run is none to start from"
    ticks.train(MORNING + DAY, "data", 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["2026-02-01"]


@pytest.mark.parametrize(("goal", "values", "serves"), [("min", [0.5, 0.45, 0.3], 2), ("max", [0.5, 0.55, 0.4], 0)])
def test_what_serves_is_beaten_by_more_than_the_margin(
    tmp_path: pathlib.Path, goal: str, values: list[float], serves: int
) -> None:
    ticks = Ticks(dataclasses.replace(_wanted(tmp_path, promote_margin=0.06), best_goal=goal))
    for night, value in enumerate(values):
        ticks.train(MORNING + night * DAY, "data", value)
    assert _serving(tmp_path)["run"] == str(tmp_path / ticks.trained[serves])
    decisions = [json.loads((tmp_path / run / run_dir.PROMOTION).read_text())["promoted"] for run in ticks.trained]
    assert decisions == [night in (0, serves) for night in range(3)]


def test_what_serves_and_what_served_before_stay(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, promote_margin=0.0, keep_runs=1))
    for night, value in enumerate([0.5, 0.7, 0.6, 0.6]):
        ticks.train(MORNING + night * DAY, "data", value)
    assert _serving(tmp_path)["run"] == str(tmp_path / ticks.trained[1])
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == set(ticks.trained) - {ticks.trained[2]}


def test_a_run_that_is_promoted_already_is_not_compared_with_itself(tmp_path: pathlib.Path) -> None:
    """Of a start that was ended between promoting and finishing."""
    ticks = Ticks(_wanted(tmp_path, promote_margin=0.0))
    ticks.train(MORNING, "data", 0.5)
    ticks.train(MORNING + DAY, "data", 0.6)
    promoted = _serving(tmp_path)
    _, of = ticks.choose(MORNING + DAY, "data")
    close_run(of, run_dir.RunDir(promoted["run"]), 10, {"accuracy": 0.6}, ticks.evaluate, is_chief=True)
    assert _serving(tmp_path) == promoted
    decision = json.loads((tmp_path / "2026-02-01" / run_dir.PROMOTION).read_text())
    assert decision["promoted"]


def test_a_number_that_is_none_serves_nobody(tmp_path: pathlib.Path) -> None:
    ticks = Ticks(_wanted(tmp_path, promote_margin=0.0))
    ticks.train(MORNING, "data", 0.5)
    ticks.train(MORNING + DAY, "data", float("nan"))
    assert _serving(tmp_path)["run"] == str(tmp_path / "2026-01-31")


@pytest.mark.parametrize(
    ("template", "environ", "name"),
    [
        ("{date}", {}, "2026-01-31"),
        ("nightly-{hour}", {}, "nightly-2026-01-31T03"),
        ("{week}.{month}", {}, "2026-W05.2026-01"),
        ("{job}_{trial}", {"CLOUD_ML_JOB_ID": "12", "CLOUD_ML_TRIAL_ID": "3"}, "12_3"),
    ],
)
def test_names(template: str, environ: dict[str, str], name: str) -> None:
    assert series.name(template, environ, MORNING) == name


def test_every_field_of_a_name_stands_for_something() -> None:
    template = "".join(f"{{{field}}}" for field in rules.RUN_ID_FIELDS)
    assert series.name(template, {"CLOUD_ML_JOB_ID": "1", "CLOUD_ML_TRIAL_ID": "2"}, MORNING)
    with pytest.raises(ConfigError, match="takes the job and trial of Vertex AI"):
        series.name(template, {}, MORNING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_id": "a/b"}, "run_id is the name of a directory"),
        ({"run_id": ".."}, "run_id is the name of a directory"),
        ({"run_id": "{day}"}, "run_id is the name of a directory"),
        ({"run_id": None, "keep_runs": 3}, "keep_runs looks at other runs of a series"),
        ({"run_id": None, "init_from": "last"}, "init_from=last looks at other runs"),
        ({"promote_margin": 0.0, "export_dir": "x"}, "leave out export_dir"),
        ({"promote_margin": 0.0, "mode": "train"}, "promote_margin is for mode=train_and_eval"),
        ({"mode": "eval"}, "run_id is for mode=train"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_lib.merge({"model_dir": "m", "dataset": "d", "run_id": "{date}", **options})


@pytest.mark.slow
def test_three_runs_for_real(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    """Warm start, promotion by an evaluation of now, nothing new, and a second start beside the first."""
    common = [
        f"--model_dir={tmp_path}",
        "--model=mlp",
        "--train_steps=20",
        "--init_from=last",
        "--promote_margin=0",
        "--keep_runs=1",
        "--best_metric=accuracy",
        "--best_goal=max",
    ]
    trainer.run(*common, "--run_id=1")
    assert _serving(tmp_path)["run"] == f"{tmp_path}/1"
    first, beside = (trainer.start(*common, "--run_id=2") for _ in range(2))
    ends = {process.returncode: out + err for process in (first, beside) for out, err in [process.communicate()]}
    assert sorted(ends) == [0, RETRY], ends
    assert "is in use by another run" in ends[RETRY] and "Traceback" not in ends[RETRY]
    assert f"weights of {tmp_path}/1/checkpoints/20" in ends[0]
    serving = _serving(tmp_path)
    assert (serving["run"], serving["previous"]["run"]) == (f"{tmp_path}/2", f"{tmp_path}/1")
    recorded = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    assert serving["value_before"] == pytest.approx(recorded[-1]["eval/accuracy"], abs=1e-6)
    done = trainer.run(*common, "--run_id=3", "--if_new_data")
    assert "nothing new in the data since" in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", series.POINTER]
    assert state_of(tmp_path / "2")
