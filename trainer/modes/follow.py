"""The evaluator of a cluster: evaluates each checkpoint of a run that other processes train.

It reads what they write and writes beside it, in `evaluator/` of the run: nothing of the run waits for it, and any
number of its own starts end with the same evaluations.
"""

import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from trainer import console, guard, logs, run_dir, storage
from trainer.assembly import Assembly
from trainer.callbacks import evaluations
from trainer.callbacks.events import Events
from trainer.callbacks.lines import Lines
from trainer.callbacks.records import Record
from trainer.checkpoints.directory import Marker
from trainer.checkpoints.reader import Reader
from trainer.checkpoints.store import RETRY_WAITS_SECS
from trainer.errors import EXIT_CONFIG, ConfigError, RetryError, TrainerError
from trainer.watch import status

# Between two looks: soon after something has happened, then ever more rarely. A look at gs:// is some ten requests.
_FIRST_POLL_SECS, _LAST_POLL_SECS = 0.5, 10.0
_POLLS_PER_STALL = 8  # at least: the watch for stalls wants to hear of this process
_JITTER = 0.5  # of a wait, either way
_SAY_EVERY_SECS = 60.0  # that it waits

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Follow:
    """The evaluator of one run; `go` does it.

    Args:
        run: put together on the devices of this process alone; its folder is that of the run.
        watched: watches over this process, in the directory `evaluator`.
    """

    def __init__(self, run: Assembly, watched: guard.Guard):
        self._run, self._watched = run, watched
        self._reader = Reader(run.folder.file(run_dir.CHECKPOINTS))
        self._path = run.folder.file(run_dir.EVALUATIONS)
        self._events = Events(f"{run.folder.tensorboard_dir}/{run_dir.EVALUATOR}")
        self._lines = Lines(run.plan.train_steps)
        self._found: list[evaluations.Evaluation] = []  # all that stands in the file, by step
        self._evaluates_first = True
        self._heard = _Heard(run.config.stall_secs, run.config.connect_timeout_secs, run.folder.path)
        self._pause_secs, self._said_at = _FIRST_POLL_SECS, -_SAY_EVERY_SECS

    def go(self) -> None:
        """Evaluates until the last step of the run is evaluated.

        Raises:
            RetryError: nothing was heard of the run for too long, or another evaluator is at work.
            TrainerError: the run has failed; with its exit code.
        """
        _log.info("evaluator: evaluates each checkpoint of %s", self._run.folder.path)
        while self._look() is None or self._run.folder.read(run_dir.CONFIG) is None:
            self._wait("the run to begin")
        self._run.folder.check_resumable(self._run.config, self._run.inputs.identity())
        self._watched.take_over(num_devices=self._run.devices.num_replicas)
        self._resume()
        _log.info("%s", self._run.summary(self._step))
        self._run.clock.start_is_over()
        while True:
            found = self._look()  # before the checkpoints: of a run that has finished, all are seen then
            complete = self._reader.complete()
            done = {evaluation.arrays for evaluation in self._found}
            pending = [marker for marker in complete if marker.bundle_name not in done]
            for marker in pending:
                self._evaluate(marker)
            if pending:
                self._pause_secs = _FIRST_POLL_SECS
            elif self._is_over(complete, found):
                break
            else:
                self._heard.check_failure(found)
                self._wait(f"a checkpoint after step {self._step:,}")
        self._events.close()
        account = console.account(self._run.clock.seconds())
        _log.log(logs.RESULT, "%s", console.results(self._found[-1].metrics if self._found else {}, None, account))
        self._watched.outcome = f"evaluated to step {self._step:,}"

    @property
    def _step(self) -> int:
        """Of the newest evaluation."""
        return self._found[-1].step if self._found else 0

    def _look(self) -> status.Status | None:
        """What the run says of itself; None before it has begun."""
        found = self._patiently(lambda: _status(self._run.folder.path))
        self._heard.note(found)
        return found

    def _resume(self) -> None:
        """Goes on behind what an earlier start has evaluated."""
        self._found = self._patiently(lambda: evaluations.read(self._path))
        self._events.drop_after(self._step)

    def _is_over(self, complete: list[Marker], found: status.Status | None) -> bool:
        """Whether nothing will come any more, with all that is there evaluated.

        The last checkpoint says so; and, should that be gone, the run, unless it finished as a shorter one before.
        """
        last = self._run.plan.train_steps
        finished = found is not None and found.state == "finished" and (found.step or 0) >= last
        return finished or any(marker.step == last for marker in complete)

    def _evaluate(self, marker: Marker) -> None:
        """Evaluates a checkpoint and writes down what was found, unless it is gone meanwhile."""
        self._progress(marker.step, "evaluating")
        saved = self._reader.read(marker)
        if saved is None:
            return
        self._run.replicated.restore(saved.arrays, saved.path)
        # The first one compiles.
        with self._watched.compiling() if self._evaluates_first else contextlib.nullcontext():
            metrics = self._run.evaluate(lambda: self._progress(marker.step, "evaluating")) or {}
        self._evaluates_first = False
        self._write(evaluations.Evaluation(marker.step, marker.bundle_name, metrics))

    def _write(self, found: evaluations.Evaluation) -> None:
        """First to TensorBoard: what is there of a step without a line of its own is voided by the next start."""
        record = Record(found.step, {f"eval/{name}": float(value) for name, value in found.metrics.items()})
        if found.step <= self._step:  # the run went back and came here anew
            self._events.drop_after(found.step - 1)
        self._events.write(record)
        self._patiently(self._events.flush)
        self._patiently(self._watched.confirm)
        self._found = self._patiently(lambda: evaluations.add(self._path, found))
        self._lines.write(record)

    def _progress(self, step: int, phase: str) -> bool:
        self._watched.check()
        self._watched.progress(step, phase)
        return True

    def _wait(self, what: str) -> None:
        """Waits a while for `what`, longer from time to time, and says so now and then."""
        self._heard.check_silence(what)
        if time.monotonic() - self._said_at >= _SAY_EVERY_SECS:
            self._said_at = time.monotonic()
            _log.info("waiting for %s", what)
        self._progress(self._step, f"waiting for {what}")
        stall_secs = self._run.config.stall_secs
        longest = min(_LAST_POLL_SECS, stall_secs / _POLLS_PER_STALL) if stall_secs else _LAST_POLL_SECS
        self._pause_secs = min(2 * self._pause_secs, longest)
        with self._run.clock.measure("waiting"):
            time.sleep(self._pause_secs * random.uniform(1 - _JITTER, 1 + _JITTER))

    def _patiently(self, work: Callable[[], _T]) -> _T:
        """What `work` on files returns, tried again where that may help.

        Raises:
            RetryError: storage did not answer.
            storage.FILE_ERRORS: as `storage.explained` takes them.
        """
        try:
            return storage.retry(work, RETRY_WAITS_SECS, storage.is_passing)
        except storage.FILE_ERRORS as error:
            if not storage.is_passing(error):
                raise
            received = f"Received: {self._run.folder.path}: {storage.reason(error)}"
            raise RetryError(f"storage did not answer. Run again once it does. {received}") from error


