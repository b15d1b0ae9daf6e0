"""Models, one file each, found by file name; importing this package imports none of them.

A model module holds a frozen dataclass `Options`, `build(options, spec) -> keras.Model` and, if it brings its own loss,
metrics or optimizer, `compile_args(options, spec) -> dict` with any of the keys `loss`, `metrics`, `optimizer`.
A module of `rules.MODEL_FAMILIES` holds many models, `applications/<Name>`: `options_of(name)` tells the options of
each, and `build` takes the name too. `spec` is `data.spec.Spec`: shapes, dtypes and number of classes. A model takes
the raw inputs (uint8 images) and returns logits in float32.
"""

import dataclasses
import difflib
import functools
import importlib
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from data.spec import Spec
from trainer import diagnose, places
from trainer.errors import ConfigError, TrainerError
from trainer.rules import MODEL_FAMILIES

COMPILE_KEYS = ("loss", "metrics", "optimizer")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model with its options filled in, ready to be built as often as needed.

    build: makes a new `keras.Model` for a spec.
    compile_args: what the model brings of loss, metrics and optimizer for a spec.
    """

    name: str
    options: Any
    build: Callable[[Spec], Any]
    compile_args: Callable[[Spec], dict[str, Any]]


def find(name: str, options: Mapping[str, Any]) -> ModelSource:
    """The model called `name` (see `Config.model`) with these options.

    Raises:
        ConfigError: no such model, a module without `build`, or options it does not have.
    """
    module, member = _module(name)
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"the model module must define build(options, spec). Received: {name!r} without it")
    options_type = module.options_of(member) if member else getattr(module, "Options", None)
    filled = _fill(name, options_type, options)
    build: Callable = module.build
    compile_args: Callable = getattr(module, "compile_args", lambda options, spec: {})
    if member:
        build = functools.partial(build, name=member)
    return ModelSource(
        name,
        filled,
        lambda spec: _explained(name, build, filled, spec),
        lambda spec: _checked_compile_args(name, _explained(name, compile_args, filled, spec)),
    )


def _module(name: str) -> tuple[ModuleType, str | None]:
    """The module, and which member of a family `name` means."""
    family, _, member = name.partition("/")
    path = f"{__name__}.{name}"
    if member and family in MODEL_FAMILIES:
        path = f"{__name__}.{family}"
    elif "." in name:
        path = name
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(error.name + ".")):
            raise ConfigError(f"no module of this name can be imported for --model. Received: {name!r}") from error
        raise ConfigError(f"the model module {name!r} needs {error.name!r}, which is not installed") from error
    return module, member or None


def _fill(name: str, options_type: type | None, values: Mapping[str, Any]) -> Any:
    if options_type is None:
        if values:
            raise ConfigError(f"the model {name} has no options. Received: {', '.join(values)}")
        return None
    fields = {f.name: f for f in dataclasses.fields(options_type)}
    hints = typing.get_type_hints(options_type)
    problems, filled = [], {}
    for key, value in values.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has: {', '.join(fields)}"
            problems.append(f"unknown option {key!r}{hint}")
            continue
        value = tuple(value) if isinstance(value, list) else value
        hint = _without_none(hints[key])
        base = typing.get_origin(hint) or hint
        if base is float and type(value) is int:
            value = float(value)
        if isinstance(base, type) and base is not Any and type(value) is not base:
            problems.append(f"{key} must be of type {hint}. Received: {value!r}")
        filled[key] = value
    if not problems:
        try:
            return options_type(**filled)
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    raise ConfigError("\n  ".join([f"model_options of {name} cannot be used:", *problems]))


def _without_none(hint: Any) -> Any:
    """X of `X | None`: None is what a file or flag cannot say, only the default."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0] if isinstance(hint, types.UnionType) and len(members) == 1 else hint


def _explained(name: str, function: Callable, options: Any, spec: Spec) -> Any:
    """Calls code of a model; what it raises becomes one line that says where."""
    what = f"the model {name} cannot be built for {spec.described}, {spec.num_classes} classes"
    try:
        with diagnose.explained(what):
            return function(options, spec)
    except TrainerError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        place = places.of_error(error) or next((f"{frame.filename}:{frame.lineno}" for frame in frames), None)
        where = f" ({place})" if place else ""
        message, name_of_kind = diagnose.short(error), type(error).__name__
        kind = "" if isinstance(error, ValueError) or message == name_of_kind else f"{name_of_kind}: "
        raise ConfigError(f"{what}: {kind}{message}{where}") from error


def _checked_compile_args(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    unknown = [key for key in arguments if key not in COMPILE_KEYS]
    if unknown:
        raise ConfigError(f"compile_args of {name} may hold {', '.join(COMPILE_KEYS)}. Received: {', '.join(unknown)}")
    return arguments
