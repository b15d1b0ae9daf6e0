"""What a trained model is taken away as: a SavedModel, raw inputs in, logits (and probabilities) out, no code of ours
needed to serve it; and beside it a file of Keras, to go on from with any of its backends."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from data.spec import Array, Spec
from trainer import backend, diagnose, internals, storage, tasks

# What every loader of a SavedModel reads first.
MARK = "saved_model.pb"
# The model as Keras saves it; loaders of a SavedModel do not look at it.
KERAS = "model.keras"
# A name that TensorFlow has for an input, and what it writes as `_` when it serves one.
_NAME, _NO_WORD = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*"), re.compile(r"[^A-Za-z0-9_]")

_log = logging.getLogger(__name__)


def save(model: keras.Model, spec: Spec, directory: str) -> str:
    """Writes `model` (built outside any strategy) to `directory`, whole or not at all, and returns it.

    Its one signature is `serving_default`, see `serving`. `model.keras` is beside it, without the optimizer, unless the
    model cannot be written down so, which is said. On gs:// a directory is replaced object by object: from when
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
    if isinstance(spec.inputs, Mapping):
        served = served_names(spec.inputs)
        renamed = [f"{served[name]} for {name!r}" for name in served if served[name] != name]
        if renamed:
            _log.warning("TensorFlow serves inputs under plain names only: %s", ", ".join(renamed))
    part = f"{directory}.part"
    storage.remove_directory(part)
    backend.part("export").write(model, serve, signature, part)
    _save_keras(model, f"{part}/{KERAS}")
    storage.replace_directory(part, directory, MARK)


def served_names(names: Iterable[str]) -> dict[str, str]:
    """Feature -> the name of its input: its own, or, where TensorFlow has none such (`sepal length`), one like it."""
    names = list(names)
    taken = {_NO_WORD.sub("_", name) for name in names if _NAME.fullmatch(name)}
    served = {}
    for name in names:
        plain = name
        if not _NAME.fullmatch(name):
            plain = _NO_WORD.sub("_", name)
            plain = f"input{plain}" if plain.startswith("_") else plain
            while plain in taken:
                plain += "_"
            taken.add(plain)
        served[name] = plain
    return served


def _save_keras(model: keras.Model, path: str) -> None:
    for layer in internals.layers(model):
        if getattr(layer, "synchronized", False):  # which only training asks for, and Keras takes on TensorFlow alone
            layer.synchronized = False
    try:
        model.save(path)
    except (NotImplementedError, TypeError, ValueError) as error:  # what Keras raises of a class that tells no config
        reason = diagnose.short(error)
        _log.info("the export has no %s, as Keras cannot write %s down: %s", KERAS, type(model).__name__, reason)
        if tf.io.gfile.exists(path):
            tf.io.gfile.remove(path)


def serving(
    model: keras.Model, spec: Spec, batch: int | None = None
) -> tuple[Callable[..., dict[str, Any]], list[tf.TensorSpec]]:
    """The function that an export serves, and its signature for a batch size that is free or given.

    One input a feature (`served_names`), of the dataset's dtype and shape (a single one is called `image` for images,
    `tokens` for tokens, else `input`), but for those that the task knows. Outputs as the task names them (`logits` and
    `probabilities` of a class). A model with several outputs gives them under their own names.
    """
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {_input_name(spec.inputs): spec.inputs}
    given = tasks.given(spec)
    asked = [name for name in arrays if name not in given]
    served = served_names(arrays)
    signature = [tf.TensorSpec((batch, *arrays[name].shape), arrays[name].dtype, name=served[name]) for name in asked]

    def serve(*tensors: Any) -> dict[str, Any]:
        features = dict(zip(asked, tensors, strict=True))
        for name, value in given.items():
            shape = (ops.shape(tensors[0])[0], *arrays[name].shape)
            features[name] = ops.full(shape, value, arrays[name].dtype)
        outputs = model(features if isinstance(spec.inputs, Mapping) else tensors[0], training=False)
        return _named(outputs, spec)

    return serve, signature


def _input_name(array: Array) -> str:
    if array.below is not None and len(array.shape) == 1:
        return "tokens"
    return "image" if len(array.shape) == 3 else "input"


def _named(outputs: Any, spec: Spec) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, list | tuple):
        return {f"output_{index}": tensor for index, tensor in enumerate(outputs)}
    return tasks.outputs(outputs, spec)
