"""`scripts/launch cron`: schedules and units against libraries of cron and systemd's own parsers; the line, run."""

import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import cronsim
import crontab
import pytest

from scripts.launchers import schedule
from tests.conftest import GUARD_SECS, ROOT
from tests.scripts import walkthrough
from trainer.errors import ConfigError

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch"), "cron"]
BEGIN = datetime.datetime(2026, 11, 30, 3, 47, tzinfo=datetime.UTC)
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
# systemd-analyze verify --user wants a directory of the user's.
SYSTEMD_ENVIRON = os.environ | {"XDG_RUNTIME_DIR": "/tmp", "TZ": "UTC", "LC_ALL": "C"}

SCHEDULES = [
    "30 3 * * *",
    "*/7 * * * *",
    "0,15,20-22 8-18/2 * * MON-fri",
    "5 4 * * sun",
    "5 4 * * 5-7",
    "0 0 1,15 * *",
    "0 12 31 * *",
    "0 0 29 feb *",
    "10 6 13 * 5",  # either is enough: the 13th, and every Friday
    "10 6 */2 * 1",  # begins with a star: both are needed
    "59 23 1-7 jan-mar,12 0,3",
]


@pytest.mark.parametrize("text", SCHEDULES)
@needs_systemd
def test_systemd_is_due_when_cron_is(text):
    count = 12
    due = set()
    for value in schedule.parse(text).on_calendar():
        command = ["systemd-analyze", "calendar", f"--iterations={count}", f"--base-time={BEGIN:%Y-%m-%d %H:%M:%S}"]
        done = subprocess.run([*command, value], check=True, capture_output=True, text=True, env=SYSTEMD_ENVIRON)
        found = re.findall(r"\w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC", done.stdout)
        assert found, done.stdout
        due |= {datetime.datetime.fromisoformat(f"{time}+00:00") for time in found}
    cron = cronsim.CronSim(text, BEGIN)
    assert sorted(due)[:count] == [next(cron) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("30 3 * *", "five fields"),
        ("@reboot", "@daily"),
        ("60 3 * * *", "minute: 60 is not a number from 0 to 59"),
        ("0 24 * * *", "hour: 24"),
        ("0 0 0 * *", "day of the month: 0"),
        ("0 0 * 13 *", "month: 13 is not a number from 1 to 12, or jan to dec"),
        ("0 0 * * 8", "day of the week: 8"),
        ("0 0 * * mo", "or sun to sat"),
        ("*/0 * * * *", "a step goes from 1"),
        ("5/10 * * * *", "write 5-59/10"),
        ("0 22-2 * * *", "write 22-23,0-2"),
        ("0,,1 * * * *", "nothing is not a number"),
        ("+5 * * * *", r"\+5 is not a number"),
        ("0 0 31 4,6 *", "never due"),
        ("0 0 30 feb *", "never due"),
    ],
)
def test_a_schedule_that_crons_would_refuse_or_never_meet_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        schedule.parse(text)


def test_all_that_is_wrong_with_a_schedule_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        schedule.parse("61 25 * * *")
    assert "minute: 61" in str(caught.value)
    assert "hour: 25" in str(caught.value)


@pytest.fixture
def place(tmp_path):
    """A directory that is hard to write down, with a config and variables. A job can import the trainer there."""
    folder = tmp_path / "50%n of $HOME's"
    folder.mkdir()
    (folder / "run.toml").write_text(f'dataset = "digits"\nmodel_dir = "{tmp_path}/run"\nmodel = "mlp"\n')
    (folder / "job.env").write_text(f"# where the trainer is\nPYTHONPATH='{ROOT}'\n")
    return folder


def launch(place, *words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess:
    python = f"--python={sys.executable}"
    command = [*LAUNCH, "--name=digits", "--config=run.toml", python, "--env_file=job.env", *words]
    environ = os.environ | environ
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environ, timeout=GUARD_SECS)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def as_cron_reads(line: str, *, keeps_backslash: bool = False) -> str:
    """The command that cron hands to the shell: up to the first `%` that has no backslash.

    Args:
        line: of a crontab.
        keeps_backslash: as old crons do, which leave the one of `\\%` to the shell; newer ones take it away.
    """
    [job] = crontab.CronTab(tab=line)
    assert job.is_valid()
    assert not job.stdin, "an unescaped % ends the command"
    return job.command.replace("%", r"\%") if keeps_backslash else job.command


