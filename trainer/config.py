"""What a run is: a checked, frozen `Config` of the options of `options.py`, from files, flags and JSON.

It is made in one place, `merge`, from layers of plain values (file below flags), checked as a whole, and never changed
afterwards. This module knows neither TensorFlow nor hardware; what depends on those is `plan.py`.
"""

import dataclasses
import difflib
import json
import math
import pathlib
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError
from trainer.options import FIELDS, Config
from trainer.redact import check_alert_url

__all__ = ["FIELDS", "Config"]

TPU_OF_THIS_ENVIRONMENT = "auto"
BUILT_IN_MODELS = pathlib.Path(__file__).parent / "models"
_TYPES = typing.get_type_hints(Config)
# Options of one mode only.
_ONE_MODE = {
    "slice": "preflight",
    "preflight_probes": "preflight",
    "preflight_timeout_secs": "preflight",
    "preflight_python": "preflight",
    "parity_steps": "parity",
}


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
    problems += _problems_of_values(config) + _problems_of_combinations(config)
    return config, list(dict.fromkeys(problems))


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def profile_range(text: str) -> tuple[int, int]:
    """(A, B) of `profile_steps`.

    Raises:
        ValueError: anything but two steps, the second one later.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 2 and all(part.isascii() and part.isdecimal() for part in parts) and int(parts[0]) < int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise ValueError(f"profile_steps must be A,B with A below B, for steps A to B-1. Received: {text!r}")


def type_name(name: str) -> str:
    """The plain name of an option's type, for help."""
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        _base_type(name), "a table"
    )


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


def _problems_of_values(config: Config) -> list[str]:
    problems = []
    for name, field in FIELDS.items():
        value, limits = getattr(config, name), field.metadata
        if value is None:
            continue
        if limits["choices"] and value not in limits["choices"]:
            choices = ", ".join(limits["choices"])
            problems.append(f"{name} must be one of {choices}. Received: {value!r}{nearest(value, limits['choices'])}")
        if limits["minimum"] is not None and value < limits["minimum"]:
            problems.append(f"{name} must be at least {limits['minimum']}. Received: {value}")
        if limits["above"] is not None and value <= limits["above"]:
            problems.append(f"{name} must be above {limits['above']}. Received: {value}")
        if limits["below"] is not None and value >= limits["below"]:
            problems.append(f"{name} must be below {limits['below']}. Received: {value}")
    return problems


def _problems_of_combinations(config: Config) -> list[str]:
    problems = []
    for required in ("model_dir", "dataset"):
        if not getattr(config, required) and config.mode != "doctor":
            problems.append(f"{required} is missing; give --{required}=...")
    if config.train_steps is not None and config.train_epochs is not None:
        problems.append(
            "train_steps and train_epochs both say when to stop; give one. "
            f"Received: {config.train_steps} and {config.train_epochs}"
        )
    clips = [n for n in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(config, n) is not None]
    if len(clips) > 1:
        problems.append(f"one kind of clipping at a time. Received: {', '.join(clips)}")
    if config.optimizer != "sgd" and config.momentum != FIELDS["momentum"].default:
        problems.append(f"momentum has no effect on {config.optimizer}; leave it out or use --optimizer=sgd")
    if config.mode in ("eval", "export"):
        supplies = {"cache": config.cache != "none", "data_service": config.data_service is not None}
        problems += [
            f"{name} supplies training only; leave it out of {config.mode}" for name, on in supplies.items() if on
        ]
        if config.lint == "on":
            problems.append(f"lint looks at what is to be trained; leave it out of {config.mode}")
    problems += [
        f"{name} is for mode={mode}; leave it out of {config.mode}"
        for name, mode in _ONE_MODE.items()
        if config.mode != mode and getattr(config, name) != FIELDS[name].default
    ]
    if config.mode == "parity" and config.replicas == 1:
        problems.append("parity compares one replica with several; give replicas=2 or more. Received: 1")
    problems += _problems_of_checkpoints(config)
    if config.corrupt_records == "stop" and config.max_corrupt_records:
        problems.append("max_corrupt_records has no effect without corrupt_records=skip")
    if config.corrupt_records == "skip" and not config.max_corrupt_records:
        problems.append("corrupt_records=skip needs a budget; give --max_corrupt_records=N")
    if config.tpu is None:
        problems += [f"{n} has no effect without tpu" for n in ("tpu_zone", "tpu_project") if getattr(config, n)]
    elif config.replicas is not None:
        problems.append(f"a TPU slice has the replicas it has; leave out replicas. Received: {config.replicas}")
    for value, check in ((config.profile_steps, profile_range), (config.alert_url, check_alert_url)):
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            problems.append(str(error))
    if config.tpu == "":
        problems.append("tpu is empty; write --tpu alone for the TPU of this environment, or leave it out")
    if config.tpu is not None and config.xla != "auto":
        problems.append(f"xla is for CPU and GPU, a TPU always compiles; leave it out. Received: {config.xla}")
    return problems + _problems_of_reading(config) + _problem_of_model_name(config.model)


