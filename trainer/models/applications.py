"""Every class of keras.applications, from random weights."""

import dataclasses
import difflib
import inspect

import keras

from data.spec import Spec
from trainer.errors import ConfigError
from trainer.models import _inputs


@dataclasses.dataclass(frozen=True)
class Options:
    """Keras' applications are built as published."""


def names() -> list[str]:
    """Names of the model functions of keras.applications."""
    found = vars(keras.applications).items()
    return sorted(name for name, value in found if name[:1].isupper() and callable(value))


def check_name(name: str) -> None:
    """Raises ConfigError, with the nearest name, if keras.applications has no such model."""
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f". There are: {', '.join(names())}"
        raise ConfigError(f"keras.applications has no model {name!r}{hint}")


def build(options: Options, spec: Spec, *, application: str) -> keras.Model:
    """[B, H, W, C] image -> [B, num_classes] float32 logits.

    Raises:
        ValueError: from Keras, where the image is smaller than the architecture can take.
    """
    image, x = _inputs.image_input(spec)
    function = getattr(keras.applications, application)
    arguments = {"weights": None, "include_top": False, "pooling": "avg", "input_shape": tuple(image.shape[1:])}
    if "include_preprocessing" in inspect.signature(function).parameters:
        arguments["include_preprocessing"] = False
    # EfficientNet scales 0..255 itself and cannot be told not to; -1..1 is what most others were published with.
    scales_itself = application.startswith("EfficientNetB")
    x = keras.layers.Rescaling(255.0)(x) if scales_itself else keras.layers.Rescaling(2.0, offset=-1.0)(x)
    features = function(**arguments)(x)  # [B, D]
    return keras.Model(image, _inputs.logits(features, spec), name=application.lower())
