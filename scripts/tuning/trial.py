"""A trial as a process of the trainer, and what it has left so far."""

import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

from trainer.errors import EXIT_RETRY

# A trial that stopped early is tried again so often in a row, after 1, 2, 4, ... seconds: together longer than what is
# still there of a run takes to end.
_TRIES = 6
_FIRST_PAUSE_SECS = 1.0
_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # prctl(2)
_REASON_CHARS = 400


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """What metrics.jsonl tells of a metric.

    values: by step.
    others: names of the metrics that were evaluated, whether this one is among them or not.
    """

    values: dict[int, float]
    others: frozenset[str]


class TrialProcess:
    """Runs a command until it is done, cannot be mended, or has stopped early too often.

    Args:
        command: words of the trainer's command line.
        model_dir: where the run writes.
        log: file that its output is appended to.
    """

    def __init__(self, command: Sequence[str], model_dir: pathlib.Path, log: pathlib.Path):
        self.model_dir, self.log = model_dir, log
        self._command, self._tries, self._not_before = command, 0, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def poll(self) -> int | None:
        """The exit code that the trial ends with, None while there is hope; starts another try where one is due."""
        if self._process is None:
            if time.monotonic() >= self._not_before:
                self._start()
            return None
        code = self._process.poll()
        if code != EXIT_RETRY or self._tries >= _TRIES:
            return code
        self._process = None
        self._not_before = time.monotonic() + _FIRST_PAUSE_SECS * 2 ** (self._tries - 1)
        return None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, where there is somebody to get it."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def has_ended(self) -> bool:
        """Whether no process is there at the moment."""
        return self._process is None or self._process.poll() is not None

    def evaluations(self, metric: str) -> Evaluations:
        """What the run has evaluated so far; a line that is being written counts the next time."""
        values: dict[int, float] = {}
        others: set[str] = set()
        path = self.model_dir / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            others |= {name.removeprefix("eval/") for name in record if name.startswith("eval/")}
            if f"eval/{metric}" in record:
                values[record["step"]] = float(record[f"eval/{metric}"])
        return Evaluations(values, frozenset(others))

    def last_words(self) -> str:
        """What the process said of its end: its last line, or the last with what is indented below."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        begin = max((n for n, line in enumerate(lines) if not line.startswith(" ")), default=0)
        return " ".join(line.strip() for line in lines[begin:])[:_REASON_CHARS] or "it said nothing"

    def _start(self) -> None:
        self._tries += 1
        paths = [str(_CHECKOUT), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
        with self.log.open("ab") as output:
            self._process = _popen(self._command, os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, output)


def _popen(command: Sequence[str], environ: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a process that does not outlive a killed tuner, and to which Ctrl-C comes from us only."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_tuner() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environ,
        process_group=0,
        preexec_fn=die_with_tuner,
    )
