"""SavedModel of a trained model: raw inputs in, logits (and probabilities) out, no code of ours needed to serve it."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from data.spec import Array, Spec
from trainer import storage, tasks

# What every loader of a SavedModel reads first.
MARK = "saved_model.pb"


def save(model: keras.Model, spec: Spec, directory: str) -> str:
    """Writes `model` (built outside any strategy) to `directory`, whole or not at all, and returns it.

    Its one signature is `serving_default`, see `serving`. On gs:// a directory is replaced object by object: from when
    the old one's `saved_model.pb` is removed until the new one's is there, there is no export, never a mixed one.

    Raises:
        tf.errors.OpError, OSError: it cannot be written, also after several tries where that might have passed.
    """
    storage.retry(lambda: _save(model, spec, directory), storage.RETRY_WAITS_SECS, storage.is_passing)
    return directory


def is_there(directory: str) -> bool:
    """Whether a whole export is in `directory`."""
    return tf.io.gfile.exists(f"{directory}/{MARK}")


def _save(model: keras.Model, spec: Spec, directory: str) -> None:
    serve, signature = serving(model, spec)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serving_default", serve, input_signature=signature)
    part = f"{directory}.part"
    storage.remove_directory(part)
    archive.write_out(part, verbose=False)
    storage.replace_directory(part, directory, MARK)


def serving(
    model: keras.Model, spec: Spec, batch: int | None = None
) -> tuple[Callable[..., dict[str, tf.Tensor]], list[tf.TensorSpec]]:
    """The function that an export serves, and its signature for a batch size that is free or given.

    One input a feature, of the dataset's dtype and shape (a single one is called `image` for images, `tokens` for
    tokens, else `input`), but for those that the task knows. Outputs as the task names them (`logits` and
    `probabilities` of a class). A model with several outputs gives them under their own names.
    """
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {_input_name(spec.inputs): spec.inputs}
    given = tasks.given(spec)
    asked = [name for name in arrays if name not in given]
    signature = [tf.TensorSpec((batch, *arrays[name].shape), arrays[name].dtype, name=name) for name in asked]

    def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        features = dict(zip(asked, tensors, strict=True))
        for name, value in given.items():
            shape = (tf.shape(tensors[0])[0], *arrays[name].shape)
            features[name] = tf.fill(shape, tf.constant(value, arrays[name].dtype))
        outputs = model(features if isinstance(spec.inputs, Mapping) else tensors[0], training=False)
        return _named(outputs, spec)

    return serve, signature


def _input_name(array: Array) -> str:
    if array.below is not None and len(array.shape) == 1:
        return "tokens"
    return "image" if len(array.shape) == 3 else "input"


def _named(outputs: Any, spec: Spec) -> dict[str, tf.Tensor]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, list | tuple):
        return {f"output_{index}": tensor for index, tensor in enumerate(outputs)}
    return tasks.outputs(outputs, spec)
