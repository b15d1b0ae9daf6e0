"""JAX' profiler, which writes what TensorFlow's does."""

import contextlib
import os
import shutil
import tempfile

import jax
import tensorflow as tf


class Profiler:
    """Writes profiles below `directory`/plugins/profile; what it fails with, beside bugs, is of `ERRORS`.

    JAX writes to local disks only, so a profile is copied from there.
    """

    # JAX raises RuntimeError where a profile runs already, and for all that XLA fails with.
    ERRORS: tuple[type[Exception], ...] = (tf.errors.OpError, OSError, RuntimeError)

    def __init__(self, directory: str):
        self._directory = directory
        self._local = ""

    def start(self) -> None:
        """Begins a profile."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = (
            0  # as TensorFlow: each call of a Python function would make it megabytes a second
        )
        tf.io.gfile.makedirs(self._directory)  # rather than to find out at its end
        local = tempfile.mkdtemp()
        try:
            jax.profiler.start_trace(local, profiler_options=options)
        except BaseException:
            os.rmdir(local)
            raise
        self._local = local

    def stop(self) -> None:
        """Ends the profile and writes it."""
        try:
            jax.profiler.stop_trace()
            for folder, _, files in os.walk(self._local):
                target = os.path.join(self._directory, os.path.relpath(folder, self._local))
                tf.io.gfile.makedirs(target)
                for file in files:
                    tf.io.gfile.copy(os.path.join(folder, file), os.path.join(target, file), overwrite=True)
        finally:
            shutil.rmtree(self._local)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Names what runs within it as `train` of that step; TensorBoard's step time comes from it."""
        return jax.profiler.StepTraceAnnotation("train", step_num=number)
