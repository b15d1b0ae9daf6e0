"""scripts/supervise with real children."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
GUARD_SECS = 60
SUPERVISE = [sys.executable, str(ROOT / "scripts" / "supervise")]
# A child that says when it is there, counts what it gets, and ends when it is told to by SIGTERM or SIGINT.
COUNTING = """
import os, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda n, f: got.append(signal.Signals(n).name))
print("ready", flush=True)
while not {"SIGTERM", "SIGINT"} & set(got):
    time.sleep(0.01)
time.sleep(0.3)  # for one that would come twice
print(*got, flush=True)
sys.exit(33)
"""


def start(*arguments: str, **options) -> subprocess.Popen:
    def as_in_a_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may themselves run under nohup

    options = {"preexec_fn": as_in_a_terminal} | options
    return subprocess.Popen(
        [*SUPERVISE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.fixture
def supervised(tmp_path):
    """Runs a command that ends with the given codes, one after the other; negative ones are signals to itself."""

    def run(codes: list[int], *options: str) -> tuple[int, int, list[str]]:
        """Exit code, number of tries, lines of the supervisor."""
        tries = tmp_path / "tries"
        tries.write_text("")
        code = (
            "import os, sys; file, *codes = sys.argv[1:]; open(file, 'a').write('x'); "
            "code = int(codes[os.path.getsize(file) - 1]); code < 0 and os.kill(os.getpid(), -code); sys.exit(code)"
        )
        command = [sys.executable, "-c", code, str(tries), *map(str, codes)]
        done = subprocess.run(
            [*SUPERVISE, *options, "--", *command], capture_output=True, text=True, timeout=GUARD_SECS
        )
        return done.returncode, len(tries.read_text()), done.stderr.splitlines()

    return run


@pytest.mark.parametrize("last", [0, 2, 78])
def test_it_tries_until_there_is_nothing_left_to_mend(supervised, last):
    code, tries, lines = supervised([75, 1, -signal.SIGKILL, 75, last], "--max_backoff_secs=0.05")
    assert (code, tries) == (last, 5)
    assert [line.split(" after ")[0] for line in lines] == [
        "supervise: exit code 75 (stopped early, worth another try)",
        "supervise: exit code 1 (an error of the program)",
        "supervise: killed by signal 9 (Killed)",
        "supervise: exit code 75 (stopped early, worth another try)",
    ]
    assert all("next try in" in line for line in lines)


def test_failures_in_a_row_are_limited(supervised):
    code, tries, lines = supervised([1, 1, 75, 1, 1, 3], "--max_backoff_secs=0.01", "--max_failures=3")
    assert (code, tries) == (3, 6)
    assert "3 failures in a row: giving up" in lines[-1]


def test_a_death_by_signal_that_repeats_is_given_as_a_shell_gives_it(supervised):
    code, tries, _ = supervised([-signal.SIGKILL] * 2, "--max_backoff_secs=0.01", "--max_failures=2")
    assert (code, tries) == (128 + signal.SIGKILL, 2)


def test_exit_code_75_has_no_limit_and_waits_ever_longer(supervised):
    code, tries, lines = supervised([75] * 12 + [0], "--max_backoff_secs=0.001", "--max_failures=1")
    assert (code, tries) == (0, 13)
    # The first waits need no clock: they are in the lines.
    *_, waits = supervised([75, 75, 0], "--max_backoff_secs=1.6")
    first, second = (float(line.split("next try in ")[1].removesuffix(" s")) for line in waits)
    assert 0.7 <= first <= 1.3
    assert 1.2 <= second <= 2.0


@pytest.mark.parametrize(
    ("number", "received"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM")],
)
def test_a_signal_ends_the_child_and_then_the_supervisor_with_its_code(number, received):
    process = start(sys.executable, "-c", COUNTING)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(number)
    out, err = process.communicate(timeout=GUARD_SECS)
    assert sorted(out.split()) == sorted([received, "SIGUSR1"])
    assert process.returncode == 33, err
    assert err == ""


def test_a_signal_to_the_whole_process_group_reaches_the_child_once():
    process = start(sys.executable, "-c", COUNTING, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=GUARD_SECS)
    assert (out, process.returncode) == ("SIGINT\n", 33)


def test_ctrl_c_in_a_terminal_reaches_the_child_once():
    # In a process of its own, because a process with threads, like this one, should not fork.
    code = """
import os, pty, sys
supervisor, terminal = pty.fork()
if not supervisor:
    os.execv(sys.argv[1], sys.argv[1:])
said = b""
while b"ready" not in said:
    said += os.read(terminal, 1024)
os.write(terminal, bytes([3]))
while b"SIGINT" not in said:
    said += os.read(terminal, 1024)
print(said.count(b"SIGINT"), os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]))
"""
    command = [sys.executable, "-c", code, *SUPERVISE, sys.executable, "-c", COUNTING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.stdout == "1 33\n", done.stderr


def test_a_child_that_dies_of_the_signal_before_it_can_handle_it_was_stopped_early():
    process = start("sh", "-c", "echo ready; exec sleep 1000")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 75


def test_a_signal_between_two_tries_ends_it_with_75():
    process = start("sh", "-c", "exit 75")
    assert "next try in" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 75
    assert err == "supervise: stopped between two tries\n"


def test_what_cannot_run_is_told_and_not_tried_again():
    done = subprocess.run([*SUPERVISE, "no-such-program", "--x"], capture_output=True, text=True, timeout=GUARD_SECS)
    assert (done.returncode, done.stderr) == (
        2,
        "supervise: cannot run no-such-program --x: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "a command is missing"),
        (["--max_failures=0", "true"], "--max_failures must be at least 1. Received: 0"),
        (["--max_backoff_secs=-1", "true"], "--max_backoff_secs must be at least 0. Received: -1"),
        (["--max_backof=1", "true"], "unrecognized arguments: --max_backof=1"),
    ],
)
def test_a_malformed_command_line_is_refused(arguments, complaint):
    done = subprocess.run([*SUPERVISE, *arguments], capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_the_command_keeps_its_own_options():
    command = ["echo", "--max_failures=7", "--help", "--", "x"]
    done = subprocess.run([*SUPERVISE, *command], capture_output=True, text=True, timeout=GUARD_SECS, check=True)
    assert done.stdout == "--max_failures=7 --help -- x\n"
