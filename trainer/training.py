"""The training of a run: which call of the train loop comes next, and what happens between two calls.

Between two calls, and only there, the host looks: it writes records, evaluates, saves, deals with numbers that are not
finite, and stops when asked to. Workers decide together (`agree`), because one that leaves the others alone in a call
would leave them waiting for ever.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer import storage
from trainer.callbacks import Callback, Loop
from trainer.checkpoints.store import Checkpoints
from trainer.config import Config
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.plan import Plan
from trainer.replicated import METRICS, Logs, Replicated

# Of the time from a request to stop to the end of the process: what is left for writing the last words.
_LAST_WORDS_SECS = 1.0
_MAX_FAILED_FLUSHES = 3  # in a row

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Position:
    """How far a run is: what a checkpoint holds beside arrays.

    step: steps done. It is the data position too: the order of records is a function of it.
    evaluated: step of the newest evaluation, -1 before the first; metrics: what it found.
    passed_over: ranges [begin, end) of steps that were not finite, or were undone because of one that was not.
    """

    step: int = 0
    evaluated: int = -1
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    passed_over: list[list[int]] = dataclasses.field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """All but the step, as JSON holds it; without metrics that are of an earlier step, and say nothing of this."""
        facts = dataclasses.asdict(self)
        del facts["step"]
        return facts | {"metrics": self.metrics if self.evaluated == self.step else {}}


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the training asks of the run around it.

    agree: sums, over all workers, what each of them says; they call it together.
    stop_reason: why this process was asked to stop, or None.
    progress: told the step and what is being done, at least once a call.
    compiling: `with compiling()` around a call that may take long, as it compiles.
    check: raises what makes it wrong to go on, such as another process that took the run over.
    examine: looks into the step that was not finite, with the state before it; returns what to tell the user.
    alert: `alert(event, message, severity=..., step=...)`.
    measure: `with measure(part)` counts time towards a part of the run.
    """

    agree: Callable[[Sequence[int]], list[int]]
    stop_reason: Callable[[], str | None]
    progress: Callable[[int, str], None]
    compiling: Callable[[], contextlib.AbstractContextManager[None]]
    check: Callable[[], None]
    examine: Callable[[int], str]
    alert: Callable[..., None]
    measure: Callable[[str], contextlib.AbstractContextManager[None]]


