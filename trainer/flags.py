"""The command line: absl flags generated from the fields of `Config`. The only reader of flags."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from trainer import config as config_lib
from trainer.errors import ConfigError, UsageError

_HELP_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What the command line asks for: values of options, a config file, or just a text to print."""

    values: dict[str, Any]
    config_file: str | None
    print_config: bool
    help: bool


def parse(argv: Sequence[str]) -> CommandLine:
    """Reads `argv` (program name first).

    Raises:
        UsageError: one error with every unknown flag, positional argument and value that does not parse.
    """
    flag_values = _define()
    problems: list[str] = []
    arguments = [a for a in argv[1:] if not _is_unknown(a, flag_values, problems)]
    try:
        positional = flag_values([argv[0], *arguments])[1:]
    except flags.Error as error:
        raise UsageError("\n  ".join(["the command line cannot be read:", *problems, str(error)])) from error
    problems += [_about_positional(p) for p in positional]
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
    command = CommandLine(
        values,
        config_file=flag_values["config"].value,
        print_config=bool(flag_values["print_config"].value),
        help=bool(flag_values["help"].value),
    )
    if problems:
        # What else is wrong, so that a second try need not find it.
        problems += config_lib.inspect(*_layers(command))[1]
        raise UsageError("\n  ".join(["the command line cannot be used:", *problems]))
    return command


def resolve(command: CommandLine) -> config_lib.Config:
    """The run's config: defaults, below the file, below the flags.

    `eval` and `export` of an existing run start from that run's own options, so that they need not be told again.

    Raises:
        ConfigError: one error with every problem of the merged config.
    """
    return config_lib.merge(*_layers(command))


def _layers(command: CommandLine) -> list[dict[str, Any]]:
    """Values by rising precedence: the run's own, the file's, the command line's."""
    file = config_lib.load(command.config_file) if command.config_file else {}
    return [_options_of_run({**file, **command.values}), file, command.values]


def _options_of_run(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("mode") not in ("eval", "export") or not isinstance(given.get("model_dir"), str):
        return {}
    try:
        stored = config_lib.load(f"{given['model_dir']}/config.json")
    except ConfigError:
        return {}
    keep = {n for n, f in config_lib.FIELDS.items() if f.metadata["changes_numbers"]}
    keep |= {"data_dir", "max_corrupt_records"}  # where the data is, and the budget without which skipping is refused
    # train_steps against train_epochs is a choice: the one given now replaces the one of the run.
    if given.keys() & {"train_steps", "train_epochs"}:
        keep -= {"train_steps", "train_epochs"}
    return {name: value for name, value in stored.items() if name in keep}


def help_text() -> str:
    """Every option by group, with type, default and unit."""
    lines = [
        "python -m trainer.main --dataset=NAME --model=NAME --model_dir=DIR [--tpu] [options]",
        "Trains a Keras model on TFRecords; the same run on a TPU slice, on GPUs, on several workers and on CPUs.",
        "",
        "  --config=FILE      options from a .toml or .json file; flags win over it",
        "  --print_config     print the merged config as JSON and stop",
        "  --help             print this and stop",
    ]
    group = None
    for name, field in config_lib.FIELDS.items():
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            lines += ["", f"{group}:"]
        default = "" if field.default in (None, "", dataclasses.MISSING) else f" [default: {field.default}]"
        kind = "|".join(field.metadata["choices"]) or config_lib.type_name(name)
        lines.append(f"  --{name}=<{kind}>{default}")
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