def cron_runs(command: str, home: pathlib.Path) -> subprocess.Popen:
    environ = {"HOME": str(home), "LOGNAME": "someone", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=home,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_line_trains_and_a_second_one_meanwhile_leaves(place, digits_dir, tmp_path):
    with (place / "job.env").open("a") as file:
        file.write(f"TFDS_DATA_DIR='{digits_dir}'\n")
    launch(place, "--schedule=30 3 * * *", "--out=jobs", "--", "--train_steps=3", "--eval_every_steps=3")
    line = (place / "jobs" / "digits.crontab").read_text()
    assert line.startswith("30 3 * * * ")
    assert line.endswith(" # launch:digits\n")
    (place / "logs").mkdir()
    log = place / "logs" / "digits.log"
    first = cron_runs(as_cron_reads(line), tmp_path)
    while not log.exists() or "starts" not in log.read_text():
        assert first.poll() is None, first.communicate()
    second = cron_runs(as_cron_reads(line), tmp_path)
    assert second.communicate(timeout=GUARD_SECS)[0] == "", "cron would mail it"
    assert second.returncode == 0
    assert first.poll() is None, "the first must have been there all the time"
    assert first.communicate(timeout=GUARD_SECS)[0] == ""
    assert first.returncode == 0
    told = log.read_text()
    assert len(re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d digits: starts$", told, re.MULTILINE)) == 1
    assert len(re.findall(r"^\S+ digits: the run before still goes on, so this one leaves$", told, re.MULTILINE)) == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("keeps_backslash", [False, True])
def test_every_cron_hands_on_the_flags_as_they_are_and_mails_failures(place, tmp_path, keeps_backslash):
    flags = ["--model_dir=a %d  'b' $c `d` \"e\"", "--train_split=train[:50%]", "--train_epochs=2"]
    launch(place, "--schedule=@daily", "--out=jobs", "--", *flags, TFDS_DATA_DIR="/of/the/shell")
    line = (place / "jobs" / "digits.crontab").read_text()
    (place / "logs").mkdir()
    command = as_cron_reads(line, keeps_backslash=keeps_backslash)
    shown = cron_runs(command.replace("-m trainer.main", "-m trainer.main --print_config"), tmp_path)
    assert shown.communicate(timeout=GUARD_SECS)[0] == ""
    log = (place / "logs" / "digits.log").read_text()
    config = json.loads(log.partition("starts\n")[2])
    assert (config["model_dir"], config["train_split"]) == ("a %d  'b' $c `d` \"e\"", "train[:50%]")
    assert config["model"] == "mlp", "the config file is read at the start"
    assert config["data_dir"] == "/of/the/shell", "which cron does not know"
    broken = cron_runs(command.replace("trainer.main", "trainer.main --no_such_flag"), tmp_path)
    assert "digits: exit code 2, see " in broken.communicate(timeout=GUARD_SECS)[0]


def test_what_a_crontab_cannot_hold_is_refused(place):
    done = launch(place, "--schedule=@daily", "--", r"--train_split=a\b", code=78)
    assert "use --systemd" in done.stderr
    done = launch(place, "--schedule=@daily", "--", f"--train_split={'a' * 900}", code=78)
    assert "at most 999 bytes" in done.stderr
    launch(place, "--schedule=@daily", "--systemd", "--", rf"--train_split=\{'a' * 900}")


def test_all_that_is_wrong_is_told_at_once(place):
    (place / "job.env").write_text("A=b c\nexport B=c\nC='fine & well'\nD=$HOME\n")
    wrong = ["--schedule=* * *", "--workdir=/nowhere", "--random_delay_secs=5", "--python=/no/python"]
    told = launch(place, *wrong, code=78).stderr
    for text in ("five fields", "/nowhere", "random_delay", "/no/python", "line 1:", "line 2:", "line 4:"):
        assert text in told
    assert "line 3:" not in told


@pytest.fixture
def programs(tmp_path):
    """Stands in for cron's and systemd's programs: a crontab in a file, and every call written down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    table, calls = tmp_path / "table", tmp_path / "calls"
    text = f"""#!/bin/sh
[ "$1" = - ] && exec cat >{table}
[ -e {tmp_path}/locked ] && {{ echo "you are not allowed" >&2; exit 1; }}
cat {table} 2>/dev/null || {{ echo "no crontab for you" >&2; exit 1; }}
"""
    (folder / "crontab").write_text(text)
    for name in ("systemctl", "loginctl"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{calls}\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_submitting_replaces_the_jobs_own_line_and_no_other(place, tmp_path, programs):
    table = tmp_path / "table"
    launch(place, "--schedule=@daily", "--out=jobs", "--submit", **programs)
    first = table.read_text()
    assert first == (place / "jobs" / "digits.crontab").read_text()
    others = "MAILTO=me\n# a comment\n0 5 * * * true # launch:digits2\n"
    table.write_text(others + first)
    launch(place, "--schedule=15 4 * * *", "--out=jobs", "--submit", **programs)
    assert table.read_text().startswith(f"{others}15 4 * * * ")
    assert table.read_text().count("# launch:digits\n") == 1
    launch(place, "--schedule=15 4 * * *", "--remove", **programs)
    assert "# launch:digits\n" in table.read_text(), "a dry run changes nothing"
    launch(place, "--schedule=15 4 * * *", "--remove", "--submit", **programs)
    assert table.read_text() == others


def test_a_crontab_that_cannot_be_read_is_not_replaced(place, tmp_path, programs):
    table = tmp_path / "table"
    table.write_text("0 5 * * * true\n")
    (tmp_path / "locked").touch()
    done = launch(place, "--schedule=@daily", "--out=jobs", "--submit", code=75, **programs)
    assert "you are not allowed" in done.stderr
    assert table.read_text() == "0 5 * * * true\n"


def test_a_job_that_cannot_be_started_is_not_put_on_the_schedule(place, tmp_path, programs):
    (place / "job.env").write_text("PYTHONPATH=/nowhere\nPYTHONNOUSERSITE=1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # one without our packages
    python.chmod(0o755)
    done = launch(place, "--schedule=@daily", f"--python={python}", "--out=jobs", "--submit", code=78, **programs)
    assert "cannot be started" in done.stderr
    assert not (tmp_path / "table").exists()


@needs_systemd
def test_systemd_reads_the_units_as_they_are_meant(place, tmp_path):
    flags = ["--model_dir=a %d  'b' $c \\d \"e\"", "--train_split=;", "--grace_secs=30.5"]
    words = ["--schedule=10 6 13 * 5", "--systemd", "--random_delay_secs=60", "--log=logs/a b.log", "--out=jobs"]
    launch(place, *words, "--", *flags)
    units = [place / "jobs" / f"digits.{kind}" for kind in ("service", "timer")]
    found = ""
    for unit in units:
        command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, env=SYSTEMD_ENVIRON)
        assert (done.returncode, done.stderr) == (0, "")
        loud = subprocess.run(command, capture_output=True, text=True, env=SYSTEMD_ENVIRON | {"SYSTEMD_LOG_LEVEL": "7"})
        found += loud.stdout
    [line] = re.findall(r"Command Line: (/.*)", found)
    words = [word.replace(r"\$\$", "$") for word in shlex.split(line)]  # `$$` becomes `$` at the start
    python, supervise, *command = words
    assert supervise == str(ROOT / "scripts" / "supervise")
    assert command[:4] == ["--", sys.executable, "-m", "trainer.main"]
    assert set(flags) < set(command)
    for text in (f"WorkingDirectory: {place}", "KillMode: mixed", "TimeoutStopSec: 41s"):
        assert text in found
    assert "\nRandomizedDelaySec=60\n" in units[1].read_text()  # which systemd does not show
    assert f"StandardOutputFileToAppend: {place}/logs/a b.log" in found
    assert f"EnvironmentFile: {place}/job.env" in found


def test_submitting_units_links_and_enables_them_and_removing_undoes_it(place, tmp_path, programs):
    launch(place, "--schedule=@daily", "--systemd", "--out=jobs", "--submit", **programs)
    launch(place, "--schedule=@daily", "--systemd", "--remove", "--submit", **programs)
    jobs = place / "jobs"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"systemctl --user link {jobs}/digits.service {jobs}/digits.timer",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now digits.timer",
        "loginctl enable-linger",
        "systemctl --user disable --now digits.timer",
        "systemctl --user disable digits.service",
    ]


def test_every_command_of_the_walk_through_works(place):
    (place / "nightly.toml").write_text(walkthrough.file("nightly.toml"))
    (place / "nightly.env").write_text("TRAINER_ALERT_URL='https://example.com/hook?a=1&b=2'\n")
    commands = walkthrough.commands("scripts/launch cron")
    assert len(commands) > 5
    for command in commands:
        words = [word for word in shlex.split(command) if word != "--submit"]
        words = [sys.executable, str(ROOT / words[0]), *words[1:]]
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=GUARD_SECS)
        assert done.returncode == 0, done.stderr
        assert "digits" in done.stdout
