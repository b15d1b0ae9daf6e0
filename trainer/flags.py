"""The command line: absl flags generated from the fields of `Config`. The only reader of flags."""

import dataclasses
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from absl import flags

from trainer import config as config_lib
from trainer import platforms
from trainer.errors import ConfigError, UsageError
from trainer.options.field import default
from trainer.platforms import Layer
from trainer.rules import STOPS

_HELP_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What the command line asks for: values of options, a config file, or just a text to print.

    entries: `model_options.NAME` and the like -> value, which are set over what a file or `--model_options` gives.
    """

    values: dict[str, Any]
    entries: dict[str, Any]
    config_file: str | None
    print_config: bool
    help: bool


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str] = MappingProxyType({}),
    read: Callable[[str], str] = config_lib.read_local,
) -> CommandLine:
    """Reads `argv` (program name first).

    Args:
        argv: the words.
        environ, read: as for `layers`; only to tell, of a command line that cannot be used, what else is wrong.

    Raises:
        UsageError: one error with every unknown flag, positional argument and value that does not parse.
    """
    flag_values = _define()
    problems: list[str] = []
    given, entries = _entries(argv[1:], problems)
    arguments = [a for a in given if not _is_unknown(a, flag_values, problems)]
    try:
        positional = flag_values([argv[0], *arguments])[1:]
    except flags.Error as error:
        raise UsageError("\n  ".join(["the command line cannot be read:", *problems, str(error)])) from error
    problems += [_about_positional(p) for p in positional]
    command = CommandLine(
        _values(flag_values, problems),
        entries,
        config_file=flag_values["config"].value,
        print_config=bool(flag_values["print_config"].value),
        help=bool(flag_values["help"].value),
    )
    if problems:
        # What else is wrong, so that a second try need not find it.
        problems += config_lib.inspect(*(layer.values for layer in layers(command, environ, read)))[1]
        raise UsageError("\n  ".join(["the command line cannot be used:", *problems]))
    return command


def _values(flag_values: flags.FlagValues, problems: list[str]) -> dict[str, Any]:
    """Values of the options that are given."""
    values = {}
    for name, field in config_lib.FIELDS.items():
        text = flag_values[name].value
        if text is None:
            continue
        if name == "tpu":
            text = {"true": config_lib.TPU_OF_THIS_ENVIRONMENT, "false": "none"}.get(text, text)
        try:
            values[name] = config_lib.parse(name, str(text))
        except ValueError as error:
            problems.append(f"--{error}")
            continue
        choices = field.metadata["choices"]
        if choices and values[name] not in choices:
            near = config_lib.nearest(str(text), choices)
            problems.append(f"--{name} must be one of {', '.join(choices)}. Received: {text!r}{near}")
    return values


def _entries(arguments: Sequence[str], problems: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The other arguments, and values of `--model_options.NAME=VALUE` and the like: as TOML, or the text itself."""
    others, values = [], {}
    for argument in arguments:
        name, equals, text = argument.lstrip("-").partition("=")
        table, key = config_lib.split(name)
        if not argument.startswith("-") or table == name:
            others.append(argument)
            continue
        if not equals or not key.isidentifier():
            problems.append(f"one entry of {table} is written --{table}.NAME=VALUE. Received: {argument!r}")
            continue
        try:
            values[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name] = text
    return others, values


def layers(
    command: CommandLine,
    environ: Mapping[str, str],
    read: Callable[[str], str] = config_lib.read_local,
) -> list[Layer]:
    """Who says what, by rising precedence: the run's own options, the environment, the config file, the command line.

    `eval` and `export` of an existing run start from that run's own options, so that they need not be told again.

    Args:
        command: the command line.
        environ: environment variables.
        read: the text of a config file.

    Raises:
        ConfigError: the config file cannot be read, or a variable cannot be understood.
    """
    file = config_lib.load(command.config_file, read) if command.config_file else {}
    below = {**file, **command.values}
    surroundings = platforms.layers(below, environ)
    filled = {name: value for layer in surroundings for name, value in layer.values.items()}
    own = _options_of_run({**filled, **below}, read)
    merged = config_lib.overlaid({**own.values, **below}, command.entries)
    tables = {table: merged[table] for table, _ in map(config_lib.split, command.entries)}
    flags_values = {**command.values, **tables}
    found = [own, *surroundings, Layer(command.config_file or "", file), Layer("flags", flags_values)]
    if platforms.on_vertex(environ):
        found = [Layer(layer.source, platforms.without_mount(layer.values)) for layer in found]
    return [layer for layer in found if layer.values]


