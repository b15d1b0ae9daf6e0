"""TensorFlow's profiler."""

import contextlib

import tensorflow as tf


class Profiler:
    """Writes profiles below `directory`/plugins/profile; what it fails with, beside bugs, is of `ERRORS`."""

    ERRORS: tuple[type[Exception], ...] = (tf.errors.OpError, OSError)

    def __init__(self, directory: str):
        self._directory = directory

    def start(self) -> None:
        """Begins a profile."""
        tf.profiler.experimental.start(self._directory)

    def stop(self) -> None:
        """Ends the profile and writes it."""
        tf.profiler.experimental.stop()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Names what runs within it as `train` of that step; TensorBoard's step time comes from it."""
        return tf.profiler.experimental.Trace("train", step_num=number, _r=1)
