"""`scripts/launch cron`: this machine, on a schedule, by a line of the crontab or by a systemd service and timer.

The job's own `--config` file stays where it is and is read at every start; flags given to the launcher go on the line.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from scripts.launchers import schedule, systemd
from scripts.launchers.actions import Actions, missing
from scripts.launchers.job import Job
from trainer import config as config_lib
from trainer.errors import ConfigError, RetryError

FILLED: tuple[str, ...] = ()

_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_CRONS_PATH = "/usr/bin:/bin"
# MAX_COMMAND in cron.h of Vixie's cron, which Debian and others have; the final NUL counts.
_LONGEST_COMMAND = 999
# NAME=VALUE that a shell and systemd's EnvironmentFile= read the same: plain characters, or all of it in single quotes.
_VARIABLE = re.compile(r"[A-Za-z_]\w*=([\w@%+=:,./-]*|'[^'\\]*')", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this platform."""
    group = parser.add_argument_group("cron")
    group.add_argument("--schedule", required=True, help="five fields of cron, such as '30 3 * * *', or @daily")
    group.add_argument("--systemd", action="store_true", help="user units of systemd in place of a line of the crontab")
    group.add_argument("--workdir", help="directory to start in [default: this one]")
    group.add_argument("--python", help="the Python with TensorFlow [default: .venv of the checkout, else this one]")
    group.add_argument("--log", help="file to append to [default: WORKDIR/logs/NAME.log; with --systemd the journal]")
    group.add_argument("--env_file", help="file of environment variables, NAME=VALUE a line")
    group.add_argument("--random_delay_secs", type=int, help="of --systemd: start up to so many seconds later")
    group.add_argument("--remove", action="store_true", help="take the job out again, with the same command")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where and how the job runs on this machine; absolute paths.

    command: words of the supervised trainer.
    log: None is the journal.
    lock: of the crontab's line; systemd needs none.
    """

    name: str
    due: schedule.Schedule
    command: tuple[str, ...]
    workdir: pathlib.Path
    log: pathlib.Path | None
    lock: pathlib.Path
    env_file: pathlib.Path | None


def launch(job: Job, options: argparse.Namespace, actions: Actions) -> None:
    """Puts the job on this machine's schedule, or takes it out."""
    place = _place(job, options)
    if options.remove:
        (_remove_units if options.systemd else _remove_line)(place, actions)
        return
    actions.note(f"{place.name}: due at {place.due.text}, local time. A run that is not over by then goes on, and that")
    actions.note("tick does nothing.")
    if "run_id" not in job.values:
        actions.note("Once model_dir holds a finished run, ticks do nothing; --run_id='{date}' makes each day a run.")
    if options.systemd:
        _add_units(place, job.config.grace_secs, options.random_delay_secs or 0, actions)
    else:
        _add_line(place, actions)


def _place(job: Job, options: argparse.Namespace) -> _Place:
    workdir = pathlib.Path(options.workdir or ".").absolute()
    venv = _CHECKOUT / ".venv" / "bin" / "python"
    python = pathlib.Path(options.python or (venv if venv.exists() else sys.executable)).absolute()
    env_file = pathlib.Path(options.env_file).absolute() if options.env_file else None
    log = pathlib.Path(options.log).absolute() if options.log else None
    if log is None and not options.systemd:
        log = workdir / "logs" / f"{job.name}.log"
    lock = (log.parent if log else workdir) / f"{job.name}.lock"
    due = _checked(options, workdir, python, env_file)
    command = [str(python), str(_CHECKOUT / "scripts" / "supervise"), "--", *_trainer(job, options, str(python))]
    return _Place(job.name, due, tuple(command), workdir, log, lock, env_file)


