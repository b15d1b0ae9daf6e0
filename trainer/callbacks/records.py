"""One record where a report is due, from which metrics.jsonl, TensorBoard and the console line all come."""

import dataclasses
import pathlib
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from trainer.callbacks import Callback, Loop

_MIB = 2**20
_STATUS = pathlib.Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class Record:
    """Values of one step by name: `train/loss`, ... or `eval/accuracy`, ...; never both kinds in one."""

    step: int
    values: Mapping[str, float]


class Sink(Protocol):
    """Where records go. A run that goes on, or goes back, first drops what lies beyond its step."""

    def drop_after(self, step: int) -> Any:
        """Voids the records of later steps: they will be written again."""

    def write(self, record: Record) -> None:
        """Takes a record; a failing disk must not raise here, the record is kept for the next try."""

    def flush(self) -> None:
        """Makes all records durable; raises OSError or tf.errors.OpError where that cannot be done."""

    def close(self) -> None:
        """Takes leave; tries to flush, and does not raise."""


class Records(Callback):
    """Writes a train record where a report is due, and an eval record after each evaluation.

    The metrics of a train record are means since the trainer last reset them, which it does where a report is due.
    Throughput and times are of the loops this process did since its last report, without the first one, which holds the
    compilation, unless there is no other.

    Args:
        is_report: whether a train record is due once `step` steps are done.
        sinks: where records go; none on workers that do not write.
        global_batch_size: examples a step.
        sequence_length: positions of an example of tokens, padding among them; None of data that is none.
        start_step: step that this process goes on from; what the sinks hold of later steps is dropped.
    """

    def __init__(
        self,
        is_report: Callable[[int], bool],
        sinks: Sequence[Sink],
        *,
        global_batch_size: int,
        start_step: int,
        sequence_length: int | None = None,
    ):
        self._is_report, self._sinks, self._global_batch_size = is_report, sinks, global_batch_size
        self._sequence_length = sequence_length
        self._loops: list[Loop] = []
        for sink in sinks:
            sink.drop_after(start_step)

    def on_loop_end(self, loop: Loop) -> None:
        """Writes a train record where one is due."""
        self._loops.append(dataclasses.replace(loop, logs={}))
        if self._is_report(loop.end):
            values = {**loop.logs, "learning_rate": loop.learning_rate, **self._speed()}
            self._write(Record(loop.end, {f"train/{name}": float(value) for name, value in values.items()}))
            self._loops.clear()

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the record of an evaluation."""
        self._write(Record(step, {f"eval/{name}": float(value) for name, value in metrics.items()}))

    def flush(self) -> None:
        """Makes all records durable. Call it before a checkpoint is committed: a run that goes on from there does not
        write them again.

        Raises:
            OSError, tf.errors.OpError: of the first sink that could not; the others were flushed all the same.
        """
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.flush()
            except (OSError, tf.errors.OpError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def on_end(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def _speed(self) -> dict[str, float]:
        timed = [loop for loop in self._loops if not loop.first] or self._loops
        steps, seconds = sum(loop.end - loop.begin for loop in timed), sum(loop.seconds for loop in timed)
        examples_per_sec = steps * self._global_batch_size / seconds
        length = self._sequence_length
        return {
            "examples_per_sec": examples_per_sec,
            **({} if length is None else {"tokens_per_sec": examples_per_sec * length}),
            "step_ms": 1e3 * seconds / steps,
            "input_wait_ms": 1e3 * sum(loop.input_wait_secs for loop in timed) / steps,
            "host_memory_mib": host_memory_mib(),
        }


def host_memory_mib() -> float:
    """Memory of this process that is resident now, MiB; where there is no /proc, the most it ever was."""
    if _STATUS.exists():
        resident = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(resident.split()[1]) * 1024 / _MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _MIB  # macOS counts bytes, the others KiB
