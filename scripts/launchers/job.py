"""What is launched: one command of the trainer, checked here as the trainer itself will check it there."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainer import config as config_lib
from trainer import flags
from trainer.errors import ConfigError
from trainer.options import LAST_RUN

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be started elsewhere.

    name: of the job, in every platform's grammar: lower-case letters, digits, dashes.
    config: all options, checked.
    values: those that the config file or the command line gave; the rest are defaults.
    """

    name: str
    config: config_lib.Config
    values: Mapping[str, Any]

    def flags(self, **more: Any) -> list[str]:
        """Every given option, and `more`, as `--name=value`, so that nothing of the config file is needed there."""
        values = {**self.values, **more}
        return [f"--{name}={config_lib.to_flag(value)}" for name, value in values.items()]

    def command(self, python: str = "python", **more: Any) -> list[str]:
        """The words of the trainer's command line."""
        return [python, "-m", "trainer.main", *self.flags(**more)]

    def line(self, python: str = "python", **more: Any) -> str:
        """The same as a line for a shell."""
        return shlex.join(self.command(python, **more))


def load(name: str, config_file: str | None, trainer_flags: Sequence[str], *, given: Sequence[str] = ()) -> Job:
    """The job of a config file and flags of the trainer.

    Args:
        name: of the job.
        config_file: TOML or JSON, as the trainer's --config takes it.
        trainer_flags: `--option=value` of the trainer; they win over the file.
        given: options that the platform fills, such as `model_dir` on Vertex AI, which may be missing here.

    Raises:
        UsageError: a flag that the trainer does not know.
        ConfigError: whatever the trainer would refuse, in one error.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a job is named by lower-case letters, digits and dashes, at most 52 of them, a letter first. "
            f"Received: --name={name!r}"
        )
    command = flags.parse(["launch", *([f"--config={config_file}"] if config_file else []), *trainer_flags])
    file = config_lib.load(command.config_file) if command.config_file else {}
    values = config_lib.overlaid({**file, **command.values}, command.entries)
    filled = {option: f"<{option}>" for option in given if option not in values}
    config = config_lib.merge(filled, values)
    secret = [option for option, field in config_lib.FIELDS.items() if field.metadata["secret"] and option in values]
    if secret:
        raise ConfigError(
            f"{', '.join(secret)} would stand readable in what is launched. Leave it out, and set it there as the "
            "environment variable TRAINER_ALERT_URL"
        )
    return Job(name, config, values)


def local_paths(job: Job) -> dict[str, str]:
    """Option -> path that only this machine has: what a job elsewhere cannot read or keep."""
    options = ("model_dir", "data_dir", "export_dir", "tensorboard_dir", "init_from")
    paths = {name: getattr(job.config, name) for name in options}
    if paths["init_from"] == LAST_RUN:
        del paths["init_from"]
    if "/" in job.config.dataset:
        paths["dataset"] = job.config.dataset
    return {name: path for name, path in paths.items() if path and "://" not in path and not path.startswith("<")}
