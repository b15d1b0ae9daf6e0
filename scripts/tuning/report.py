"""What a study has found: a table, `tune.json`, `tune.svg`, and the best trial's options as a config file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from scripts.launchers.study import Study
from scripts.tuning.history import reason


def table(study: Study, trials: Sequence[FrozenTrial]) -> str:
    """All trials, the best first; those without a value last."""
    names = [parameter.name for parameter in study.parameters]
    rows = [["trial", "", study.metric, *names]]
    for trial in _ranked(study, trials):
        value = f"{trial.value:.6g}" if trial.state == TrialState.COMPLETE else "-"
        rows.append([str(trial.number), _state(trial), value, *(_text(trial.params[name]) for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def to_json(study: Study, trials: Sequence[FrozenTrial], best: FrozenTrial | None) -> str:
    """Every trial with its state, parameters, evaluations by step, and value."""
    records = [
        {
            "trial": trial.number,
            "state": _state(trial),
            study.metric: trial.value if trial.state == TrialState.COMPLETE else None,
            "parameters": trial.params,
            "evaluations": {str(step): value for step, value in sorted(trial.intermediate_values.items())},
            **({"reason": reason(trial)} if reason(trial) else {}),
        }
        for trial in trials
    ]
    head = {"metric": study.metric, "goal": study.goal, "best": None if best is None else best.number}
    return json.dumps({**head, "trials": records}, indent=2) + "\n"


def best_config(values: Mapping[str, Any]) -> str:
    """A config file for the trainer: all options of a trial but where it stood."""
    return json.dumps({name: value for name, value in values.items() if name != "model_dir"}, indent=2) + "\n"


def _ranked(study: Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    sign = -1 if study.goal == "max" else 1
    return sorted(trials, key=lambda t: (t.state != TrialState.COMPLETE, sign * (t.value or 0.0), t.number))


def _state(trial: FrozenTrial) -> str:
    return {TrialState.COMPLETE: "complete", TrialState.PRUNED: "ended early", TrialState.FAIL: "failed"}[trial.state]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
