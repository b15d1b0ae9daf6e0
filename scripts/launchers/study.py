"""A study of hyperparameters: a TOML or JSON file, read and checked here for Vertex AI and for `scripts/tune` alike.

    [study]
    metric = "accuracy"     # of the evaluation, as metrics.jsonl names it behind eval/
    goal = "max"            # or "min"
    trials = 20             # at most
    parallel = 2            # of them at a time; default 1
    algorithm = "bayesian"  # the default; or "random", "grid"

    [parameters.learning_rate]  # any option of the trainer that changes the numbers of a run
    type = "double"             # or "integer"
    min = 1e-4
    max = 1e-1
    scale = "log"               # default "linear"

    [parameters.optimizer]
    type = "categorical"        # or "discrete": numbers
    values = ["sgd", "adamw"]

    [parameters."model_options.width"]  # one option of the model, or of optimizer_options
    type = "discrete"
    values = [32, 64]

A trial is a run with `--NAME=VALUE` of each parameter, over what the run's own config says.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from trainer import config as config_lib
from trainer.errors import ConfigError

ALGORITHMS = ("bayesian", "random", "grid")
GOALS = ("max", "min")
SCALES = ("linear", "log")
_RANGES, _LISTS = ("double", "integer"), ("categorical", "discrete")
# What TOML's values are called, bool not among the numbers.
_IS_A = {
    "text": lambda value: isinstance(value, str) and value != "",
    "whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "text, number or boolean": lambda value: isinstance(value, str | int | float),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What trials vary.

    name: an option of the trainer, or `model_options.NAME` and the like.
    type: double and integer go from `min` to `max`, both included; categorical and discrete take one of `values`.
    scale: linear or log, of a double or an integer.
    """

    name: str
    type: str
    min: float | None = None
    max: float | None = None
    scale: str = "linear"
    values: tuple[Any, ...] = ()

    @property
    def edges(self) -> tuple[Any, ...]:
        """All values of a list, both ends of a range: what is looked at to see whether the trainer takes it."""
        return self.values or (self.min, self.max)


@dataclasses.dataclass(frozen=True)
class Study:
    """What is to be found out, checked.

    metric, goal: which evaluation metric is to become `max` or `min`.
    trials: at most so many.
    parallel: of them at a time.
    algorithm: bayesian, random or grid (every combination; no double then).
    """

    metric: str
    goal: str
    trials: int
    parallel: int
    algorithm: str
    parameters: tuple[Parameter, ...]


def load(path: str, values: Mapping[str, Any]) -> Study:
    """The study in a file.

    Args:
        path: TOML or JSON.
        values: options of the run that the trials vary, such as `Job.values` with what the platform fills.

    Raises:
        ConfigError: one error with all that is wrong with it, options that the trainer would refuse among it.
    """
    content = config_lib.load(path)
    problems = [f"unknown table {name!r}" for name in content if name not in ("study", "parameters")]
    study = _table(content, "study", problems)
    parameters = _table(content, "parameters", problems)
    head = _head(study, problems)
    read = [_parameter(name, parameters[name], problems) for name in parameters]
    found = tuple(parameter for parameter in read if parameter is not None)
    if head["algorithm"] == "grid":
        problems += [
            f"[parameters.{p.name}] a grid has no place for type double; list what is to be tried as type discrete"
            for p in found
            if p.type == "double"
        ]
    if not problems:
        problems += _refused_by_trainer(found, values)
    if problems:
        raise ConfigError("\n  ".join([f"the study {path!r} cannot be used:", *problems]))
    return Study(**head, parameters=found)