def _checked(
    options: argparse.Namespace, workdir: pathlib.Path, python: pathlib.Path, env_file: pathlib.Path | None
) -> schedule.Schedule:
    """The schedule, where nothing is wrong with that or the other options."""
    problems, due = [], None
    try:
        due = schedule.parse(options.schedule)
    except ConfigError as error:
        problems.append(str(error))
    if not workdir.is_dir():
        problems.append(f"there is no directory --workdir={workdir}")
    if not os.access(python, os.X_OK):
        problems.append(f"there is no program --python={python}")
    if env_file:
        problems += _problems_of_env_file(env_file)
    if options.random_delay_secs is not None and not options.systemd:
        problems.append("cron knows no random delay; leave out --random_delay_secs, or add --systemd")
    if options.random_delay_secs is not None and options.random_delay_secs < 0:
        problems.append(f"--random_delay_secs must be at least 0. Received: {options.random_delay_secs}")
    if not options.systemd and shutil.which("flock", path=_CRONS_PATH) is None:
        problems.append(f"flock, of util-linux, is not in {_CRONS_PATH}; install it, or use --systemd")
    if problems or due is None:
        raise ConfigError("\n  ".join(["this cannot be put on a schedule:", *problems]))
    return due


def _trainer(job: Job, options: argparse.Namespace, python: str) -> tuple[str, ...]:
    """The trainer's command line: the config file by name, and only what it does not say by flags."""
    file = config_lib.load(options.config) if options.config else {}
    given = {name: value for name, value in job.values.items() if name not in file or file[name] != value}
    if "data_dir" not in job.values and "TFDS_DATA_DIR" in os.environ:
        given["data_dir"] = os.environ["TFDS_DATA_DIR"]  # which the schedule's environment would not have
    program, *words = dataclasses.replace(job, values=given).command(python)
    module, flags = words[:2], words[2:]
    config = [f"--config={pathlib.Path(options.config).absolute()}"] if options.config else []
    return (program, *module, *config, *flags)


