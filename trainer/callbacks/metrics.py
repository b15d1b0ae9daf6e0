"""`metrics.jsonl`: one JSON object a line, `{"step": 50, "train/loss": 0.43, ...}`."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from trainer.callbacks.buffered import Buffered, is_object_store
from trainer.callbacks.records import Record


class MetricsFile(Buffered):
    """The sink that is `metrics.jsonl`.

    Args:
        path: of the file; local or gs://.
        replace: writes the file whole or not at all.
    """

    def __init__(self, path: str, replace: Callable[[str], None]):
        super().__init__("metrics.jsonl", path)
        self._replace, self._appends = replace, not is_object_store(path)
        self._pending: list[str] = []  # lines that are not durable yet
        self._lines: list[str] | None = None  # of an object store: all durable ones, read once
        self._torn = False

    def drop_after(self, step: int) -> int:
        """Drops the lines of later steps, and lines torn by a kill.

        Returns:
            The highest step of any line that was there: an earlier start is known to have come that far.
        """
        lines = [*self._read(), *self._pending]
        steps = [step_of(line) for line in lines]
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        if len(kept) != len(lines):
            self._replace(_text(kept))
            self._pending, self._torn = [], False
            self._lines = None if self._appends else kept
        return max((at for at in steps if at is not None), default=0)

    def _hold(self, record: Record) -> None:
        values = {name: valid(value) for name, value in record.values.items()}
        self._pending.append(json.dumps({"step": record.step, **values}))

    def _make_durable(self) -> None:
        if not self._pending:
            return
        if self._appends and not self._torn:
            self._torn = True  # until the file system says otherwise
            with tf.io.gfile.GFile(self._path, "a") as file:
                file.write(_text(self._pending))
        else:
            pending = set(self._pending)  # a failed try may have written some of them
            lines = [line for line in self._read() if step_of(line) is not None and line not in pending]
            lines += self._pending
            self._replace(_text(lines))
            self._lines = None if self._appends else lines
        self._torn, self._pending = False, []

    def _read(self) -> list[str]:
        if self._lines is not None:
            return self._lines
        if not tf.io.gfile.exists(self._path):
            return []
        with tf.io.gfile.GFile(self._path) as file:
            return file.read().splitlines()


def step_of(line: str) -> int | None:
    """The step of a line; None of one that was torn by a kill."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def valid(value: float) -> Any:
    """A number for JSON, which knows neither NaN nor infinity: text as in protobuf's JSON, which float() reads back."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(lines: Iterable[str]) -> str:
    return "".join(line + "\n" for line in lines)
