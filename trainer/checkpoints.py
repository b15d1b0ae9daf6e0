"""Save, find and restore the state of a run, through TensorFlow's own checkpoints (local paths and gs://).

A checkpoint counts once TensorFlow's state file names it, which happens after all its data is written; a run killed
during a save goes on from the one before. The step is also the data position: the order of records is a function of it.
"""

from collections.abc import Mapping

import tensorflow as tf

from trainer.errors import ConfigError


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: where they are.
        variables: all state by name, as `Replicated.variables` gives it.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: str, variables: Mapping[str, tf.Variable], keep: int = 1):
        self.directory = directory
        # Made outside any strategy: every worker holds it for itself, the chief writes it.
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self._checkpoint = tf.train.Checkpoint(step=self._step, variables=dict(variables))
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, directory, max_to_keep=keep, checkpoint_name="checkpoint"
        )

    def save(self, step: int) -> str:
        """Writes the state after `step` steps and returns its path; does nothing for a step already saved."""
        path = f"{self.directory}/checkpoint-{step}"
        if path not in self._manager.checkpoints:
            self._step.assign(step)
            self._manager.save(checkpoint_number=step)
        return path

    def restore(self) -> int | None:
        """Restores the newest checkpoint and returns its step, or None where there is none.

        Raises:
            ConfigError: the checkpoint and the model do not match in every variable.
        """
        path = self._manager.latest_checkpoint
        if path is None:
            return None
        try:
            self._checkpoint.restore(path).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"the checkpoint does not fit this model in every variable, so nothing was restored. "
                f"Received: {path}: {reason}. Use the options it was trained with, or another model_dir"
            ) from error
        return int(self._step.numpy())