def _problems_of_env_file(path: pathlib.Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return [f"--env_file={path} cannot be read: {error.strerror}"]
    bad = [n for n, line in enumerate(lines, 1) if line and not line.startswith("#") and not _VARIABLE.fullmatch(line)]
    return [
        f"--env_file={path}, line {number}: write NAME=VALUE, or NAME='VALUE' where there are special characters; "
        "anything else a shell and systemd may read differently"
        for number in bad
    ]


def _add_line(place: _Place, actions: Actions) -> None:
    line = _crontab_line(place)
    _prepare(place, actions)
    _try_out(place, actions)
    actions.note("flock lets one run in at a time; all output goes to the log. cron mails what the line itself prints,")
    actions.note("which is that a run failed: MAILTO=you@example.com above it in the crontab says to whom.")
    actions.write(f"{place.name}.crontab", line + "\n")
    _write_logrotate(place, actions)
    actions.note(f"Puts the line into your crontab, in place of one that ends in {_mark(place.name)!r}; others stay.")
    _rewrite(actions, place.name, [line])


def _remove_line(place: _Place, actions: Actions) -> None:
    actions.note(f"Takes the line that ends in {_mark(place.name)!r} out of your crontab. A run that goes on is not")
    actions.note("ended; its log and its model_dir stay.")
    _rewrite(actions, place.name, [])


def _add_units(place: _Place, grace_secs: float, random_delay_secs: int, actions: Actions) -> None:
    service = systemd.service(
        place.name,
        place.command,
        workdir=place.workdir,
        env_file=place.env_file,
        log=place.log,
        grace_secs=grace_secs,
    )
    timer = systemd.timer(place.name, place.due, random_delay_secs)
    _prepare(place, actions)
    _try_out(place, actions)
    paths = [actions.write(f"{place.name}.service", service), actions.write(f"{place.name}.timer", timer)]
    _write_logrotate(place, actions)
    actions.note("Links both to where systemd looks for a user's units; they stay where they are.")
    actions.run(["systemctl", "--user", "link", *(str(pathlib.Path(path).absolute()) for path in paths)])
    actions.run(["systemctl", "--user", "daemon-reload"])
    actions.run(["systemctl", "--user", "enable", "--now", f"{place.name}.timer"])
    actions.note("Without this a user's units run only while the user is logged in.")
    actions.run(["loginctl", "enable-linger"])
    if place.log is None:
        actions.note(f"Its log: journalctl --user --unit={place.name} --follow")


def _remove_units(place: _Place, actions: Actions) -> None:
    actions.note(f"A run that goes on is not ended; to end it: systemctl --user stop {place.name}")
    actions.run(["systemctl", "--user", "disable", "--now", f"{place.name}.timer"])
    actions.run(["systemctl", "--user", "disable", f"{place.name}.service"])


def _crontab_line(place: _Place) -> str:
    """The line of the crontab: what cron hands to /bin/sh, its `%` escaped.

    Raises:
        ConfigError: cron would cut or change the line.
    """
    name, log, workdir = place.name, _near(place, str(place.log)), _quoted(str(place.workdir))
    variables = f"set -a && . {_near(place, str(place.env_file))} && set +a && " if place.env_file else ""
    command, lock = " ".join(_near(place, word) for word in place.command), _near(place, str(place.lock))
    told = rf'echo "$(date +\%FT\%T) {name}: '
    line = (
        f"cd {workdir} && {variables}(flock -n 9 || "
        f'{{ {told}the run before still goes on, so this one leaves"; exit 0; }}; {told}starts"; '
        f"exec {command}) 9>{lock} >>{log} 2>&1 || "
        f'echo "{name}: exit code $?, see "{_quoted(str(place.log))} {_mark(name)}'
    )
    if len(line.encode()) > _LONGEST_COMMAND:
        raise ConfigError(
            f"cron takes commands of at most {_LONGEST_COMMAND} bytes, and this one has {len(line.encode())}. Move "
            "flags into the --config file, which is named on the line and read at every start, or use --systemd"
        )
    return f"{place.due.text} {line}"


def _near(place: _Place, word: str) -> str:
    """A word for the line, which begins by going to workdir: paths below that are told from there, to keep it short."""
    below = f"{place.workdir}/"
    return _quoted(f"./{word.removeprefix(below)}" if word.startswith(below) else word.replace(f"={below}", "=./", 1))


def _quoted(word: str) -> str:
    r"""A word for the shell behind cron. `\%` stands outside of quotes, so it is `%` whoever takes the backslash away:
    crons differ in that, and in what they do to other backslashes."""
    if "\\" in word or not word.isprintable():
        raise ConfigError(f"a crontab has no place for backslashes and line breaks; use --systemd. Received: {word!r}")
    return r"\%".join(shlex.quote(part) if part or word == "" else "" for part in word.split("%"))


def _mark(name: str) -> str:
    """What ends our line: a comment to the shell, and how the line is found again."""
    return f"# launch:{name}"


def _prepare(place: _Place, actions: Actions) -> None:
    if place.log:
        actions.run(["mkdir", "-p", str(place.log.parent)])


def _try_out(place: _Place, actions: Actions) -> None:
    """Whether the command can be started where it will be: most of what keeps scheduled jobs from running."""
    actions.note("Tries whether the trainer starts in the little environment that it will have, and likes its options.")
    trainer = place.command[place.command.index("--") + 1 :]
    variables = f"set -a; . {shlex.quote(str(place.env_file))}; set +a; " if place.env_file else ""
    script = (
        f"cd {shlex.quote(str(place.workdir))} && {variables}exec {shlex.join([*trainer, '--print_config'])} >/dev/null"
    )
    home = os.environ["HOME"] if "HOME" in os.environ else "/"
    command = ["env", "-i", f"HOME={home}", f"PATH={_CRONS_PATH}", "sh", "-c", script]
    if actions.run(command, check=False):
        raise ConfigError("the job cannot be started like this, so it was not put on the schedule; see above")


def _write_logrotate(place: _Place, actions: Actions) -> None:
    if place.log is None:
        return
    actions.note("For /etc/logrotate.d, if the log is to be cut. copytruncate: a run holds the file open.")
    settings = ["weekly", "rotate 8", "compress", "missingok", "notifempty", "copytruncate"]
    lines = [f'"{place.log}" {{', *(f"    {setting}" for setting in settings), "}"]
    actions.write(f"{place.name}.logrotate", "\n".join(lines) + "\n")


def _rewrite(actions: Actions, name: str, lines: Sequence[str]) -> None:
    """Replaces the job's line of the crontab by `lines`."""
    kept: list[str] = []
    if actions.submit:
        kept = [line for line in _crontab().splitlines() if not line.endswith(f" {_mark(name)}")]
    actions.run(["crontab", "-"], input="".join(f"{line}\n" for line in [*kept, *lines]))


def _crontab() -> str:
    """The user's crontab; empty where there is none. Never empty because it could not be read: it will be replaced."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(["crontab", "-l"], capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise missing("crontab") from error
    if done.returncode and "no crontab for" not in done.stderr:
        raise RetryError(f"crontab -l ended with exit code {done.returncode}: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout
