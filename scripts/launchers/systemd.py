"""A job as systemd's user units: a service that runs while the training does, and a timer that starts it."""

import math
import pathlib
import re
from collections.abc import Sequence

from scripts.launchers.schedule import Schedule
from trainer.errors import EXIT_RETRY, ConfigError

# What systemd needs to end a process after the trainer has used all of its grace_secs.
_MARGIN_SECS = 10
_PLAIN = re.compile(r"[\w@:=,./+-]+", re.ASCII)


def service(
    name: str,
    command: Sequence[str],
    *,
    workdir: pathlib.Path,
    env_file: pathlib.Path | None,
    log: pathlib.Path | None,
    grace_secs: float,
) -> str:
    """Text of NAME.service.

    Args:
        name: of the job.
        command: words of the supervised command, its program by absolute path.
        workdir: where it runs.
        env_file: environment variables, NAME=VALUE a line.
        log: file that its output is appended to; the journal where there is none.
        grace_secs: what the trainer needs from SIGTERM to its end.
    """
    output = f"append:{_path(log)}" if log else "journal"
    lines = [
        f"# {name}.timer starts it. By hand: systemctl --user start {name}",
        "[Unit]",
        f"Description=Training job {name}",
        "",
        "[Service]",
        "# The unit is active while the training runs, and a tick of the timer in this time starts no second one.",
        "Type=exec",
        f"WorkingDirectory={_path(workdir)}",
        *([f"EnvironmentFile={_path(env_file)}"] if env_file else []),
        f"ExecStart={' '.join(map(_word, command))}",
        "# supervise has tried again whatever a retry can mend, so its end is the end; the next tick resumes the run.",
        "Restart=no",
        f"# It ends with {EXIT_RETRY} only where it was told to stop: that is no failure.",
        f"SuccessExitStatus={EXIT_RETRY}",
        f"# SIGTERM goes to supervise alone, which hands it on. The trainer saves within {grace_secs:g} s.",
        "KillMode=mixed",
        f"TimeoutStopSec={math.ceil(grace_secs) + _MARGIN_SECS}",
        f"StandardOutput={output}",
        "StandardError=inherit",
    ]
    return "\n".join(lines) + "\n"


def timer(name: str, schedule: Schedule, random_delay_secs: int) -> str:
    """Text of NAME.timer."""
    delay = "# Spreads the starts of many machines.\n" if random_delay_secs else ""
    delay += f"RandomizedDelaySec={random_delay_secs}\n" if random_delay_secs else ""
    due = "\n".join(f"OnCalendar={value}" for value in schedule.on_calendar())
    return (
        f"# Starts {name}.service at {schedule.text} of cron, local time. Next: systemctl --user list-timers\n"
        f"[Unit]\nDescription=Schedule of training job {name}\n\n"
        f"[Timer]\n{due}\n"
        f"# A tick that fell while the machine was off is made up for once it is on.\nPersistent=true\n{delay}"
        "\n[Install]\nWantedBy=timers.target\n"
    )


def _word(word: str) -> str:
    """A word of ExecStart=, so that systemd hands on its very characters: systemd.service(5), "Command lines"."""
    if _PLAIN.fullmatch(word):
        return word
    _refuse_line_breaks(word)
    for special in ("\\", '"'):
        word = word.replace(special, f"\\{special}")
    return '"' + word.replace("%", "%%").replace("$", "$$") + '"'


def _path(path: pathlib.Path) -> str:
    """A path of a setting that is one path: no quotes there, but specifiers."""
    _refuse_line_breaks(str(path))
    return str(path).replace("%", "%%")


def _refuse_line_breaks(text: str) -> None:
    if not text.isprintable():
        raise ConfigError(f"a systemd unit has no place for line breaks in a word. Received: {text!r}")
