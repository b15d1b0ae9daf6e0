"""What sinks of records on a file system share: when they write, and how they outlive a failing disk or bucket."""

import abc
import logging
import time

import tensorflow as tf

from trainer.callbacks.records import Record

# An object store cannot append: every addition writes the object anew, so additions are gathered.
REMOTE_INTERVAL_SECS = 30.0
# A bucket that fails may take minutes to say so, while the devices wait: tries take at most about a tenth of the time.
_PAUSE_PER_FAILED_SECOND = 10.0

_log = logging.getLogger(__name__)


class Buffered(abc.ABC):
    """A sink that holds records until they are durable.

    On a local disk they are when `write` returns. On an object store they are held back for up to
    `REMOTE_INTERVAL_SECS`, or until `flush`.

    Args:
        what: name of what is written, for messages.
        path: where; local or gs://.
    """

    def __init__(self, what: str, path: str):
        self._what, self._path = what, path
        self._interval_secs = REMOTE_INTERVAL_SECS if is_object_store(path) else 0.0
        self._next_flush = time.monotonic() + self._interval_secs
        self._failing = False

    @abc.abstractmethod
    def _hold(self, record: Record) -> None:
        """Adds `record` to what is pending."""

    @abc.abstractmethod
    def _make_durable(self) -> None:
        """Writes what is pending; on an error keeps it."""

    def write(self, record: Record) -> None:
        """Takes a record; a failure is a warning, once, and the record is kept for the next try."""
        self._hold(record)
        if time.monotonic() >= self._next_flush:
            self._try_to_flush()

    def flush(self) -> None:
        """Makes all records durable.

        Raises:
            OSError, tf.errors.OpError: the file system's; the records are kept for the next try.
        """
        begun = time.monotonic()
        pause = 0.0
        try:
            self._make_durable()
            self._failing = False
        except (OSError, tf.errors.OpError):
            pause = _PAUSE_PER_FAILED_SECOND * (time.monotonic() - begun)
            raise
        finally:
            self._next_flush = time.monotonic() + max(self._interval_secs, pause)

    def close(self) -> None:
        """Flushes, or warns."""
        self._try_to_flush()

    def _try_to_flush(self) -> None:
        try:
            self.flush()
        except (OSError, tf.errors.OpError) as error:
            if not self._failing:
                _log.warning(
                    "%s cannot be written to %s; it is kept for the next try: %s", self._what, self._path, error
                )
            self._failing = True


def is_object_store(path: str) -> bool:
    """Whether a file there is written anew by every addition; /gcs/ is where Vertex AI mounts buckets."""
    return "://" in path or path.startswith("/gcs/")