def merge(found: Sequence[Layer]) -> config_lib.Config:
    """The run's config.

    Raises:
        ConfigError: one error with every problem of it.
    """
    return config_lib.merge(*(layer.values for layer in found))


def origins(found: Sequence[Layer]) -> dict[str, dict[str, str]]:
    """Who said something -> option -> value, as text; of options that are not as by default, and without secrets."""
    config = merge(found)
    said: dict[str, dict[str, str]] = {layer.source: {} for layer in found}
    last = {name: layer.source for layer in found for name in layer.values}
    for name, field in config_lib.FIELDS.items():
        value = getattr(config, name)
        if name in last and value != default(field):
            said[last[name]][name] = "..." if field.metadata["secret"] else config_lib.to_flag(value)
    return {source: values for source, values in said.items() if values}


def _options_of_run(given: Mapping[str, Any], read: Callable[[str], str]) -> Layer:
    if given.get("mode") not in ("eval", "export") or not isinstance(given.get("model_dir"), str):
        return Layer("", {})
    path = f"{given['model_dir'].rstrip('/')}/config.json"
    try:
        stored = config_lib.load(path, read)
    except ConfigError:
        return Layer("", {})
    values = config_lib.of_run(stored)
    # Which of these says when to stop is a choice: the one given now replaces the one of the run.
    if given.keys() & set(STOPS):
        values = {name: value for name, value in values.items() if name not in STOPS}
    return Layer(path, values)


def help_text() -> str:
    """Every option by group, with type, default and unit."""
    lines = [
        "python -m trainer.main --dataset=NAME --model=NAME --model_dir=DIR [--tpu] [options]",
        "Trains a Keras model on TFRecords; the same run on a TPU slice, on GPUs, on several workers and on CPUs.",
        "",
        "  --config=FILE      options from a .toml or .json file, on gs:// too; flags win over it",
        "  --print_config     print the merged config as JSON and stop",
        "  --help             print this and stop",
    ]
    group = None
    for name, field in config_lib.FIELDS.items():
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            lines += ["", f"{group}:"]
        said = "" if field.default in (None, "", dataclasses.MISSING) else f" [default: {field.default}]"
        kind = "|".join(field.metadata["choices"]) or config_lib.type_name(name)
        lines.append(f"  --{name}=<{kind}>{said}")
        lines += textwrap.wrap(field.metadata["help"], _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _define() -> flags.FlagValues:
    """Flags of their own set: absl's global one holds flags of every imported library."""
    flag_values = flags.FlagValues()
    flag_values.set_gnu_getopt(True)
    for name, field in config_lib.FIELDS.items():
        help = field.metadata["help"]
        if name == "tpu":
            # Flags that absl takes for boolean may stand alone; alone it reads "true", and --notpu "false".
            flag: flags.Flag = flags.Flag(
                flags.ArgumentParser(), flags.ArgumentSerializer(), name, None, help, boolean=True
            )
            flags.DEFINE_flag(flag, flag_values=flag_values)
        elif config_lib.type_name(name) == "true or false":
            flags.DEFINE_bool(name, None, help, flag_values=flag_values)
        else:
            flags.DEFINE_string(name, None, help, flag_values=flag_values)
    flags.DEFINE_string("config", None, "config file", flag_values=flag_values)
    flags.DEFINE_bool("print_config", False, "print the config and stop", flag_values=flag_values)
    flags.DEFINE_bool("help", False, "print the options and stop", flag_values=flag_values)
    return flag_values


def _is_unknown(argument: str, flag_values: flags.FlagValues, problems: list[str]) -> bool:
    """Notes an unknown flag; absl would stop at the first."""
    if not argument.startswith("-") or argument in ("-", "--"):
        return False
    name = argument.lstrip("-").split("=", 1)[0]
    if name in flag_values or (name.startswith("no") and name[2:] in flag_values and flag_values[name[2:]].boolean):
        return False
    problems.append(f"unknown flag --{name}{config_lib.nearest(name, list(flag_values))}")
    return True


def _about_positional(argument: str) -> str:
    hint = "every option is written --name=value"
    if argument == "local" or argument.startswith("grpc://"):
        hint = f"write --tpu={argument} with an equals sign: a bare --tpu means the TPU of this environment"
    return f"no positional argument is taken; {hint}. Received: {argument!r}"
