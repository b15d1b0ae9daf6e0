"""Who may write in a model_dir, by its `status.json`. Local or gs://.

One file is lease, heartbeat and exit status, so that they cannot contradict each other. Its owner rewrites it every
sixth of `lease_secs`. A lease is free when its run has ended, its process is known to be dead, or it is stale:

- by the storage's own clock: a file written now is more than `lease_secs` younger than it; or
- by watching: it does not change for `lease_secs` of monotonic time.

No clock of any worker counts, so none can be wrong. A process that this one can see is never stale: it is alive or not.
gs:// lets nobody create a file exclusively: of several that take a free lease at once the last to write has it, and
`confirm` tells the others.
"""

import logging
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from trainer import storage
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.watch.status import NAME, State, Status, StatusFile, is_alive, is_dead, new_status, unreadable

_BEATS_PER_LEASE = 6
_LOOKS_PER_LEASE = 20  # while watching somebody else's
_SETTLE_SECS = 3.0  # without a lock: longer than anybody takes from finding a lease free to having written its own
_RELEASE_SECS = 10.0
_STORAGE_ERRORS = (tf.errors.OpError, OSError, ValueError)  # ValueError: not JSON, or not ours

_log = logging.getLogger(__name__)


def wait_until_free(model_dir: str, lease_secs: float) -> None:
    """Makes sure that nobody holds the lease, as `acquire` does, but takes nothing and makes no directory.

    Raises:
      RetryError: another run holds it.
      tf.errors.OpError: the directory cannot be read.
    """
    file = StatusFile(model_dir)
    found = _load_anyhow(file)
    if found is not None and found.state == "running" and not is_dead(found):
        _await_silence(file, found, lease_secs)


def acquire(
    model_dir: str,
    lease_secs: float,
    *,
    on_lost: Callable[[TrainerError], None] = lambda error: None,
    on_trouble: Callable[[str], None] = lambda message: None,
) -> "Lease":
    """Takes the lease of model_dir, made where it does not exist, and keeps it alive in a thread.

    Waits up to `lease_secs` if the lease may be stale, which the log then says. `Lease.confirm` before the first write.

    Args:
      model_dir: local or gs://.
      lease_secs: after which a lease without a sign of life is anybody's.
      on_lost: called in that thread when another run has taken over, or the directory is gone.
      on_trouble: called in that thread, once an episode, when the lease cannot be renewed.

    Raises:
      RetryError: another run holds it.
      tf.errors.OpError: the directory cannot be read or written.
    """
    file = StatusFile(model_dir)
    storage.make_directories(file.directory)
    silent: Status | None = None
    while True:
        with file.locked() as alone:
            found = _load_anyhow(file)
            if found is None or found.state != "running" or is_dead(found) or found == silent:
                if found is not None and found.state == "running":
                    _log.warning("%s: taking over from a run that is dead (%s)", file.path, found.who)
                settle_secs = 0.0 if alone else _SETTLE_SECS
                try:
                    return Lease(file, new_status(found), lease_secs, settle_secs, on_lost, on_trouble)
                except tf.errors.NotFoundError as error:  # without a lock another one's .part took the place of ours
                    raise RetryError(f"Another run began in {file.directory} at this moment. Run again.") from error
        if silent is not None:  # and then it was not, after all
            raise _in_use(file, found)
        silent = _await_silence(file, found, lease_secs)


