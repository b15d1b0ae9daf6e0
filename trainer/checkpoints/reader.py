"""The checkpoints of a run, read by a process that does not own them while another one saves and removes."""

import contextlib
import functools
import logging
from collections.abc import Sequence

from trainer.checkpoints.bundle import DamagedError
from trainer.checkpoints.directory import CheckpointDir, Marker, Saved
from trainer.checkpoints.store import RETRY_WAITS_SECS

_log = logging.getLogger(__name__)


class Reader:
    """Reads what is complete, and passes over what is removed meanwhile.

    Args:
        directory: of the checkpoints; local or gs://. It need not exist yet.
        retry_waits_secs: waits before a read that failed for a passing reason is tried again.
    """

    def __init__(self, directory: str, retry_waits_secs: Sequence[float] = RETRY_WAITS_SECS):
        self._dir = CheckpointDir(directory, retry_waits_secs)
        self._damaged: set[str] = set()  # names of arrays

    def complete(self) -> list[Marker]:
        """Of all checkpoints that are complete now, but for those seen damaged; the oldest first.

        Raises:
            ConfigError: they may not be read.
            RetryError: storage could not be read.
        """
        found = []
        for step in self._dir.careful(self._dir.marked):
            with contextlib.suppress(DamagedError):  # removed since it was listed; if not, the run itself tells of it
                found.append(self._dir.careful(functools.partial(self._dir.marker, step)))
        return sorted(
            (marker for marker in found if marker.bundle_name not in self._damaged), key=lambda marker: marker.serial
        )

    def read(self, marker: Marker) -> Saved | None:
        """All arrays of a checkpoint; None where it was removed or is damaged, which the log then says.

        Raises:
            ConfigError, RetryError: as `complete`.
        """
        try:
            return self._dir.careful(functools.partial(self._dir.read, marker))
        except DamagedError as error:
            where = self._dir.of(marker.step)
            if marker.bundle_name in {now.bundle_name for now in self.complete()}:
                self._damaged.add(marker.bundle_name)
                _log.warning("the checkpoint in %s is damaged and passed over: %s", where, error)
            else:
                _log.info("the checkpoint in %s was removed before it could be read", where)
            return None
