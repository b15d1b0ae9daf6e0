"""Runs checks side by side, each in a forked process that is killed at its time limit.

TensorFlow and libtpu may hang with Python's lock held, or abort their process: neither a thread nor an exception could
deal with that. What a probe prints goes nowhere, but for its last words where it dies.
"""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from data.errors import DataError
from trainer.doctor.findings import NO_ANSWER, Case, Check, Finding, refused
from trainer.errors import TrainerError

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_END = None  # what a probe that has come to its end sends last
_OUTPUT_BYTES = 1 << 16
_WORDS_CHARS = 300


def run(checks: Sequence[Check], case: Case) -> list[tuple[Check, Finding]]:
    """What each check has found, in the order of the checks; takes no longer than the longest limit among them."""
    started = [_Probe(check, case) for check in checks]
    try:
        while running := [probe for probe in started if probe.is_running]:
            nearest = min(probe.deadline for probe in running)
            ready = wait([probe.pipe for probe in running], timeout=max(0.0, nearest - time.monotonic()))
            for probe in running:
                if probe.pipe in ready:
                    probe.receive()
                elif time.monotonic() >= probe.deadline:
                    probe.break_off(f"{NO_ANSWER} within {probe.check.limit_secs:g} s")
    finally:
        for probe in started:
            probe.kill()
    return [(probe.check, finding) for probe in started for finding in probe.findings]


class _Probe:
    """A check under way."""

    def __init__(self, check: Check, case: Case):
        self.check = check
        self.findings: list[Finding] = []
        self.is_running = True
        self._output = os.memfd_create("doctor")  # in memory: the disk may be what is wrong
        self.pipe, theirs = _FORK.Pipe(duplex=False)
        self.deadline = time.monotonic() + check.limit_secs
        arguments = (check, case, theirs, self._output, os.getpid())
        self._process: BaseProcess = _FORK.Process(target=_look, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> None:
        """Takes what the probe has sent, or notices that it died."""
        try:
            finding = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.break_off(self._last_words())
            return
        if finding is _END:
            self.is_running = False
        else:
            self.findings.append(finding)

    def break_off(self, how: str) -> None:
        """Ends it with what that means."""
        self.is_running = False
        self.findings.append(self.check.broken_off(how))

    def kill(self) -> None:
        """Leaves nothing behind."""
        self._process.kill()
        self._process.join()
        self.pipe.close()
        os.close(self._output)

    def _last_words(self) -> str:
        code = self._process.exitcode or 0
        died = f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        size = os.fstat(self._output).st_size
        text = os.pread(self._output, _OUTPUT_BYTES, max(0, size - _OUTPUT_BYTES)).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # TensorFlow's own word on why it aborts; stacks may follow it.
        fatal = [line for line in lines if ": F " in line]
        words = (fatal or lines)[-1:]
        return f"{died}: {words[0][-_WORDS_CHARS:]}" if words else died


def _look(check: Check, case: Case, pipe: Connection, output: int, doctor: int) -> None:
    """The process of a probe."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # It does not outlive a doctor that is interrupted or killed, whoever holds Python's lock.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != doctor:  # which has gone before that
        os._exit(0)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        for finding in check.probe(case):
            pipe.send(finding)
    except (TrainerError, DataError) as error:
        pipe.send(refused(check.name, error))
    except Exception as error:
        traceback.print_exc()
        how = f"{type(error).__name__}: {' '.join(str(error).split())}"
        pipe.send(check.broken_off(how[:_WORDS_CHARS]))
    pipe.send(_END)
    os._exit(0)  # whatever threads it has left
