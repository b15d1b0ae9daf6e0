"""The line at the bottom of a terminal, in real pseudo-terminals."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from trainer.errors import EXIT_OK, EXIT_RETRY

_SCRIPT = """
import os, sys, threading
from trainer import terminal
terminal._REFRESH_SECS = 0.01
looks = threading.Semaphore(0)
def source(columns):
    looks.release()
    return ("busy " * columns)[:columns]
def drawn():
    for _ in range(4):
        looks.acquire()
"""


class Screen:
    """A pseudo-terminal with what it shows: rows, as far as a log and the line need one.

    Attributes:
        raw: all that was written to it.
    """

    def __init__(self, columns: int):
        self.master, self.slave = pty.openpty()
        self.raw = ""
        self.resize(columns)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read_until(self, found: Callable[[str], object]) -> None:
        """Reads until `found` says yes to all that was written; at the end of the other side at the latest."""
        ends_at = time.monotonic() + GUARD_SECS
        while not found(self.raw):
            assert time.monotonic() < ends_at, self.raw
            if not select.select([self.master], [], [], 1.0)[0]:
                continue
            try:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # nobody has the other side open any more
                return

    def rows(self) -> list[str]:
        """What a person sees, the last row being that of the cursor."""
        rows, column = [""], 0
        for token in re.findall(r"\x1b\[K|.", self.raw, re.DOTALL):
            if token == "\n":
                rows.append("")
                column = 0
            elif token == "\r":
                column = 0
            elif token == "\x1b[K":
                rows[-1] = rows[-1][:column]
            else:
                rows[-1] = rows[-1][:column] + token + rows[-1][column + 1 :]
                column += 1
        return [row.rstrip() for row in rows]


@contextlib.contextmanager
def _on_screen(command: list[str], columns: int = 80, **options: object) -> Iterator[tuple[subprocess.Popen, Screen]]:
    screen = Screen(columns)
    environ = clean_environ() | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    streams = {"stdout": screen.slave, "stderr": screen.slave, **options}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=screen.slave, start_new_session=True, text=True, **streams
    )
    os.close(screen.slave)
    try:
        yield process, screen
    finally:
        process.kill()
        process.wait()
        os.close(screen.master)


def _show(body: str, **options: object) -> Screen:
    """The screen after a script that has a `source` and waits with `drawn()`."""
    with _on_screen([sys.executable, "-c", _SCRIPT + body], **options) as (process, screen):
        screen.read_until(lambda raw: False)
        assert process.wait(GUARD_SECS) == EXIT_OK
    return screen


def test_all_that_is_written_scrolls_above_the_line() -> None:
    screen = _show(
        """
terminal.begin(source)
drawn()
print("first")
drawn()
print("part", end="")  # of a line that is whole later: nothing is drawn into it
drawn()
sys.stderr.write(" and rest\\n")
drawn()
sys.stdout.writelines(["two\\n", "lines\\n"])
drawn()
terminal.leave()
print("after")
"""
    )
    assert screen.rows() == ["first", "part and rest", "two", "lines", "after", ""]
    assert "busy busy" in screen.raw
    assert "\x1b[2J" not in screen.raw  # no flicker


def test_the_line_is_as_wide_as_the_terminal_less_one() -> None:
    screen = _show("terminal.begin(source)\ndrawn()\nterminal.leave()", columns=23)
    assert max(len(text) for text in re.findall(r"[busy ]+", screen.raw)) == 22


def test_a_forked_child_writes_past_the_line() -> None:
    screen = _show(
        """
terminal.begin(source)
drawn()
held, over = threading.Event(), threading.Event()
def hold(lock):  # as the thread that draws does
    with lock:
        held.set()
        over.wait()
threading.Thread(target=hold, args=[terminal._line._lock], daemon=True).start()
held.wait()
child = os.fork()
if not child:
    sys.stdout.write("\\rchild    \\n")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
over.set()
terminal.leave()
""",
        columns=10,
    )
    assert screen.rows() == ["child", ""]


def test_a_terminal_without_unicode_gets_a_bar_all_the_same() -> None:
    screen = _show(
        """
sys.stderr.reconfigure(encoding="ascii")
terminal.begin(lambda columns: source(0) + "━━──")
drawn()
"""
    )
    assert screen.rows()[-1] == "##--"


@pytest.mark.parametrize(
    "before",
    [
        'os.environ["TERM"] = "dumb"',
        'del os.environ["TERM"]',
        "os.dup2(os.pipe()[1], 1)",  # as with `| tee`, which writes to the same terminal
        "os.dup2(os.pipe()[1], 2)",
    ],
)
def test_there_is_no_line_where_nobody_could_look_at_it(before: str) -> None:
    assert _show(f"{before}\nterminal.begin(source)\nassert terminal._line is None").raw == ""


def test_a_line_stays_when_stdout_goes_to_a_file(tmp_path) -> None:
    with open(tmp_path / "log", "w") as log:
        screen = _show("terminal.begin(source)\ndrawn()\nprint('out')\ndrawn()\nterminal.leave()", stdout=log)
    assert "busy" in screen.raw
    assert screen.rows() == [""]
    assert (tmp_path / "log").read_text() == "out\n"


def test_the_terminal_of_another_job_is_left_alone() -> None:
    screen = _show(
        """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if (child := os.fork()):  # the shell, which has the terminal
    sys.exit(os.waitpid(child, 0)[1])
os.setpgid(0, 0)
terminal.begin(source)
drawn()
print("said")
drawn()
terminal.leave()
"""
    )
    assert screen.rows() == ["said", ""]
    assert "busy" not in screen.raw


@pytest.mark.slow
def test_a_run_shows_itself_stops_and_goes_on_quietly(trainer: Trainer, tmp_path) -> None:
    flags = [f"--model_dir={tmp_path}", "--train_steps=2000000", "--eval_every_steps=1000000", "--log_every_steps=10"]
    with _on_screen(trainer.command(*flags), columns=100) as (process, screen):
        screen.read_until(lambda raw: re.search(r"steps/s  .* left", raw))
        process.send_signal(2)
        screen.read_until(lambda raw: False)
        assert process.wait(GUARD_SECS) == EXIT_RETRY
    rows = screen.rows()
    assert re.search("starting [0-9]+ s", screen.raw)
    assert re.fullmatch(
        r"trainer: stopped by SIGINT at step [\d,]+ of 2,000,000, which is saved. .*", "".join(rows[-2:])
    )
    assert not [row for row in rows if "━" in row or "─" in row], rows  # it was cleared everywhere

    step = int(re.search(r"SIGINT at step ([\d,]+)", screen.raw)[1].replace(",", ""))
    longer = [*flags, f"--train_steps={step + 20}", "--allow_config_change"]
    done = trainer.run(*longer, "--quiet")
    assert done.stderr == ""
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names[0].startswith("eval ")
    assert "goodput" in names
    assert not [name for name in names if name.startswith(("step ", "dataset", "checkpoints"))]