def _problems_of_checkpoints(config: Config) -> list[str]:
    problems = []
    if config.checkpoint != "newest" and config.mode not in ("eval", "export"):
        problems.append(f"checkpoint={config.checkpoint} is for eval and export; {config.mode} goes on from the newest")
    if config.init_fresh and config.init_from is None:
        problems.append("init_fresh has no effect without init_from")
    if not config.keep_best_checkpoints and config.best_metric != FIELDS["best_metric"].default:
        problems.append("best_metric has no effect with keep_best_checkpoints=0")
    if config.on_nonfinite == "stop" and config.max_nonfinite != FIELDS["max_nonfinite"].default:
        problems.append("max_nonfinite has no effect with on_nonfinite=stop")
    return problems


def _problems_of_reading(config: Config) -> list[str]:
    problems = []
    if config.cache == "disk" and not config.cache_dir:
        problems.append("cache=disk needs to know where; give --cache_dir=... on a fast disk")
    if config.cache != "disk" and config.cache_dir:
        problems.append(f"cache_dir has no effect with cache={config.cache}; leave it out or use --cache=disk")
    if config.cache != "none" and config.data_service is not None:
        problems.append(
            f"cache={config.cache} has no effect with data_service, whose machines read the shards themselves; "
            "give one of the two"
        )
    if config.mode == "profile_input" and config.data_service is not None:
        problems.append("profile_input measures the pipeline of this machine; leave out data_service")
    return problems


def _problem_of_model_name(model: str) -> list[str]:
    """A name that can be judged without importing Keras or the user's code; the rest is judged by trainer.models."""
    if "." in model or model.startswith("applications/"):
        return []
    known = built_in_models()
    if model in known:
        return []
    return [
        f"unknown model {model!r}{nearest(model, known)}. There are: {', '.join(known)}, "
        "applications/<Name> for a class of keras.applications, package.module for your own"
    ]


def built_in_models() -> list[str]:
    """Names of the model files, found without importing them."""
    return sorted(p.stem for p in BUILT_IN_MODELS.glob("*.py") if not p.stem.startswith(("_", "applications")))


def load(path: str) -> dict[str, Any]:
    """Values of a TOML or JSON file.

    Raises:
        ConfigError: the file cannot be read or parsed, or is of another kind.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            values = tomllib.loads(text)
        elif path.endswith(".json"):
            values = json.loads(text)
        else:
            raise ConfigError(f"a config file ends in .toml or .json. Received: {path!r}")
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}. Received: {path!r}") from error
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


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Lines `name: old -> new` for the options that change the numbers of a run."""
    lines = []
    for name, field in FIELDS.items():
        before, after = old.get(name, field.default), getattr(new, name)
        if field.metadata["changes_numbers"] and name in old and before != after:
            lines.append(f"{name}: {before!r} -> {after!r}")
    return lines
