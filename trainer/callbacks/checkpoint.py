"""Saves a checkpoint where one is due."""

from collections.abc import Callable
from typing import Any

import keras

from trainer.callbacks import Progress


class SaveCheckpoint(keras.callbacks.Callback):
    """Saves at the steps that `is_checkpoint` names.

    Where a segment ends it saves after the evaluation, so that a run that goes on from a checkpoint has evaluated
    everything up to it.

    Args:
        progress: says at which step the run is.
        is_checkpoint: whether a checkpoint is due at a step.
        ends_segment: whether an evaluation is due at a step.
        save: writes the checkpoint of a step.
    """

    def __init__(
        self,
        progress: Progress,
        is_checkpoint: Callable[[int], bool],
        ends_segment: Callable[[int], bool],
        save: Callable[[int], Any],
    ):
        super().__init__()
        self._progress, self._is_checkpoint = progress, is_checkpoint
        self._ends_segment, self._save = ends_segment, save

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves within a segment."""
        if not self._ends_segment(self._progress.step):
            self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves where a segment ends."""
        self._save_if_due()

    def _save_if_due(self) -> None:
        if self._is_checkpoint(self._progress.step):
            self._save(self._progress.step)
