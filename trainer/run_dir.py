"""The directory of a run: the names of its files, `config.json`, `provenance.json`. Local or gs://, by tf.io.gfile."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer import config as config_lib
from trainer import storage
from trainer.errors import ConfigError, RetryError

CONFIG = "config.json"
PROVENANCE = "provenance.json"
METRICS = "metrics.jsonl"
RECEIPT = "receipt.json"
EXAMPLES = "examples.json"
ALERTS = "alerts.jsonl"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
EXPORT = "export"
PROMOTION = "promotion.json"
REPAIRED = "repaired"
TENSORBOARD = "tensorboard"
EVALUATOR = "evaluator"  # the directory of a process that evaluates what others train
EVALUATIONS = f"{EVALUATOR}/metrics.jsonl"
POSTMORTEM = "postmortem"  # -STEP.json
INPUT_PROFILE = "profile_input.json"
INPUT_PICTURE = "profile_input.svg"
SWEEP = "sweep_lr.json"
SWEEP_PICTURE = "sweep_lr.svg"
PREFLIGHT = "preflight.json"
PARITY = "parity.json"
_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "keras", "tensorflow-datasets", "numpy", "libtpu")


class RunDir:
    """Files of one run. Only `start` and what follows it write anything.

    Args:
        path: of the run, local or gs://.
        export_dir, tensorboard_dir: where these go instead.
    """

    def __init__(self, path: str, *, export_dir: str | None = None, tensorboard_dir: str | None = None):
        self.path = path.rstrip("/")
        self.export_dir = export_dir.rstrip("/") if export_dir else self.file(EXPORT)
        self.tensorboard_dir = tensorboard_dir.rstrip("/") if tensorboard_dir else self.file(TENSORBOARD)

    def file(self, name: str) -> str:
        """Path of a file or directory of the run."""
        return f"{self.path}/{name}"

    def check_resumable(self, config: config_lib.Config, data: str) -> None:
        """Refuses a run whose numbers would not be those of the run begun here.

        Args:
            config: of the run that wants to go on.
            data: what decides which record stands where, as `provenance` has it.

        Raises:
            ConfigError: options that change the numbers, or the data, differ; lists them as `name: old -> new`.
        """
        if config.allow_config_change or not tf.io.gfile.exists(self.file(CONFIG)):
            return
        changed = config_lib.differences(json.loads(self._read(CONFIG)), config)
        trained_on = self.starts()[-1]["data"] if self.starts() else data
        if trained_on != data:
            changed.append(f"data: {trained_on} -> {data}")
        if changed:
            reason = (
                f"{self.path} holds a run with other options or data. Use another model_dir, what it was begun with, "
                "or --allow_config_change:"
            )
            raise ConfigError("\n  ".join([reason, *changed]))

    def check_writable(self) -> None:
        """Finds out, without leaving anything behind, that the directory can be made and written.

        Raises:
            ConfigError: with the path and the file system's reason.
            RetryError: the same, where that may pass.
        """
        probe = self.file(f".write-probe-{os.getpid()}")
        missing = self._first_missing()
        try:
            storage.make_directories(self.path)
            self._write(os.path.basename(probe), "")
            tf.io.gfile.remove(probe)
            if missing:
                storage.remove_empty(self.path, missing)  # another run may have begun there by now
        except (tf.errors.OpError, OSError) as error:
            received = f"Received: {self.path!r}: {storage.reason(error)}"
            if storage.fault(error) in (storage.Fault.SPACE, storage.Fault.TRANSIENT):
                raise RetryError(
                    f"model_dir cannot be written now. Run again once storage has room and answers. {received}"
                ) from error
            why = storage.remedy(error)
            raise ConfigError(f"model_dir cannot be written{f': {why}' if why else ''}. {received}") from error

    def _first_missing(self) -> str | None:
        """The outermost directory that has to be made."""
        missing, path = None, self.path
        while path and storage.is_local(path) and not os.path.exists(path):
            missing, path = path, os.path.dirname(path)
        return missing

    def start(self, config: config_lib.Config, provenance: Mapping[str, Any]) -> None:
        """Writes the config and adds this start to the provenance."""
        storage.make_directories(self.path)
        self.replace(CONFIG, config_lib.to_json(config))
        starts = [*self.starts(), dict(provenance)]
        self.replace(PROVENANCE, json.dumps({"starts": starts}, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run whole or not at all, and nothing else; makes the directory if need be."""
        storage.make_directories(self.path)
        self.replace(name, text)

    def replace(self, name: str, text: str) -> None:
        """Writes a file of the run whole or not at all, into the directory as it is.

        Raises:
            OSError, tf.errors.OpError: the file system's; also where the directory was removed under the run, which
                must not come back with one file in it as if nothing had happened.
        """
        if "://" in self.path:  # an object becomes visible whole, and a rename is a copy and a removal
            self._write(name, text)
            return
        self._write(f"{name}.part", text)
        tf.io.gfile.rename(self.file(f"{name}.part"), self.file(name), overwrite=True)

    def read(self, name: str) -> str | None:
        """The text of a file of the run; None where there is none."""
        return self._read(name) if self._has(name) else None

    def starts(self) -> list[dict[str, Any]]:
        """The provenance of every start so far, as `provenance` made it."""
        return json.loads(self._read(PROVENANCE))["starts"] if self._has(PROVENANCE) else []

    def _has(self, name: str) -> bool:
        return tf.io.gfile.exists(self.file(name))

    def _read(self, name: str) -> str:
        with tf.io.gfile.GFile(self.file(name)) as file:
            return file.read()

    def _write(self, name: str, text: str) -> None:
        with tf.io.gfile.GFile(self.file(name), "w") as file:
            file.write(text)


def provenance(
    argv: Sequence[str],
    *,
    devices: str,
    data: str,
    step: int,
    origins: Mapping[str, Mapping[str, str]],
    platform_ids: Mapping[str, str],
    secrets: Collection[str],
    redact: Callable[[str], str],
) -> dict[str, Any]:
    """What produced this start of a run: command, code, packages, machine, devices, data.

    Args:
        argv: the command line.
        devices: what the run is on.
        data: what decides which record stands where.
        step: that the run goes on from.
        origins: a variable, a file or flags -> what it said of the options.
        platform_ids: the names that the platform has for the run.
        secrets: names of the options whose values are kept out of it.
        redact: takes secrets out of all other words of the command line.
    """
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": [redact(word) for word in _without_values(argv, secrets)],
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "host": platform.node(),
        "devices": devices,
        "data": data,
        "options": {source: dict(values) for source, values in origins.items()},
        "platform": dict(platform_ids),
    }


def _without_values(argv: Sequence[str], options: Collection[str]) -> list[str]:
    """`argv` with `...` for the values of `options`, written as --name=value or --name value, with one dash or two."""
    words, hide_next = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and name.lstrip("-") in options
        words.append("..." if hide_next else f"{name}=..." if secret and equals else word)
        hide_next = secret and not equals and not hide_next
    return words


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git for the code's own checkout, None where there is no git or no checkout."""
    code = os.path.dirname(os.path.abspath(__file__))
    try:
        done = subprocess.run(["git", "-C", code, *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
