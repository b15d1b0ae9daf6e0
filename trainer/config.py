"""What a run is: a checked, frozen `Config` of the options of `options.py`, from files, flags and JSON.

It is made in one place, `merge`, from layers of plain values (environment, file, flags), checked as a whole by
`rules.py`, and never changed afterwards. This module knows neither TensorFlow nor hardware; what depends on those is
`plan.py`.
"""

import dataclasses
import json
import math
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from trainer import rules
from trainer.errors import ConfigError
from trainer.options import FIELDS, TPU_OF_THIS_ENVIRONMENT, Config
from trainer.options.field import default
from trainer.rules import nearest, profile_range

__all__ = ["FIELDS", "TPU_OF_THIS_ENVIRONMENT", "Config", "nearest", "profile_range"]

_TYPES = typing.get_type_hints(Config)
_WHOLE = re.compile(r"-?[0-9]+\.0+")  # how Vertex AI writes a discrete parameter


TABLES = tuple(name for name, field in FIELDS.items() if isinstance(default(field), Mapping))


def merge(*layers: Mapping[str, Any]) -> Config:
    """A checked `Config` from layers of values, later ones winning.

    Raises:
        ConfigError: one error with every problem found.
    """
    config, problems = inspect(*layers)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot be used:", *problems]))
    return config


def inspect(*layers: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The merged `Config` and all that is wrong with it."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for layer in layers:
        for name, value in layer.items():
            if name not in FIELDS:
                problems.append(f"unknown option {name!r}{nearest(name, FIELDS)}")
                continue
            try:
                values[name] = _typed(name, value)
            except ValueError as error:
                problems.append(str(error))
    config = Config(**values)
    problems += rules.problems(config)
    return config, list(dict.fromkeys(problems))


def type_name(name: str) -> str:
    """The plain name of an option's type, for help."""
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        _base_type(name), "a table"
    )


def overlaid(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those `given` over them: options, or single entries of tables, as `model_options.units`."""
    merged = dict(values)
    for name, value in given.items():
        table, key = split(name)
        if not key:
            merged[name] = value
        elif table not in merged:
            merged[table] = {key: value}
        elif isinstance(merged[table], Mapping):  # what is not is told by `merge`
            merged[table] = {**merged[table], key: value}
    return merged


def split(name: str) -> tuple[str, str]:
    """(`model_options`, `units`) of `model_options.units`; of what is no entry of a table, the name and nothing."""
    table, _, key = name.partition(".")
    return (table, key) if table in TABLES else (name, "")


def _base_type(name: str) -> type:
    hint = _TYPES[name]
    options = [t for t in typing.get_args(hint) if t is not type(None)]
    return options[0] if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint


def parse(name: str, text: str) -> Any:
    """The value of option `name` that `text` of the command line means; `none` unsets an optional one.

    Raises:
        ValueError: naming the option, its type and the text.
    """
    base = _base_type(name)
    if text.lower() == "none" and type(None) in typing.get_args(_TYPES[name]):
        return None
    try:
        if base is int and _WHOLE.fullmatch(text):
            text = text.partition(".")[0]
        if base is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if base is Mapping:
            return tomllib.loads(f"table = {{ {text} }}")["table"]
        return _typed(name, base(text))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name} takes {type_name(name)}. Received: {text!r}") from error


def to_flag(value: Any) -> str:
    """The text that `parse` reads back to `value`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{_toml_key(key)}={_toml(entry)}" for key, entry in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + to_flag(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # numbers, texts and booleans are written the same in both


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _typed(name: str, value: Any) -> Any:
    base = _base_type(name)
    if value is None and (type(None) in typing.get_args(_TYPES[name])):
        return None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ValueError(f"{name} takes {type_name(name)}. Received: {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite. Received: {value!r}")
    return value


def read_local(path: str) -> str:
    """The text of a file of this machine."""
    return pathlib.Path(path).read_text(encoding="utf-8")


def load(path: str, read: Callable[[str], str] = read_local) -> dict[str, Any]:
    """Values of a TOML or JSON file.

    Args:
        path: of the file.
        read: its text; whoever calls it knows whether gs:// can be read.

    Raises:
        ConfigError: the file cannot be read or parsed, or is of another kind.
    """
    try:
        text = read(path)
        if path.endswith(".toml"):
            values = tomllib.loads(text)
        elif path.endswith(".json"):
            values = json.loads(text)
        else:
            raise ConfigError(f"a config file ends in .toml or .json. Received: {path!r}")
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror or error}. Received: {path!r}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config file {path!r} does not parse: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path!r} must hold a table of options. Received: {type(values).__name__}")
    return values


def to_json(config: Config) -> str:
    """All options as JSON that `load` and `merge` read back to an equal `Config`, but for what is secret."""
    values = dataclasses.asdict(config)
    values |= {name: None for name, field in FIELDS.items() if field.metadata["secret"]}
    return json.dumps(values, indent=2) + "\n"


def of_run(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's `config.json` that says what was trained: for whoever uses what came of it."""
    kept = {name for name, field in FIELDS.items() if field.metadata["changes_numbers"]}
    # What has no effect but in training would be refused.
    kept -= {name for name, field in FIELDS.items() if (modes := field.metadata["modes"]) and "eval" not in modes}
    kept |= {"data_dir", "max_corrupt_records"}  # where the data is, and the budget without which skipping is refused
    return {name: value for name, value in stored.items() if name in kept}


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Lines `name: old -> new` for the options that change the numbers of a run."""
    lines = []
    for name, field in FIELDS.items():
        before, after = old.get(name, field.default), getattr(new, name)
        if field.metadata["changes_numbers"] and name in old and before != after:
            lines.append(f"{name}: {before!r} -> {after!r}")
    return lines
