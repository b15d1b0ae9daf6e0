"""The loop of `scripts/tune`: starts trials, looks at them while they run, and says what came of each."""

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from optuna.trial import Trial

from scripts.launchers.study import Study
from scripts.tuning.history import History
from scripts.tuning.trial import TrialProcess
from trainer.errors import EXIT_OK, ConfigError, RetryError

_POLL_SECS = 0.5
# If so many trials fail before any succeeds, the others would too.
_GIVE_UP_AFTER = 3


@dataclasses.dataclass
class _Running:
    trial: Trial
    process: TrialProcess
    is_pruned: bool = False


class Tuner:
    """Runs a study to its end.

    Args:
        study: what is to be found out.
        history: what has been, and will be, tried.
        start: starts the process of a trial, given its number and its values by parameter.
        say: takes a line for the user.
    """

    def __init__(
        self,
        study: Study,
        history: History,
        start: Callable[[int, Mapping[str, Any]], TrialProcess],
        say: Callable[[str], None],
    ):
        self._study, self._history, self._start, self._say = study, history, start, say
        self._running: list[_Running] = []
        self._failures: list[str] = []  # of this start, until one has succeeded
        self._has_succeeded = False
        self._signals: list[signal.Signals] = []

    def run(self) -> None:
        """Runs all trials that are left.

        Raises:
            RetryError: SIGTERM or SIGINT came; trials were told, have saved, and go on with the next start.
            ConfigError: all trials fail, or evaluations lack the metric.
        """

        def note(number: int, _frame: object) -> None:
            self._signals.append(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for trial in self._history.interrupted():
                self._say(f"trial {trial.number} goes on")
                self._begin(trial)
            while self._fill() or self._running:
                time.sleep(_POLL_SECS)
                if self._signals:
                    raise RetryError("stopped; the same command goes on with every trial where it is")
                for running in list(self._running):
                    self._look_at(running)
        finally:
            self._end_all()
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _fill(self) -> bool:
        """Starts trials where there is room; whether it did."""
        begun = False
        while len(self._running) < self._study.parallel and (trial := self._history.ask()) is not None:
            self._begin(trial)
            begun = True
        return begun

    def _begin(self, trial: Trial) -> None:
        self._running.append(_Running(trial, self._start(trial.number, trial.params)))

    def _look_at(self, running: _Running) -> None:
        # The exit code first: what the process wrote before it ended is there then.
        code = running.process.poll()
        found = running.process.evaluations(self._study.metric)
        if found.others and self._study.metric not in found.others:
            raise ConfigError(
                f"evaluations have no metric {self._study.metric!r}; they have {', '.join(sorted(found.others))}. "
                "Name one of these as metric in [study]"
            )
        values = {step: value for step, value in found.values.items() if math.isfinite(value)}
        if not running.is_pruned and self._history.report(running.trial, values) and code is None:
            running.is_pruned = True
            running.process.signal(signal.SIGTERM)
        if running.is_pruned and running.process.has_ended:
            self._close(running, lambda: self._history.prune(running.trial), "ended early, below the median")
        elif code is not None and not running.is_pruned:
            self._take(running, code, found.values)

    def _take(self, running: _Running, code: int, values: Mapping[int, float]) -> None:
        """Writes down how a trial has ended."""
        value = values[max(values)] if values else math.nan
        if code == EXIT_OK and math.isfinite(value):
            self._has_succeeded = True
            outcome = f"{self._study.metric} {value:.6g}"
            self._close(running, lambda: self._history.complete(running.trial, value), outcome)
            return
        reason = f"exit code {code}: {running.process.last_words()}"
        if code == EXIT_OK:
            reason = f"{self._study.metric} is {value}" if values else "it evaluated nothing"
        self._failures.append(f"trial {running.trial.number} failed, {reason} (see {running.process.log})")
        self._close(running, lambda: self._history.fail(running.trial, reason), f"failed, {reason}")
        if not self._has_succeeded and len(self._failures) >= min(_GIVE_UP_AFTER, self._history.num_trials):
            raise ConfigError(f"no trial succeeds; the last of {len(self._failures)}: {self._failures[-1]}")

    def _close(self, running: _Running, record: Callable[[], None], outcome: str) -> None:
        self._running.remove(running)
        record()
        best = self._history.best
        so_far = f"; best {best.value:.6g} of trial {best.number}" if best is not None else ""
        ended = len(self._history.trials) - len(self._running)
        self._say(f"trial {running.trial.number} ({ended} of {self._history.num_trials}): {outcome}{so_far}")

    def _end_all(self) -> None:
        """Lets what still runs save and end; a second signal kills it."""
        for running in self._running:
            running.process.signal(signal.SIGTERM)
        while any(not running.process.has_ended for running in self._running):
            if len(self._signals) > 1:
                for running in self._running:
                    running.process.signal(signal.SIGKILL)
            time.sleep(_POLL_SECS)
