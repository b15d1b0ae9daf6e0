"""What a launcher does to the world, or, in a dry run, says that it would: files written, commands run."""

import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from trainer.errors import ConfigError, RetryError, TrainerError


class Actions:
    """Files and commands, in the order in which a launcher asks for them.

    A dry run prints every file whole and every command as a line that a shell takes, and does nothing, but for writing
    the files where `out` is given.

    Args:
        submit: really run the commands.
        out: directory for the files; by default they are printed only.
    """

    def __init__(self, *, submit: bool, out: str | None = None):
        self.submit = submit
        self._out = pathlib.Path(out) if out else None

    def note(self, text: str) -> None:
        """Tells what follows, or what is to know about it, as a comment of a shell."""
        for line in text.splitlines():
            print(f"# {line}".rstrip(), flush=True)

    def write(self, name: str, text: str) -> str:
        """Writes a file, where there is a directory for it, and returns the path by which commands name it."""
        path = self._out / name if self._out else pathlib.Path(name)
        if self._out is None and self.submit:
            raise ConfigError(f"--submit needs a directory for its files, {name} first; give --out=DIR")
        if self._out is None:
            self.note(f"--- {name}")
            print(text, flush=True)
            return str(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another --out") from error
        self.note(f"wrote {path}")
        return str(path)

    def run(self, command: Sequence[str], *, check: bool = True, input: str | None = None) -> int:
        """Prints a command and, unless it is a dry run, runs it; returns its exit code, 0 in a dry run.

        Args:
            command: its words.
            check: whether its failure ends ours.
            input: text for its standard input.

        Raises:
            ConfigError: there is no such program.
            RetryError: it failed, which it has said itself on the console.
        """
        line = shlex.join(command)
        print(line, flush=True)
        if not self.submit:
            return 0
        code = self._call(command, input=input).returncode
        if code and check:
            raise RetryError(f"`{command[0]}` ended with exit code {code}; its own words are above. Ran: {line}")
        return code

    def query(self, command: Sequence[str]) -> str | None:
        """What a command that changes nothing prints; None where it fails. Only for a launch that submits."""
        done = self._call(command, capture=True)
        return done.stdout if done.returncode == 0 else None

    def _call(
        self, command: Sequence[str], *, input: str | None = None, capture: bool = False
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, input=input, text=True, stdout=subprocess.PIPE if capture else None)
        except FileNotFoundError as error:
            raise missing(command[0]) from error


def missing(program: str) -> TrainerError:
    """The error of a program that is not there."""
    return ConfigError(f"`{program}` is not installed here, or not in PATH. Install it, or leave out --submit and copy")


def say(message: str) -> None:
    """One line to whoever waits, past the output that is to be copied."""
    print(f"launch: {message}", file=sys.stderr, flush=True)