def _table(content: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    table = content[name] if name in content else None
    if isinstance(table, Mapping) and table:
        return table
    problems.append(f"a table [{name}] is needed. Received: {table!r}")
    return {}


def _head(table: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The fields of `Study` but for its parameters."""
    kinds = {
        "metric": ("text", ()),
        "goal": ("text", GOALS),
        "trials": ("whole number", ()),
        "parallel": ("whole number", ()),
        "algorithm": ("text", ALGORITHMS),
    }
    given = {"parallel": 1, "algorithm": ALGORITHMS[0], **table}
    before = len(problems)
    head = _checked("[study]", given, kinds, problems)
    if len(problems) == before and not 1 <= head["parallel"] <= head["trials"]:
        problems.append(
            "[study] trials is at least 1, and parallel from 1 to trials. "
            f"Received: trials={head['trials']}, parallel={head['parallel']}"
        )
    return head


def _parameter(name: str, table: Any, problems: list[str]) -> Parameter | None:
    where, before = f"[parameters.{name}]", len(problems)
    kind = table["type"] if isinstance(table, Mapping) and "type" in table else None
    if kind not in (*_RANGES, *_LISTS):
        problems.append(f"{where} type must be one of {', '.join((*_RANGES, *_LISTS))}. Received: {kind!r}")
        return None
    problems += [f"{where} {text}" for text in _problems_of_name(name)]
    number = {"double": "number", "integer": "whole number"}
    if kind in _RANGES:
        kinds = {"type": ("text", ()), "scale": ("text", SCALES), "min": (number[kind], ()), "max": (number[kind], ())}
        read = _checked(where, {"scale": "linear", **table}, kinds, problems)
        if len(problems) == before and not read["min"] < read["max"]:
            problems.append(f"{where} min must be below max. Received: {read['min']} and {read['max']}")
        elif len(problems) == before and read["scale"] == "log" and read["min"] <= 0:
            problems.append(f"{where} min must be above 0 on a log scale. Received: {read['min']}")
        return Parameter(name, **read)
    entry = "number" if kind == "discrete" else "text, number or boolean"
    values = table["values"] if "values" in table else None
    if not isinstance(values, list) or not values or not all(map(_IS_A[entry], values)):
        problems.append(f"{where} values must be a list, each entry a {entry}. Received: {values!r}")
        values = []
    problems += [f"{where} unknown key {key!r} of type {kind}" for key in table if key not in ("type", "values")]
    if len(set(values)) != len(values):
        problems.append(f"{where} values names one twice. Received: {values!r}")
    return Parameter(name, kind, values=tuple(sorted(values) if kind == "discrete" else values))


def _problems_of_name(name: str) -> list[str]:
    table, key = config_lib.split(name)
    if table in config_lib.TABLES:
        return [] if key else [f"name one entry of the table, {table}.NAME"]
    if name not in config_lib.FIELDS:
        return [f"the trainer has no such option{config_lib.nearest(name, config_lib.FIELDS)}"]
    if not config_lib.FIELDS[name].metadata["changes_numbers"]:
        return ["no metric depends on this option, so there is nothing to find out about it"]
    return []


def _checked(
    where: str, table: Mapping[str, Any], kinds: Mapping[str, tuple[str, tuple[str, ...]]], problems: list[str]
) -> dict[str, Any]:
    """The keys that `kinds` names, with its kind of value and choices; whatever is not so is a problem, and None."""
    problems += [f"{where} unknown key {key!r}{config_lib.nearest(key, kinds)}" for key in table if key not in kinds]
    read = {}
    for key, (kind, choices) in kinds.items():
        value = table[key] if key in table else None
        if not _IS_A[kind](value) or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else f"a {kind}"
            problems.append(f"{where} {key} must be {wanted}. Received: {value!r}")
            value = None
        read[key] = value
    return read


def _refused_by_trainer(parameters: tuple[Parameter, ...], values: Mapping[str, Any]) -> list[str]:
    """What the trainer would say to trials at the edges, each once, with the parameters that brought it about."""
    found: dict[str, str] = {}
    for changed in _corners(parameters):
        trial = {parameter.name: parameter.edges[0] for parameter in parameters} | changed
        for problem in config_lib.inspect(config_lib.overlaid(values, trial))[1]:
            told = " and ".join(f"{name}={value!r}" for name, value in changed.items())
            found.setdefault(problem, f"a trial with {told} would be refused: {problem}")
    return list(found.values())


def _corners(parameters: tuple[Parameter, ...]) -> Iterator[dict[str, Any]]:
    """Edges of each parameter, then of each pair: there it shows that ftrl and a warm-up do not go together."""
    for count in (1, 2):
        for chosen in itertools.combinations(parameters, count):
            for edges in itertools.product(*(parameter.edges for parameter in chosen)):
                yield {parameter.name: edge for parameter, edge in zip(chosen, edges, strict=True)}
