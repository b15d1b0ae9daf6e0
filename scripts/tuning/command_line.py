"""The command line of `scripts/tune`, and how it ends: exit codes and one clear line, as the trainer's."""

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.launchers import job as job_lib
from scripts.launchers import study as study_lib
from scripts.launchers.job import Job
from scripts.launchers.study import Study
from trainer import config as config_lib
from trainer.errors import EXIT_OK, EXIT_RETRY, ConfigError, RetryError, TrainerError

_EPILOG = """What follows a lone -- are flags of the trainer, over those of --config:

  scripts/tune --study=study.toml --config=run.toml --out=runs/tune -- --train_epochs=5

The same command goes on with a study that was stopped or killed. Exit codes: 0 done; 75 stopped, run it again;
78 nothing that a retry can mend."""


def main(argv: Sequence[str]) -> int:
    """Does what `argv` asks for and returns an exit code of `trainer.errors`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    try:
        job = job_lib.load("tune", options.config, words[at + 1 :], given=("model_dir",))
        study = study_lib.load(options.study, {**job.values, "model_dir": options.out})
        _check(job, study, options)
        _tune(job, study, options)
    except TrainerError as error:
        print(f"tune: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("tune: interrupted before any trial began", file=sys.stderr, flush=True)
        return EXIT_RETRY
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/tune",
        description="Tries hyperparameters on this machine, each trial a real run of the trainer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--study", required=True, help="what to try: a file, .toml or .json; see scripts/README-tune.md"
    )
    parser.add_argument("--config", help="the trainer's config file, .toml or .json")
    parser.add_argument("--out", required=True, help="local directory of the study; trial N is a run in OUT/trial-N")
    parser.add_argument("--seed", type=int, default=0, help="of the suggestions; the runs' own is the trainer's --seed")
    parser.add_argument(
        "--early_stopping", action="store_true", help="end trials whose evaluations stay below the median of the others"
    )
    return parser


def _check(job: Job, study: Study, options: argparse.Namespace) -> None:
    problems = []
    if importlib.util.find_spec("optuna") is None:
        problems.append("Optuna is not installed here; pip install '.[tune]'")
    if job.config.mode != "train_and_eval":
        problems.append(f"a trial trains and evaluates; leave out mode. Received: {job.config.mode}")
    if job.config.run_id is not None:
        problems.append(f"each trial has a directory of its own; leave out run_id. Received: {job.config.run_id}")
    if study.parallel > 1 and job.config.tpu is not None:
        problems.append(f"a TPU takes one trial at a time; give parallel=1. Received: {study.parallel}")
    if "://" in options.out:
        problems.append(f"trials are kept on this machine; name a local directory. Received: --out={options.out}")
    if options.seed < 0:
        problems.append(f"--seed must be at least 0. Received: {options.seed}")
    if problems:
        raise ConfigError("\n  ".join(["this cannot be tuned:", *problems]))


def _tune(job: Job, study: Study, options: argparse.Namespace) -> None:
    from scripts.tuning import picture, report
    from scripts.tuning.history import History
    from scripts.tuning.trial import TrialProcess
    from scripts.tuning.tuner import Tuner

    out = pathlib.Path(options.out)
    if "model_dir" in job.values:
        _say(f"trials go to {out}/trial-N, not to model_dir={job.values['model_dir']}")

    def values_of(number: int, trial: Mapping[str, Any]) -> dict[str, Any]:
        return config_lib.overlaid(job.values, trial) | {"model_dir": str(out / f"trial-{number}")}

    def start(number: int, trial: Mapping[str, Any]) -> TrialProcess:
        command = dataclasses.replace(job, values=values_of(number, trial)).command(sys.executable)
        return TrialProcess(command, out / f"trial-{number}", out / f"trial-{number}.log")

    with _alone(out):
        definition = _definition(job, study, options)
        history = History(out, study, definition, seed=options.seed, early_stopping=options.early_stopping)
        Tuner(study, history, start, _say).run()
        trials, best = history.trials, history.best
        _say("\n" + report.table(study, trials))
        (out / "tune.json").write_text(report.to_json(study, trials, best), encoding="utf-8")
        (out / "tune.svg").write_text(picture.svg(study, trials, best), encoding="utf-8")
        if best is None:
            raise ConfigError("no trial has come to its end, so none is the best")
        (out / "best.json").write_text(report.best_config(values_of(best.number, best.params)), encoding="utf-8")
        _say(f"Train with the best: python -m trainer.main --config={out}/best.json --model_dir=...")


def _definition(job: Job, study: Study, options: argparse.Namespace) -> dict[str, Any]:
    """All that the values of trials depend on; there may be more trials later, or more at a time."""
    numbers = [name for name, field in config_lib.FIELDS.items() if field.metadata["changes_numbers"]]
    asked = {f"study.{name}": getattr(study, name) for name in ("metric", "goal", "algorithm")}
    varied = {f"parameters.{p.name}": dataclasses.asdict(p) for p in study.parameters}
    ours = {f"--{name}": getattr(options, name) for name in ("seed", "early_stopping")}
    return {**asked, **varied, **ours, **{name: getattr(job.config, name) for name in numbers}}


@contextlib.contextmanager
def _alone(out: pathlib.Path) -> Iterator[None]:
    """Holds the directory: two tuners would run the same trials."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "tune.lock").open("w")
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RetryError(f"another tuner is at work in {out}; this one leaves") from error
        yield


def _say(message: str) -> None:
    print(message, flush=True)
