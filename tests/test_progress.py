"""How far a run is as text, and the estimate behind it, in pure arithmetic of a clock that the test sets."""

import dataclasses
import time

import pytest

from trainer import plan, progress
from trainer.callbacks import Loop, pace
from trainer.callbacks.clock import Clock, LoopClock
from trainer.config import Config
from trainer.progress import Progress

_AT = Progress(1_004, 2_400, 240.0, steps_per_sec=1_204.3, secs_left=151.2, loss=0.43121)


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.9, "1 min 00 s"),
        (151, "2 min 31 s"),
        (3_725, "1 h 02 min"),
        (86_399, "23 h 59 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_say_their_units(secs: float, text: str) -> None:
    assert progress.duration(secs) == text


def test_the_live_line_holds_everything_where_there_is_room() -> None:
    text = progress.live(160, "evaluating 12 s", _AT)
    bar, rest = text.split("  ", 1)
    assert (bar.count("━"), bar.count("─")) == (12, 18)
    assert rest == "41%  step 1,004/2,400  epoch 4.2  loss 0.4312  1,204 steps/s  2 min 31 s left  evaluating 12 s"


def test_a_narrow_terminal_loses_what_matters_least() -> None:
    for columns in range(1, 200):
        assert len(progress.live(columns, "evaluating 12 s", _AT)) <= columns
    assert progress.live(40, "", _AT) == "41%  step 1,004/2,400  2 min 31 s left"
    assert progress.live(14, "evaluating 12 s", _AT) == "41%"
    assert progress.live(8, "compiling") == "compilin"


def test_nothing_is_said_that_is_not_known() -> None:
    first = Progress(0, 100, 0.0)
    assert progress.live(80, "", first).strip("─ ") == "0%  step 0/100"
    slow = dataclasses.replace(first, steps_per_sec=0.4, secs_left=0.2)
    assert progress.rate(slow) == ["2.5 s/step"]
    assert progress.left(slow) == []


class _Run:
    """A run on a clock of its own, with a `Pace` that watches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, start_step: int = 0, **options: object):
        self.now = 1_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        wanted = {"global_batch_size": 10, "eval_every_steps": 100, "checkpoint_every_steps": 50, **options}
        config = dataclasses.replace(Config(), **wanted)
        self.plan = plan.resolve(config, num_replicas=1, num_train_examples=1_000, num_eval_examples=200)
        self.clock = Clock(self.now)
        self.step, self._first = start_step, True
        self._timer = LoopClock(self.clock, start_step=start_step, reached_before=start_step)
        self.pace = pace.Pace(
            self.plan, self.clock, start_step=start_step, evaluate_every_steps=self.plan.eval_every_steps
        )

    def train(self, steps: int, secs: float) -> None:
        begin, self.step = self.step, self.step + steps
        self._timer.on_loop_begin(begin)
        self.now += secs
        loop = Loop(begin, self.step, secs, 0.0, {"loss": 1.0}, 0.1, first=self._first)
        for callback in (self._timer, self.pace):
            callback.on_loop_end(loop)
        self._first = False

    def evaluate(self, secs: float) -> None:
        with self.clock.measure("evaluation"):
            self.now += secs
        self.pace.on_evaluation(self.step, {})

    def save(self, secs: float) -> None:
        with self.clock.measure("checkpoint_stall"):
            self.now += secs

    def left(self) -> float | None:
        return self.pace.progress().secs_left


def test_the_time_left_does_not_follow_from_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, train_steps=1_000, eval_every_steps=1_000, checkpoint_every_steps=1_000)
    run.train(1, 60.0)
    assert run.left() is None
    run.train(99, 99.0)
    at = run.pace.progress()
    assert (at.step, at.percent, at.epoch, at.loss) == (100, 10.0, 1.0, 1.0)
    assert at.steps_per_sec == pytest.approx(1.0)
    # Before an evaluation was seen: its 20 batches at a third of a step each.
    assert at.secs_left == pytest.approx(900 + 20 / 3)
    run.now += 40.0  # within a long call
    assert run.left() == pytest.approx(860 + 20 / 3)


def test_evaluations_and_checkpoints_to_come_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, train_steps=1_000)
    run.train(1, 60.0)
    run.train(49, 49.0)
    run.save(2.0)
    run.train(50, 50.0)
    assert run.left() == pytest.approx(900 + 10 * 20 / 3 + 19 * 1.0 - 0, abs=1.0)
    run.evaluate(30.0)  # compiles
    run.save(2.0)
    assert run.left() == pytest.approx(900 + 9 * 30 + 18 * 2.0 - 2.0)
    run.train(100, 100.0)
    run.evaluate(5.0)
    assert run.left() == pytest.approx(800 + 8 * 5 + 16 * 4 / 3)
    for _ in range(8):
        run.train(100, 100.0)
        run.evaluate(5.0)
    assert run.left() == pytest.approx(0.0)


def test_a_resumed_run_is_judged_by_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, start_step=900, train_steps=1_000, eval_every_steps=1_000, checkpoint_every_steps=1_000)
    run.train(1, 60.0)
    run.train(9, 18.0)
    assert run.left() == pytest.approx(180 + 2 * 20 / 3)


def test_the_time_left_follows_a_run_that_gets_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, train_steps=10_000, eval_every_steps=10_000, checkpoint_every_steps=10_000)
    run.train(1, 60.0)
    run.train(999, 999.0)
    for _ in range(20):
        run.train(100, 200.0)
    assert run.pace.progress().steps_per_sec == pytest.approx(0.5, rel=0.01)