class _Heard:
    """What is heard of the run: its heartbeat, and whether it has failed.

    Args:
        stall_secs: of silence after which nobody should go on waiting; None: for ever.
        restart_secs: in which a run that had failed before this process began may be started again.
        model_dir: for messages.
    """

    def __init__(self, stall_secs: float | None, restart_secs: float, model_dir: str):
        self._stall_secs, self._restart_secs, self._model_dir = stall_secs, restart_secs, model_dir
        self._sign: status.Status | None = None
        self._at = self._began = time.monotonic()
        self._failed_before: str | None = None  # owner of a status that said so from the start
        self._is_first = True

    def note(self, found: status.Status | None) -> None:
        """Takes what status.json holds now; whatever changes in it is a sign of life."""
        if self._is_first and found is not None and found.state == "failed":
            self._failed_before = found.owner
        if found != self._sign:
            self._sign, self._at = found, time.monotonic()
        self._is_first = False

    def check_silence(self, what: str) -> None:
        """Raises RetryError when nothing was heard for too long."""
        if self._stall_secs is None or time.monotonic() - self._at < self._stall_secs:
            return
        last = f"{self._sign.who}, {self._sign.state}: {self._sign.phase}" if self._sign else "it has not begun"
        raise RetryError(
            f"nothing was heard of the run for --stall_secs={self._stall_secs:g}, waiting for {what}. See to the run "
            f"and start its evaluator again. Received: --model_dir={self._model_dir} ({last})"
        )

    def check_failure(self, found: status.Status | None) -> None:
        """Ends as the run did when it has failed, so that a scheduler deals with both alike.

        Raises:
            TrainerError: with the exit code of the run.
        """
        if found is None or found.state != "failed":
            return
        if found.owner == self._failed_before and time.monotonic() - self._began < self._restart_secs:
            return  # it may be starting again, as this process is
        message = f"the run in {self._model_dir} has failed, and its evaluator ends with it: {found.reason}"
        raise ConfigError(message) if found.exit_code == EXIT_CONFIG else TrainerError(message)


def _status(model_dir: str) -> status.Status | None:
    try:
        return status.read(model_dir)
    except ValueError:  # neither that there is none, nor how far it is
        return status.unreadable()
