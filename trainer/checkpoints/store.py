"""The checkpoints of a run: saved while training goes on, complete or not there at all, found again and kept few.

This file: when a save runs, what its failure means for the run, which checkpoints stay.
directory.py: what lies in the directory, what makes it complete and whole. bundle.py: the bytes of arrays.

The store knows arrays by name and nothing of where they come from. Only the chief saves; every worker may read.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer import storage
from trainer.checkpoints import directory as directory_lib
from trainer.checkpoints.bundle import DamagedError
from trainer.checkpoints.directory import Arrays, CheckpointDir, Marker, Saved
from trainer.errors import ConfigError, RetryError
from trainer.storage import Fault

# Waits of one save before its next try. TensorFlow's client for gs:// has tried each request for a minute by then.
RETRY_WAITS_SECS = storage.RETRY_WAITS_SECS
# One failed save is bad luck. After so many in a row a run would only get further from its last checkpoint.
MAX_FAILED_SAVES = 3
_MIB = 1 << 20

_log = logging.getLogger(__name__)


class _Failure(NamedTuple):
    """A save that failed for good."""

    kind: Fault
    message: str


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: where they are, local or gs://; the directory around it must exist by the first save.
        keep: how many of the newest stay.
        keep_best: how many of the best stay besides.
        best_metric: name in `facts["metrics"]`; a checkpoint without it, or with NaN, is never best.
        best_goal: min or max: whether less or more of it is better.
        evaluations: metrics that another process found, by the name of the arrays (`Marker.bundle_name`) that it
            evaluated; they count in place of those in the facts.
        fence: raises when this process no longer owns the run; asked before anything is removed or committed.
        on_failure: told once of every save that failed for good, in the thread that saves.
        on_commit: told the step of every checkpoint that is complete, in the thread that saves.
        retry_waits_secs: waits before a save or a read that failed for a passing reason is tried again.

    Attributes:
        write_secs: seconds the last save took in the background.
        stall_secs: seconds callers were held up by `save` and `wait`, summed.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep: int,
        keep_best: int,
        best_metric: str,
        best_goal: str,
        evaluations: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        fence: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda message: None,
        on_commit: Callable[[int], None] = lambda step: None,
        retry_waits_secs: Sequence[float] = RETRY_WAITS_SECS,
    ):
        if keep < 1 or keep_best < 0:
            raise ConfigError(f"keep must be at least 1, keep_best at least 0. Received: {keep}, {keep_best}")
        self.directory = directory.rstrip("/")
        self.write_secs = 0.0
        self.stall_secs = 0.0
        self._dir = CheckpointDir(directory, retry_waits_secs)
        self._keep, self._keep_best = keep, keep_best
        self._best_metric, self._sign = best_metric, {"min": 1, "max": -1}[best_goal]
        self._evaluations = evaluations
        self._fence, self._on_failure, self._on_commit = fence, on_failure, on_commit
        self._waits = retry_waits_secs
        self._thread: threading.Thread | None = None
        self._failures: list[_Failure] = []  # of the saves since the last that succeeded
        self._error: BaseException | None = None  # of the fence, or a defect: no save will succeed any more
        self._safe: int | None = None  # step of the newest checkpoint known to be complete
        self._whole: set[int] = set()  # steps whose bundle this process has seen whole
        self._was_there = False
        self._scores: dict[int, float] = {}  # of complete checkpoints that have the metric, the less the better

    def save(self, step: int, arrays: Arrays | Callable[[], Arrays], facts: Mapping[str, Any]) -> None:
        """Begins to save in the background, once the save before is done; `arrays` must not change any more.

        A step that is complete with these very arrays gets the new facts and nothing else.

        Args:
            step: steps done.
            arrays: by name; or what makes them, called once the save before has let go of its own, so that there is
                never more than one copy.
            facts: what JSON can hold; `facts["metrics"]` decides what is best.

        Raises:
            RetryError: the last saves could not be written, for want of space or of storage.
            ConfigError: the same, for want of permission or of the directory.
            BaseException: what `fence` raised, or a defect in the save before.
        """
        with self._stalled():
            self._join()
            self.check()
            if len(self._failures) >= MAX_FAILED_SAVES:
                raise self._given_up(f"{len(self._failures)} saves in a row failed. The last: ")
            state = dict(arrays() if callable(arrays) else arrays)
            self._thread = threading.Thread(
                target=self._save, args=(step, state, dict(facts)), name=f"save-{step}", daemon=True
            )
            self._thread.start()

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until nothing is being written.

        Raises:
            RetryError, ConfigError, BaseException: as `save`, at the first failure; RetryError when time is up.
        """
        with self._stalled():
            self._join(timeout_secs)
        self.check()
        if self._failures:
            raise self._given_up("")

    def check(self) -> None:
        """Raises at once what `fence` or a defect raised in the background, without waiting."""
        if self._error is not None:
            raise self._error

    @property
    def saving(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Waits until nothing is being written, and raises nothing."""
        self._join()

    def newest(self) -> Saved | None:
        """The newest checkpoint whose bytes are whole, with a warning for each that is not; None where there is none.

        Raises:
            ConfigError: there are checkpoints and all are damaged, or may not be read.
            RetryError: storage could not be read.
        """
        self._join()
        saved = self._dir.first_whole(_by_age)
        if saved is not None:
            markers = self._again(self._dir.markers)
            self._scores = {step: self._score(marker.facts) for step, marker in markers.items()}
            self._scores = {step: score for step, score in self._scores.items() if not math.isnan(score)}
            self._safe = saved.step
            self._whole.add(saved.step)
        return saved

    def best(self) -> Saved | None:
        """The best checkpoint whose bytes are whole; None where none has the metric. Raises as `newest`."""
        self._join()
        return self._dir.first_whole(self._by_metric)

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would stay as one of the best, as far as this process knows them."""
        score = self._score({"metrics": metrics})
        best = sorted(self._scores.values())[: self._keep_best]
        return not math.isnan(score) and (len(best) < self._keep_best or score <= max(best, default=-math.inf))

    def check_space(self, num_bytes: int) -> None:
        """Refuses a directory without room for one checkpoint of `num_bytes`; on gs:// there is always room.

        Raises:
            RetryError: with what is needed and what is free.
            ConfigError: the same, where even the empty disk would be too small.
        """
        if not storage.is_local(self.directory):
            return
        # The next save begins with removing what a killed one left.
        free = storage.free_bytes(self.directory) + self._dir.leftover_bytes()
        if free < num_bytes:
            needed = f"{_mib(num_bytes)} MiB needed, {_mib(free)} MiB free. Received: {self.directory}"
            if storage.total_bytes(self.directory) < num_bytes:
                raise ConfigError(f"the disk is too small for even one checkpoint: {needed}. Use another model_dir")
            # As when it fills up under the run: supervised, the run goes on once somebody has made room.
            raise RetryError(f"no space left for even one checkpoint: {needed}. Make room and run again")

    def _save(self, step: int, arrays: dict, facts: dict[str, Any]) -> None:
        """The background thread."""
        begun = time.perf_counter()
        try:
            try:
                self._write(step, arrays, facts)
            except (*storage.FILE_ERRORS, DamagedError) as error:
                failure = self._failure(step, arrays, error)
                self._failures.append(failure)
                _log.error("%s", failure.message)
                self._on_failure(failure.message)
            else:
                self._failures.clear()
                self._on_commit(step)
                self._tidy(self._remove_old)
        except BaseException as error:  # nobody stands above a thread: the run's next call gets it
            self._error = error
        finally:
            self.write_secs = time.perf_counter() - begun

    def _write(self, step: int, arrays: dict, facts: dict[str, Any]) -> None:
        self._fence()
        self._require_directory()
        markers = self._again(self._dir.markers)
        newest = next(iter(_by_age(list(markers.values()))), None)
        if self._safe is None and newest is not None:
            self._safe = newest.step
        old = markers.get(step)
        self._tidy(self._dir.remove_leftovers)
        described = directory_lib.describe(arrays)
        if old is not None and old.arrays == described and self._is_whole(old, arrays):
            name = old.bundle_name
        else:
            name = self._again(lambda: self._dir.write_bundle(step, arrays))

        def commit() -> None:
            self._fence()
            self._dir.commit(step, name, described, facts, serial=1 + (newest.serial if newest else 0))

        self._again(commit)
        self._safe = step
        self._whole.add(step)
        if not math.isnan(score := self._score(facts)):
            self._scores[step] = score
        self._dir.damaged.discard(step)

    def _require_directory(self) -> None:
        if self._was_there and storage.is_local(self.directory) and not storage.is_there(self.directory):
            raise FileNotFoundError(f"{self.directory} was removed while the run went on")
        storage.make_directory(self.directory)
        self._was_there = True

    def _is_whole(self, old: Marker, arrays: dict) -> bool:
        if old.step in self._whole:
            return True
        try:
            storage.retry(lambda: self._dir.verify(old, arrays), self._waits, storage.is_passing)
        except (*storage.FILE_ERRORS, DamagedError) as error:
            _log.warning("the checkpoint of step %d is written anew: %s", old.step, storage.reason(error))
            return False
        return True

    def _again(self, work: Callable[[], Any]) -> Any:
        return storage.retry(
            work, self._waits, lambda error: isinstance(error, DamagedError) or storage.is_passing(error)
        )

    def _failure(self, step: int, arrays: dict, error: Exception) -> _Failure:
        kind = Fault.TRANSIENT if isinstance(error, DamagedError) else storage.fault(error)
        why = f"{storage.remedy(error) or kind.value}: {storage.reason(error)}"
        if not storage.is_there(self.directory):
            kind, why = Fault.MISSING, f"the directory or its bucket is gone: {storage.reason(error)}"
        elif kind is Fault.SPACE:
            free = f", {_mib(storage.free_bytes(self.directory))} MiB free" if storage.is_local(self.directory) else ""
            needed = _mib(sum(array.nbytes for array in arrays.values()))
            why = f"no space left on {self.directory}, {needed} MiB needed{free}: {storage.reason(error)}"
        safe = "No checkpoint is safe" if self._safe is None else f"The newest that is safe is of step {self._safe}"
        return _Failure(kind, f"the checkpoint of step {step} could not be saved to {self.directory}. {safe}. {why}")

    def _given_up(self, prefix: str) -> ConfigError | RetryError:
        last = self._failures[-1]
        if last.kind in (Fault.DENIED, Fault.MISSING):
            return ConfigError(f"{prefix}{last.message}. Give the run a model_dir that is there and that it may write")
        return RetryError(f"{prefix}{last.message}. Run again once storage has room and answers")

    def _remove_old(self) -> None:
        """Removes what is neither among the newest nor among the best, what is damaged, and tries that failed."""
        whole = _by_age([marker for step, marker in self._dir.markers().items() if step not in self._dir.damaged])
        for marker in whole[:1]:
            self._dir.remove_strays(marker)
        stay = {marker.step for marker in whole[: self._keep]}
        stay |= {marker.step for marker in self._by_metric(whole)[: self._keep_best]}
        for step in self._dir.marked() - stay:
            self._whole.discard(step)
            self._dir.remove(step)

    def _tidy(self, work: Callable[[], None]) -> None:
        """Does what the next save can do just as well."""
        try:
            work()
        except storage.FILE_ERRORS as error:
            _log.warning("what is old in %s could not be removed yet: %s", self.directory, storage.reason(error))

    def _by_metric(self, markers: Sequence[Marker]) -> list[Marker]:
        """Those that can be best, best first; of equals the newer."""
        told = self._again(self._evaluations)
        scored = []
        for marker in markers:
            facts = {"metrics": told[marker.bundle_name]} if marker.bundle_name in told else marker.facts
            scored.append((self._score(facts), -marker.serial, marker))
        scored = [entry for entry in scored if not math.isnan(entry[0])]
        return [marker for _, _, marker in sorted(scored, key=lambda entry: entry[:2])]

    def _score(self, facts: Mapping[str, Any]) -> float:
        """The less the better; NaN for what can never be best."""
        return self._sign * (facts.get("metrics") or {}).get(self._best_metric, math.nan)

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.stall_secs += time.perf_counter() - begun

    def _join(self, timeout_secs: float | None = None) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            safe = "none" if self._safe is None else f"that of step {self._safe}"
            raise RetryError(
                f"a checkpoint was not written within {timeout_secs:g} s. The newest that is safe: {safe}. Run again"
            )
        self._thread = None


def load(path: str, *, only: str | tuple[str, ...] = "", retry_waits_secs: Sequence[float] = RETRY_WAITS_SECS) -> Saved:
    """The newest whole checkpoint that `path` means.

    Args:
        path: a model_dir, its directory of checkpoints, or one checkpoint.
        only: what names of arrays begin with to be read.
        retry_waits_secs: waits before a read that failed for a passing reason is tried again.

    Raises:
        ConfigError: nothing complete is there, or all of it is damaged.
        RetryError: storage could not be read.
    """
    directory, step = directory_lib.one_of(path, retry_waits_secs)
    saved = directory.first_whole(
        lambda markers: [marker for marker in _by_age(markers) if step in (None, marker.step)], only=only
    )
    if saved is None:
        raise ConfigError(f"no complete checkpoint is there. Received: {path}")
    return saved


def _by_age(markers: Sequence[Marker]) -> list[Marker]:
    """The newest first."""
    return sorted(markers, key=lambda marker: -marker.serial)


def _mib(num_bytes: int) -> int:
    return math.ceil(num_bytes / _MIB)
