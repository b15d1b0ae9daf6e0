"""Where the time of a process goes."""

import time

import pytest

from trainer.callbacks import Loop, clock


class _Time:
    """A monotonic clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def loop(self, timer: clock.LoopClock, begin: int, end: int, seconds: float, waited: float = 0.0) -> None:
        timer.on_loop_begin(begin)
        self.now += seconds
        timer.on_loop_end(Loop(begin, end, seconds, waited, {}, 0.1, first=False))


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> _Time:
    return _Time(monkeypatch)


def _spent(account: clock.Clock) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in account.seconds().items() if seconds}


def test_parts_sum_to_the_age_of_the_process() -> None:
    started = time.monotonic() - 5.0
    account = clock.Clock(started)
    timer = clock.LoopClock(account, start_step=0, reached_before=0)
    account.start_is_over()
    for step in range(4):
        timer.on_loop_begin(step)
        timer.on_loop_end(Loop(step, step + 1, 1e-6, 1e-7, {}, 0.1, first=step == 0))
    with account.measure("evaluation"):
        before = time.monotonic() - started
        assert before <= sum(account.seconds().values()) <= time.monotonic() - started  # also within a part
    assert sum(account.seconds().values()) >= before


def test_every_second_is_counted_once(passing: _Time) -> None:
    account = clock.Clock(passing.now - 3.0)
    with account.measure("connecting"):
        passing.now += 2.0
    account.start_is_over()
    with account.measure("evaluation"):
        passing.now += 1.0
        with account.measure("checkpoint_stall"):
            passing.now += 4.0
        passing.now += 0.5
    passing.now += 7.0
    assert _spent(account) == {
        "start_up": 3.0, "connecting": 2.0, "evaluation": 1.5, "checkpoint_stall": 4.0, "other": 7.0
    }  # fmt: skip


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="no part 'stalling'; there are start_up"):
        account = clock.Clock(0.0)
        account.begin("stalling")


def test_loops_compile_then_step_and_wait(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    account.start_is_over()
    timer = clock.LoopClock(account, start_step=0, reached_before=0)
    passing.loop(timer, 0, 1, 30.0, waited=1.0)
    passing.loop(timer, 1, 11, 10.0, waited=4.0)
    passing.loop(timer, 11, 21, 10.0, waited=25.0)  # a measure from the devices cannot exceed the loop
    assert _spent(account) == {"compiling": 30.0, "steps": 6.0, "input_wait": 14.0}
    assert timer.steps_per_sec() == pytest.approx(1.0)
    assert timer.reached_step == 21


def test_steps_that_an_earlier_start_did_are_recomputed(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    timer = clock.LoopClock(account, start_step=100, reached_before=125)
    for begin, end in ((100, 101), (101, 111), (111, 121), (121, 131), (131, 141)):
        passing.loop(timer, begin, end, float(end - begin), waited=0.1 * (end - begin))
    spent = _spent(account)
    assert spent["recomputed"] == pytest.approx(0.9 * 24)  # 101..125, the last loop by its share
    assert spent["steps"] == pytest.approx(0.9 * 16)


def test_a_rollback_makes_steps_recomputed_once(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    timer = clock.LoopClock(account, start_step=0, reached_before=0)
    passing.loop(timer, 0, 1, 1.0)
    for begin in range(1, 51, 10):
        passing.loop(timer, begin, begin + 10, 10.0)
    timer.on_rollback(31, 51)
    assert timer.reached_step == 51, "it goes on behind what was undone"
    assert {k: v for k, v in _spent(account).items() if k != "compiling"} == {"steps": 30.0, "recomputed": 20.0}
    for begin in range(51, 81, 10):
        passing.loop(timer, begin, begin + 10, 10.0)
    timer.on_rollback(66, 81)  # within a loop: its share
    assert {k: v for k, v in _spent(account).items() if k != "compiling"} == {"steps": 45.0, "recomputed": 35.0}
    timer.on_rollback(31, 81)  # the checkpoint of 66 is no good either
    assert {k: v for k, v in _spent(account).items() if k != "compiling"} == {"steps": 30.0, "recomputed": 50.0}


def test_a_rollback_of_a_long_run_is_still_known(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    timer = clock.LoopClock(account, start_step=0, reached_before=0)
    for step in range(20_001):
        passing.loop(timer, step, step + 1, 1.0)
    timer.on_rollback(15_001, 20_001)
    assert _spent(account) == {"compiling": 1.0, "steps": 15_000.0, "recomputed": 5_000.0}
    assert len(timer._curve) < 5000  # and does not grow with the run


def test_an_error_in_a_loop_does_not_leave_its_clock_running(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    timer = clock.LoopClock(account, start_step=0, reached_before=0)
    account.start_is_over()
    timer.on_loop_begin(0)
    passing.now += 3.0
    timer.on_end()
    passing.now += 2.0
    assert _spent(account) == {"compiling": 3.0, "other": 2.0}


def test_a_part_ends_with_what_an_error_left_open_inside(passing: _Time) -> None:
    account = clock.Clock(passing.now)
    account.start_is_over()
    with pytest.raises(RuntimeError), account.measure("evaluation"):
        account.begin("checkpoint_stall")
        passing.now += 3.0
        raise RuntimeError
    passing.now += 2.0
    assert _spent(account) == {"checkpoint_stall": 3.0, "other": 2.0}
