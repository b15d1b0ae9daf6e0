"""A function of a model as a SavedModel."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf


def write(model: keras.Model, serve: Callable, signature: Sequence[tf.TensorSpec], directory: str) -> None:
    """Writes `serve`, which calls `model`, to `directory`, as the signature `serving_default`."""
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serving_default", serve, input_signature=list(signature))
    archive.write_out(directory, verbose=False)
