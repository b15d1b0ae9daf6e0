"""The runner: nothing hangs, nothing that dies takes the doctor with it, nothing is left behind."""

import ctypes
import faulthandler
import math
import os
import select
import signal
from collections.abc import Iterator

import pytest

from tests.doctor.looks import case
from trainer.doctor import accelerator, checkup, locations, runner
from trainer.doctor.findings import Case, Check, Finding, failed, passed
from trainer.errors import ConfigError, RetryError

GUARD_SECS = 60.0
LONGEST_SECS = 60.0  # that a check-up may take by what was asked for
BETWEEN_SECS = 5.0  # what starting and reporting may take beside the limits


def hang(examined: Case) -> Iterator[Finding]:
    yield passed("before", f"{os.getpid()}")
    ctypes.PyDLL(None).pause()  # with Python's lock held, as TensorFlow waits


def abort(examined: Case) -> Iterator[Finding]:
    faulthandler.disable()  # that of pytest writes to the terminal
    os.write(2, b"2026-11-30 00:00:00.0: F tpu.cc:1] no such symbol\n*** stack ***\n")
    os.kill(os.getpid(), signal.SIGABRT)
    yield passed("never", "")


def crash(examined: Case) -> Iterator[Finding]:
    yield passed("before", "")
    raise KeyError("a defect")


def refuse(examined: Case) -> Iterator[Finding]:
    raise RetryError("not yet")
    yield


def refuse_for_good(examined: Case) -> Iterator[Finding]:
    raise ConfigError("never")
    yield


def test_what_hangs_dies_or_raises_is_a_finding() -> None:
    checks = [
        Check("", "hang", hang, 1.0, lambda how: failed("hang", how, "mend it", retryable=True)),
        Check("", "abort", abort, GUARD_SECS),
        Check("", "crash", crash, GUARD_SECS),
        Check("", "refuse", refuse, GUARD_SECS),
        Check("", "refuse for good", refuse_for_good, GUARD_SECS),
    ]
    results = runner.run(checks, case())
    told = [(check.name, finding.status, finding.what) for check, finding in results]
    pid = int(told[0][2])
    assert told == [
        ("hang", "pass", str(pid)),
        ("hang", "fail", "no answer within 1 s"),
        ("abort", "fail", "its process ended by SIGABRT: 2026-11-30 00:00:00.0: F tpu.cc:1] no such symbol"),
        ("crash", "pass", ""),
        ("crash", "fail", "KeyError: 'a defect'"),
        ("refuse", "fail", "not yet"),
        ("refuse for good", "fail", "never"),
    ]
    retryable = {check.name: finding.retryable for check, finding in results}
    assert retryable == {"hang": True, "abort": False, "crash": False, "refuse": True, "refuse for good": False}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_limits_add_up_to_less_than_a_minute() -> None:
    rounds = [checkup.first_round(), checkup.second_round()]
    longest = math.fsum(max(check.limit_secs for check in checks) for checks in rounds)
    assert longest + BETWEEN_SECS < LONGEST_SECS
    assert all(
        check.limit_secs > locations.ANSWER_SECS for check in rounds[1] if check.group == "storage" and check.unfinished
    )
    [of_workers] = [check.limit_secs for check in rounds[1] if check.name == "workers"]
    assert of_workers > accelerator.PROBE_SECS, "a check says itself who is silent"


def test_a_probe_does_not_outlive_a_doctor_that_was_killed() -> None:
    told, tell = os.pipe()

    def hang_with(examined: Case) -> Iterator[Finding]:
        os.write(tell, b"here")
        signal.alarm(math.ceil(GUARD_SECS))  # of this test, should it fail
        ctypes.PyDLL(None).pause()
        yield passed("never", "")

    doctor = os.fork()
    if not doctor:
        runner.run([Check("", "hang", hang_with, GUARD_SECS)], case())
        os._exit(0)
    os.close(tell)
    assert os.read(told, 4) == b"here"
    os.kill(doctor, signal.SIGKILL)
    os.waitpid(doctor, 0)
    ended, _, _ = select.select([told], [], [], GUARD_SECS / 2)
    assert ended and os.read(told, 1) == b"", "the end of the last process that could write, long before its limit"
    os.close(told)
