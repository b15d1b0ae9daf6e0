"""What the tests of the watch share: processes that run a few lines of Python and are watched from outside."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import typing
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
GUARD_SECS = 30  # ends a process that hangs; no test depends on it


class Child:
    """A process of its own; speaks on standard output, a line a time."""

    def __init__(self, command: list[str], environ: dict[str, str]):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def wait_for(self, text: str) -> str:
        """Reads lines up to one that begins with `text`."""
        guard = threading.Timer(GUARD_SECS, self.process.kill)
        guard.start()
        try:
            while line := self.process.stdout.readline():
                if line.startswith(text):
                    return line.rstrip("\n")
        finally:
            guard.cancel()
        raise AssertionError(f"the process ended without saying {text!r}: {self.end()}")

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of standard output, and all of standard error."""
        try:
            out, _ = self.process.communicate(timeout=GUARD_SECS)
        finally:
            self._errors.seek(0)
            err = self._errors.read()
        return self.process.returncode, out, err

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()


@pytest.fixture
def python() -> Iterator[Callable[..., Child]]:
    """Starts `python -c code argument...`; ends what still runs after the test."""
    children: list[Child] = []

    def start(code: str, *arguments: object, environ: typing.Mapping[str, str] | None = None) -> Child:
        command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
        children.append(Child(command, dict(environ or {})))
        return children[-1]

    yield start
    for child in children:
        child.close()