class Training:
    """Trains from a position to the last step of the plan. `at` says how far it is, at any time.

    Args:
        at: where to begin; the state of `replicated` is that of there.
        batches: iterator over the global batches from a step on.
        evaluate: metrics over the evaluation split, or None where `goes_on`, asked now and then, said no; None in place
            of it: the run evaluates nothing.
        store: of checkpoints; all workers read them, the chief writes them.
        is_chief: whether this worker is the one that writes.
        has_evaluator: whether another process evaluates the checkpoints: then one is saved wherever an evaluation is
            due, and `evaluate` is for the last step alone, so that the end depends on nobody.
        flush: makes all records so far durable: a run that goes on from a checkpoint does not write them again.
        callbacks: are told of loops and evaluations, in this order.
    """

    def __init__(
        self,
        at: Position,
        replicated: Replicated,
        plan: Plan,
        config: Config,
        around: Surroundings,
        *,
        batches: Callable[[int], Iterator],
        evaluate: Callable[[Callable[[], bool]], Logs | None] | None,
        store: Checkpoints,
        is_chief: bool,
        has_evaluator: bool,
        flush: Callable[[], None],
        callbacks: Sequence[Callback],
    ):
        if config.on_nonfinite == "skip" and not replicated.halts_exactly:
            raise ConfigError(
                "the model has several optimizers, and when one finds that a step is not finite another may have been "
                "applied: such a step cannot be skipped. Received: on_nonfinite=skip. Use stop or rollback"
            )
        self.at = at
        self._replicated, self._plan, self._config, self._around = replicated, plan, config, around
        self._batches, self._evaluate_all, self._store, self._is_chief = batches, evaluate, store, is_chief
        self._has_evaluator = has_evaluator
        self._flush = flush
        self._callbacks = callbacks
        self._iterator: Iterator | None = None
        self._calls = 0
        self._longest = config.steps_per_loop
        self._secs_of_step = 0.0
        self._saved_at = time.monotonic()
        self._wants_save = False
        self._warned_of_grace = False
        self._failed_flushes = 0

    def run(self) -> None:
        """To the last step, its evaluation and its checkpoint.

        Raises:
            RetryError: asked to stop; everything up to `at.step` is saved.
            ConfigError: a step was not finite, and the policy or its budget says to stop.
        """
        while not self._is_done():
            self._around.check()
            if self._evaluation_is_due():
                self._evaluate()
            else:
                self._train()
            stop, save = self._agree()
            if stop:
                self._stop()
            if save:
                self._save()
        if self._failed_flushes:
            self._save_for_good()
        self._wait_for_saves()

    def close(self, *, silently: bool = False) -> None:
        """Lets go of the data, and tells the callbacks that it is over, unless nothing may be written any more."""
        self._iterator = None
        for callback in [] if silently else self._callbacks:
            callback.on_end()

    def _is_done(self) -> bool:
        return self.at.step >= self._plan.train_steps and not self._evaluation_is_due()

    def _evaluation_is_due(self) -> bool:
        if self._evaluate_all is None or self.at.step == 0:
            return False
        if self._has_evaluator and self.at.step < self._plan.train_steps:
            return False
        return self._plan.ends_segment(self.at.step) and self.at.evaluated < self.at.step

    # What is done.

    def _train(self) -> None:
        begin = self.at.step
        # The first call is a single step: it holds the compilation, which is measured apart from training.
        end = self._plan.loop_end(begin, self._longest if self._calls else 1)
        if self._iterator is None:
            self._iterator = self._batches(begin)
        for callback in self._callbacks:
            callback.on_loop_begin(begin)
        begun = time.monotonic()
        with contextlib.nullcontext() if self._calls else self._around.compiling():
            trained = self._replicated.run_train_loop(self._iterator, end - begin, lambda: self._again(begin))
        seconds = time.monotonic() - begun
        undone, learning_rate = None, trained.learning_rate
        if trained.halted_at is None:
            self._time_steps(end - begin, seconds)
        else:
            end = begin + trained.halted_at + 1
            with self._around.measure("other"):  # the loop's clock still runs, and a post-mortem is no training
                undone = self._pass_over(end - 1)
            learning_rate = self._replicated.learning_rate()  # behind what was passed over
        waited = min(trained.input_wait_secs, seconds)
        self._loop_is_over(Loop(begin, end, seconds, waited, trained.logs, learning_rate, first=self._calls == 0))
        self._calls += 1
        if undone is not None:
            for callback in self._callbacks:
                callback.on_rollback(undone, end)
            self._wants_save = not self._evaluation_is_due()

    def _again(self, begin: int) -> Iterator:
        """The batches of a call once more, for one of its steps is not finite."""
        self._around.progress(begin, "looking for a step that is not finite")
        return self._batches(begin)

    def _time_steps(self, steps: int, seconds: float) -> None:
        # That of the first call, with the compilation in it, is a bound until there is a better one.
        remembered = 0.8 * self._secs_of_step if self._calls > 1 else 0.0
        self._secs_of_step = max(seconds / steps, remembered)

    def _loop_is_over(self, loop: Loop) -> None:
        self.at.step = loop.end
        self._around.progress(loop.end, "training")
        for callback in self._callbacks:
            callback.on_loop_end(loop)
        if self._plan.is_report(loop.end):
            self._replicated.reset_metrics()
        is_for_evaluator = self._has_evaluator and self._plan.ends_segment(loop.end)
        if not self._evaluation_is_due() and (self._plan.is_checkpoint(loop.end) or is_for_evaluator):
            self._wants_save = True

    def _evaluate(self) -> None:
        self._around.progress(self.at.step, "evaluating")
        metrics = self._evaluate_all(self._goes_on) if self._evaluate_all else None
        if metrics is None:
            return  # asked to stop; it is done again after the restart
        self.at.evaluated, self.at.metrics = self.at.step, metrics
        for callback in self._callbacks:
            callback.on_evaluation(self.at.step, metrics)
        is_best = self._is_chief and self._store.is_among_best(metrics)
        self._wants_save = self._plan.is_checkpoint(self.at.step) or is_best

    # What is decided, by all workers together.

    def _agree(self) -> tuple[bool, bool]:
        """Whether to stop, whether to save; and how long the next call may be."""
        every = self._config.checkpoint_every_secs
        overdue = every is not None and time.monotonic() - self._saved_at >= every
        save = self._wants_save or (overdue and not self._evaluation_is_due())
        stop = self._around.stop_reason() is not None
        mine = [int(stop), int(save), self._bounded_loop()] if self._is_chief else [int(stop), 0, 0]
        stops, saves, longest = self._around.agree(mine)
        self._longest = longest
        self._wants_save = False
        return stops > 0, saves > 0

    def _goes_on(self) -> bool:
        """Asked between two calls of an evaluation."""
        self._around.check()
        self._around.progress(self.at.step, "evaluating")
        return self._around.agree([int(self._around.stop_reason() is not None)])[0] == 0

    def _bounded_loop(self) -> int:
        """Steps of a call, such that two of them and a save fit into the grace period.

        A request may come just after the workers have looked: one call ends, another one runs.
        """
        budget = (self._config.grace_secs - self._store.write_secs - _LAST_WORDS_SECS) / 2
        steps = math.floor(budget / self._secs_of_step) if self._secs_of_step else self._config.steps_per_loop
        # The first call tells of the compilation, not yet of a step.
        if steps < 1 and self._calls > 1 and not self._warned_of_grace:
            self._warned_of_grace = True
            _log.warning(
                "a step takes %.1f s and a save %.1f s: a request to stop may not leave the time to save within "
                "--grace_secs=%g, and the work since the last checkpoint would be done again. Raise it, and what the "
                "scheduler grants, or save more often",
                self._secs_of_step,
                self._store.write_secs,
                self._config.grace_secs,
            )
        return max(1, min(self._config.steps_per_loop, steps))

    def _stop(self) -> None:
        reason = self._around.stop_reason() or "a request to another worker"
        self._save_for_good()
        raise RetryError(
            f"stopped by {reason} at step {self.at.step:,} of {self._plan.train_steps:,}, which is saved. "
            "The same command goes on from there"
        )

    def _save(self) -> None:
        """Saves this very moment; of what it takes, the loop waits for the copy to the host."""
        self._replicated.check_integer_state()
        with self._around.measure("checkpoint_stall"):
            if not self._is_chief or not self._records_are_safe():
                self._replicated.state()  # together with the other workers: their metrics are summed
            else:
                self._store.save(self.at.step, self._replicated.state, self.at.facts())
        self._saved_at = time.monotonic()

    def _records_are_safe(self) -> bool:
        """A run that goes on from a checkpoint does not write the records before it again: no save without them."""
        try:
            self._flush()
        except storage.FILE_ERRORS as error:
            self._failed_flushes += 1
            if self._failed_flushes >= _MAX_FAILED_FLUSHES:
                raise
            message = f"step {self.at.step:,} is not saved, for its records cannot be written: {storage.reason(error)}"
            self._around.alert("failing_saves", message, step=self.at.step)
            return False
        self._failed_flushes = 0
        return True

    def _save_for_good(self) -> None:
        """Saves and waits until it is written; no worker leaves before."""
        self._failed_flushes = _MAX_FAILED_FLUSHES  # no later save makes up for this one
        self._save()
        self._wait_for_saves()
        self._around.agree([0])

    def _wait_for_saves(self) -> None:
        with self._around.measure("checkpoint_stall"):
            self._store.wait()

    # A step whose loss or gradients are not finite. It has changed nothing: the state is that before it.

    def _pass_over(self, step: int) -> int | None:
        """Goes on behind a step that was not finite; returns the step it went back to for that, if it did.

        Raises:
            ConfigError: that is not what the policy says, or its budget is used up. The state before the step is saved.
        """
        policy = self._config.on_nonfinite
        self._around.progress(step, "examining a step that is not finite")
        found = self._around.examine(step)
        ends = policy == "stop" or len(self.at.passed_over) >= self._config.max_nonfinite
        self._around.alert("nonfinite", found, severity="ERROR", is_in_log=ends, step=step)  # then as the last word
        self.at.step = step
        self._iterator = None  # has read on beyond the step
        if ends:
            raise self._stopped_at(step, found)
        first = self._go_back(step) if policy == "rollback" else step
        self.at.passed_over.append([first, step + 1])
        self._replicated.pass_over(first, step + 1)
        what = "went back to the checkpoint of step" if first < step else "passes over step"
        _log.warning("%s %s; going on at step %s", what, f"{first:,}", f"{step + 1:,}")
        return first if first < step else None

    def _go_back(self, step: int) -> int:
        """Puts back the newest checkpoint and returns its step; the metrics in the making stay what they were."""
        self._wait_for_saves()
        self._around.agree([0])  # what the chief has written is what all read
        saved = self._store.newest()
        if saved is None:
            _log.warning("no checkpoint to go back to: step %s is skipped", f"{step:,}")
            return step
        self._replicated.load_state({n: a for n, a in saved.arrays.items() if not n.startswith(METRICS)})
        return saved.step

    def _stopped_at(self, step: int, found: str) -> TrainerError:
        if not self._replicated.halts_exactly:
            self._wait_for_saves()
            return ConfigError(f"{found}\nThe last checkpoint is of a step before it. Mend the cause and run again")
        self._save_for_good()
        if self._config.on_nonfinite != "stop":
            return ConfigError(
                f"{found}\n--max_nonfinite={self._config.max_nonfinite} is used up. The state before step {step:,} is "
                "saved; see to the cause, a lower learning rate perhaps, or raise the budget"
            )
        return ConfigError(
            f"{found}\nThe state before step {step:,} is saved. Mend the cause, or run the same command with "
            "--on_nonfinite=skip to go on without the step"
        )
