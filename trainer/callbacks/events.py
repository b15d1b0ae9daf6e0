"""Records as TensorBoard scalars, without gaps or doubles over restarts.

What a killed process wrote beyond its last checkpoint is done again, and TensorBoard would show it twice. Its own way
out is an event `SessionLog.START`, which voids everything at its step and after in the files before. It ignores the
very first one of a directory, hence two. tf.summary cannot write that event, so the event files, which are TFRecords of
`Event` messages, are written here. TensorBoard reads the files of a directory in the order of their names.
"""

import contextlib
import os
import re
import socket
import time

import tensorflow as tf

from trainer import storage
from trainer.callbacks.buffered import Buffered
from trainer.callbacks.records import Record

_Event, _SessionLog, _Summary = tf.compat.v1.Event, tf.compat.v1.SessionLog, tf.compat.v1.Summary
_NOTHING = 2**62  # a START at this step voids nothing
_NUMBER = re.compile(r"^events\.out\.tfevents\.(\d+)")


class Events(Buffered):
    """The sink that is a directory of event files; every process, and every try after a failure, makes a new one.

    Args:
        directory: made when the first record comes; local or gs://.
    """

    def __init__(self, directory: str):
        super().__init__("TensorBoard's event file", directory)
        self._writer: tf.io.TFRecordWriter | None = None
        self._void_from = _NOTHING  # step of the START that the next file has to begin with
        self._pending: list[tuple[Record, float]] = []  # with their wall time; not durable yet
        self._last: list[tuple[Record, float]] = []  # durable ones of the last step

    def drop_after(self, step: int) -> None:
        """Voids what earlier files hold of later steps; durable with the next record, or flush."""
        self._abandon()
        self._pending = [entry for entry in self._pending if entry[0].step <= step]
        self._last = [entry for entry in self._last if entry[0].step <= step]
        self._void_from = min(self._void_from, step + 1)
        if self._pending:
            self._void_pending()

    def close(self) -> None:
        """Flushes and closes the file."""
        super().close()
        self._abandon()

    def _hold(self, record: Record) -> None:
        self._pending.append((record, time.time()))

    def _make_durable(self) -> None:
        if not self._pending and (self._void_from == _NOTHING or not self._numbers()):
            return
        try:
            writer = self._writer = self._writer or self._open()
            for record, at in self._pending:
                writer.write(_scalars(record, at))
            writer.flush()
        except (OSError, tf.errors.OpError):
            if self._writer is not None and self._pending:
                self._void_pending()  # what arrived of it is unknown
            self._abandon()
            raise
        written = self._last + self._pending
        self._last = [entry for entry in written if entry[0].step == written[-1][0].step]
        self._pending, self._void_from = [], _NOTHING

    def _void_pending(self) -> None:
        """Lets the next file begin with what is pending; that voids durable records of the same step, so these too."""
        first = self._pending[0][0].step
        self._pending = [entry for entry in self._last if entry[0].step >= first] + self._pending
        self._last, self._void_from = [], min(self._void_from, first)

    def _open(self) -> tf.io.TFRecordWriter:
        storage.make_directory(self._path)  # and not what is around it, which somebody may have removed
        # Seconds, as everybody has it, but behind all others also when the clock was set back.
        number = max([int(time.time()), *(known + 1 for known in self._numbers())])
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.v2"
        writer = tf.io.TFRecordWriter(f"{self._path}/{name}")
        writer.write(_Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        start = _Event(
            wall_time=time.time(), step=self._void_from, session_log=_SessionLog(status=_SessionLog.START)
        ).SerializeToString()
        for _ in range(2):
            writer.write(start)
        return writer

    def _numbers(self) -> list[int]:
        """Of the event files that are there, in whose order TensorBoard reads them."""
        if not tf.io.gfile.isdir(self._path):
            return []
        return [int(found[1]) for name in tf.io.gfile.listdir(self._path) if (found := _NUMBER.match(name))]

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError, tf.errors.OpError):  # what matters was flushed, or is pending
                writer.close()


def _scalars(record: Record, at: float) -> bytes:
    values = [_Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
    return _Event(wall_time=at, step=record.step, summary=_Summary(value=values)).SerializeToString()