class Lease:
    """The right to write in a model_dir. Made by `acquire`.

    Attributes:
      lost: why this run may write no more; None as long as it may. Anybody may poll it.
    """

    def __init__(
        self,
        file: StatusFile,
        status: Status,
        lease_secs: float,
        settle_secs: float,
        on_lost: Callable[[TrainerError], None],
        on_trouble: Callable[[str], None],
    ):
        """Writes the first status; use `acquire`."""
        self.lost: TrainerError | None = None
        self._file = file
        self._status = status
        self._beat_secs = lease_secs / _BEATS_PER_LEASE
        self._on_lost = on_lost
        self._on_trouble = on_trouble
        self._in_trouble = False
        self._progress_at = time.monotonic()
        self._mutex = threading.Lock()  # between reading whose it is and writing
        self._ended = threading.Event()
        file.store(status)
        self._settled_at = time.monotonic() + settle_secs
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    @property
    def last_step(self) -> int | None:
        """The step last known to have been reached, by this start or by one before."""
        return self._status.step

    def update(self, step: int | None = None, phase: str | None = None) -> None:
        """Notes progress for the next beat: a step, or the name of what the run does now. Costs nothing."""
        if step is not None:
            self._status.step = step
        if phase is not None:
            self._status.phase = phase
        self._progress_at = time.monotonic()

    def confirm(self) -> None:
        """Makes sure, just before something is written or committed, that this run may.

        Shortly after `acquire` it waits, except on a local disk, until whoever took the lease as well has shown.

        Raises:
          RetryError: another run has the lease.
          ConfigError: the directory is gone.
          tf.errors.OpError, ValueError: the storage does not tell.
        """
        time.sleep(max(0.0, self._settled_at - time.monotonic()))
        self._check()

    def release(self, state: State, exit_code: int, reason: str | None = None) -> None:
        """Writes how the run ended, unless the lease is lost; the next one finds it free. Only the first call counts.

        Never raises, and gives up after 10 s: the process is about to end.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        if not self._mutex.acquire(timeout=_RELEASE_SECS):
            return _log.warning("%s: not released, the storage does not answer", self._file.path)
        try:
            with self._file.locked():
                self._check()
                self._status.state, self._status.exit_code, self._status.reason = state, exit_code, reason
                self._write()
        except (*_STORAGE_ERRORS, TrainerError) as error:
            # Where the run fails, the loss of its lease is the reason, or comes of it, and is told.
            if state == "finished" or not isinstance(error, TrainerError):
                _log.warning("%s: not released: %s", self._file.path, error)
        finally:
            self._mutex.release()

    def _beat_on(self) -> None:
        while self.lost is None and not self._ended.wait(self._beat_secs):
            try:
                with self._mutex, self._file.locked():
                    if not self._ended.is_set():
                        self._check()
                        self._write()
            except TrainerError as error:
                return _call(self._on_lost, error)
            except _STORAGE_ERRORS as error:
                self._tell_of_trouble(error)
            else:
                self._in_trouble = False

    def _tell_of_trouble(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            message = f"{self._file.path} cannot be renewed, tried again every {self._beat_secs:g} s: {error}"
            _log.warning("%s", message)
            _call(self._on_trouble, message)

    def _check(self) -> None:
        if self.lost is None:
            found = self._file.load()
            if found is None:
                self.lost = ConfigError(
                    f"model_dir was removed under the run, which cannot go on. Received: {self._file.directory!r} "
                    f"without {NAME}. Start again, with a model_dir that nobody removes."
                )
            elif found.owner != self._status.owner:
                self.lost = RetryError(
                    f"Another run ({found.who}) has taken over {self._file.directory}: this one stops, to let one "
                    "alone write there. Use another model_dir, or end the other run and start this one again."
                )
        if self.lost is not None:
            raise self.lost

    def _write(self) -> None:
        self._status.beats += 1
        self._status.secs_since_progress = round(time.monotonic() - self._progress_at, 1)
        self._file.store(self._status)


def _load_anyhow(file: StatusFile) -> Status | None:
    """What stands there; what cannot be understood counts as somebody's, who may be alive."""
    try:
        return file.load()
    except ValueError as error:
        _log.warning("%s", error)
        return unreadable()


def _await_silence(file: StatusFile, found: Status, lease_secs: float) -> Status:
    """Returns what was found, once it is known to be stale; at once if the storage's clock says so.

    Raises:
      RetryError: its owner lives.
    """
    if is_alive(found):
        raise _in_use(file, found)
    if file.age_secs() > lease_secs:
        return found
    _log.warning("%s: held by a run that may be dead (%s); watching it for %g s", file.path, found.who, lease_secs)
    ends_at = time.monotonic() + lease_secs
    while (remaining := ends_at - time.monotonic()) > 0:
        time.sleep(min(remaining, lease_secs / _LOOKS_PER_LEASE))
        now = _load_anyhow(file)
        if now is None or now.state != "running":
            break
        if now != found:
            raise _in_use(file, now)
    return found


def _in_use(file: StatusFile, status: Status) -> RetryError:
    return RetryError(
        f"{file.directory} is in use by another run ({status.who}, {status.phase}). "
        "Wait for it or end it and run again, or use another model_dir."
    )


def _call(callback: Callable[..., None], argument: object) -> None:
    """The lease is kept whatever the caller's code does."""
    try:
        callback(argument)
    except Exception:
        _log.exception("A callback of the lease failed")
