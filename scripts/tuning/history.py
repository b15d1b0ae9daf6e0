"""What has been tried and what to try next: Optuna's study, kept in a journal that outlives the tuner."""

import itertools
import json
import pathlib
import random
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from scripts.launchers.study import Parameter, Study
from trainer.errors import ConfigError

JOURNAL = "journal.jsonl"
_DEFINITION = "definition"
_REASON = "reason"
_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING)


class History:
    """All trials of a study.

    Args:
        directory: of the journal; nobody else may write there meanwhile.
        study: what is to be found out.
        definition: all that values depend on; a journal of another one is refused.
        seed: with it, the number of a trial and the trials that have ended by then, a suggestion is always the same.
        early_stopping: whether trials below the median are to be ended.

    Raises:
        ConfigError: the journal is of another definition.
    """

    def __init__(
        self, directory: pathlib.Path, study: Study, definition: Mapping[str, Any], *, seed: int, early_stopping: bool
    ):
        self._asked, self._seed = study, seed
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = directory / JOURNAL
        _mend(path)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
        self._study = optuna.create_study(
            study_name="tune",
            storage=storage,
            direction="maximize" if study.goal == "max" else "minimize",
            pruner=optuna.pruners.MedianPruner() if early_stopping else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        stored = self._study.user_attrs
        if _DEFINITION in stored:
            _refuse_changes(directory, stored[_DEFINITION], json.loads(json.dumps(definition)))
        else:
            self._study.set_user_attr(_DEFINITION, definition)
        combinations = itertools.product(*(_all_of(parameter) for parameter in study.parameters))
        names = [parameter.name for parameter in study.parameters]
        grid = [dict(zip(names, values, strict=True)) for values in combinations] if study.algorithm == "grid" else None
        self._grid = grid
        self.num_trials = min(study.trials, len(grid)) if grid else study.trials

    @property
    def trials(self) -> list[FrozenTrial]:
        """All that were begun, by number."""
        return self._study.get_trials(deepcopy=False, states=_COUNTED)

    @property
    def best(self) -> FrozenTrial | None:
        """The completed trial with the best value, of equal ones the first."""
        sign = -1 if self._asked.goal == "max" else 1
        ended = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        return min(ended, key=lambda trial: sign * _value(trial), default=None)

    def interrupted(self) -> list[Trial]:
        """Trials that were running when an earlier tuner ended, with what they try."""
        running = [trial for trial in self.trials if trial.state == TrialState.RUNNING]
        return [self._with_values(Trial(self._study, trial._trial_id)) for trial in running]

    def ask(self) -> Trial | None:
        """The next trial, with what it tries; None where there are enough."""
        number = len(self.trials)
        if number >= self.num_trials:
            return None
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        if self._grid and not waiting:
            self._study.enqueue_trial(self._grid[number])
        self._study.sampler = self._sampler(number)
        return self._with_values(self._study.ask())

    def report(self, trial: Trial, values: Mapping[int, float]) -> bool:
        """Takes the evaluations of a trial so far, by step; says whether the trial should be ended for them."""
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step in sorted(values.keys() - known.keys()):
            trial.report(values[step], step)
            if trial.should_prune():
                return True
        return False

    def complete(self, trial: Trial, value: float) -> None:
        """Ends a trial with its value."""
        self._study.tell(trial, value)

    def prune(self, trial: Trial) -> None:
        """Ends a trial that is not worth going on with."""
        self._study.tell(trial, state=TrialState.PRUNED)

    def fail(self, trial: Trial, reason: str) -> None:
        """Ends a trial that has no value."""
        trial.set_user_attr(_REASON, reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def _with_values(self, trial: Trial) -> Trial:
        for parameter in self._asked.parameters:
            _suggest(trial, parameter)
        return trial

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Anew for each trial: the state of a generator would be lost with the process."""
        seed = random.Random(f"{self._seed}/{number}").getrandbits(32)
        if self._asked.algorithm == "bayesian":
            return optuna.samplers.TPESampler(seed=seed)
        return optuna.samplers.RandomSampler(seed=seed)


def reason(trial: FrozenTrial) -> str:
    """Why a trial has failed; empty where it has not."""
    return str(trial.user_attrs[_REASON]) if _REASON in trial.user_attrs else ""


def _suggest(trial: Trial, parameter: Parameter) -> None:
    name, log = parameter.name, parameter.scale == "log"
    if parameter.min is None or parameter.max is None:
        trial.suggest_categorical(name, parameter.values)
    elif parameter.type == "integer":
        trial.suggest_int(name, int(parameter.min), int(parameter.max), log=log)
    else:
        trial.suggest_float(name, parameter.min, parameter.max, log=log)


def _all_of(parameter: Parameter) -> tuple[Any, ...]:
    if parameter.min is None or parameter.max is None:
        return parameter.values
    return tuple(range(int(parameter.min), int(parameter.max) + 1))


def _value(trial: FrozenTrial) -> float:
    return float("nan") if trial.value is None else trial.value


def _mend(path: pathlib.Path) -> None:
    """Takes away what a killed tuner left half done: its lock on the journal, and a line without an end."""
    pathlib.Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with path.open("rb+") as file:
                file.truncate(len(whole))


def _refuse_changes(directory: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    absent = object()
    pairs = [(n, old[n] if n in old else absent, new[n] if n in new else absent) for n in {**old, **new}]
    shown = [
        f"{name}: {'nothing' if before is absent else repr(before)} -> {'nothing' if after is absent else repr(after)}"
        for name, before, after in pairs
        if before != after
    ]
    if shown:
        told = f"the trials of {directory} are of another study; name another --out, or go back to what it was:"
        raise ConfigError("\n  ".join([told, *shown]))
