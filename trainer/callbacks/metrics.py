"""Metrics of a run as `metrics.jsonl` and TensorBoard scalars."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.callbacks import Progress


class MetricsLog(keras.callbacks.Callback):
    """Writes `train/<name>` where a report is due, `eval/<name>` after each evaluation.

    A train record is the mean over the steps since the last one; the metrics are reset with it.

    Args:
        progress: says at which step the run is.
        is_report: whether a record is due at a step.
        global_batch_size: examples a step.
        append: writes one record of `metrics.jsonl`; None on workers that do not write.
        tensorboard_dir: where the scalars go; used only together with `append`.
    """

    def __init__(
        self,
        progress: Progress,
        is_report: Callable[[int], bool],
        *,
        global_batch_size: int,
        append: Callable[[int, Mapping[str, float]], None] | None,
        tensorboard_dir: str,
    ):
        super().__init__()
        self._progress, self._is_report = progress, is_report
        self._global_batch_size, self._append = global_batch_size, append
        self._writer = tf.summary.create_file_writer(tensorboard_dir) if append else None
        self._begun = 0.0
        self._seconds = 0.0
        self._last_step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts steps from where the run begins."""
        self._last_step = self._progress.step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock of a loop."""
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a train record where one is due."""
        self._seconds += time.monotonic() - self._begun
        step = self._progress.step
        if not self._is_report(step):
            return
        values = {f"train/{name}": value for name, value in (logs or {}).items()}
        values["train/learning_rate"] = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
        values["train/examples_per_sec"] = (step - self._last_step) * self._global_batch_size / self._seconds
        self._write(step, values)
        self.model.reset_metrics()
        self._last_step, self._seconds = step, 0.0

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes the record of an evaluation, if there was one."""
        values = {f"eval/{n.removeprefix('val_')}": v for n, v in (logs or {}).items() if n.startswith("val_")}
        if values:
            self._write(self._progress.step, values)

    def on_train_end(self, logs: Any = None) -> None:
        """Flushes TensorBoard's file."""
        if self._writer:
            self._writer.close()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if self._append is None or self._writer is None:
            return
        self._append(step, values)
        with self._writer.as_default(step):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()
