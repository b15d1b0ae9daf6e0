"""Every class of keras.applications, from random weights or from trained ones."""

import dataclasses
import difflib
import inspect
import os
from types import ModuleType

import keras

from data.spec import Spec
from trainer.errors import ConfigError
from trainer.models import _inputs

IMAGENET = "imagenet"


@dataclasses.dataclass(frozen=True)
class Options:
    """weights: imagenet, which Keras downloads, or a file of weights of the model without its top (.weights.h5, .h5,
    .keras). The image is then prepared as these weights were trained with; random weights get it in -1..1."""

    weights: str = ""

    def __post_init__(self) -> None:
        if self.weights and self.weights != IMAGENET and not os.path.isfile(self.weights):
            raise ValueError(f"weights must be {IMAGENET} or a file that is there. Received: {self.weights!r}")


def names() -> list[str]:
    """Names of the model functions of keras.applications."""
    found = vars(keras.applications).items()
    return sorted(name for name, value in found if name[:1].isupper() and callable(value))


def options_of(name: str) -> type:
    """`Options`; raises ConfigError, with the nearest name, if keras.applications has no such model."""
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f". There are: {', '.join(names())}"
        raise ConfigError(f"keras.applications has no model {name!r}{hint}")
    return Options


def build(options: Options, spec: Spec, *, name: str) -> keras.Model:
    """[B, H, W, C] image -> [B, num_classes] float32 logits.

    Raises:
        ValueError: the image has not the channels of trained weights; from Keras, where it is smaller than the
            architecture can take, or where the weights are of another model.
    """
    function = getattr(keras.applications, name)
    arguments = {"weights": options.weights or None, "include_top": False, "pooling": "avg"}
    prepares = "include_preprocessing" in inspect.signature(function).parameters
    if options.weights:
        image, x = _inputs.published_image_input(spec)
        x = x if prepares else _module(function).preprocess_input(x)
    else:
        image, x = _inputs.image_input(spec)
        if prepares:
            arguments["include_preprocessing"] = False
        # EfficientNet scales 0..255 itself and cannot be told not to; -1..1 is what most others were published with.
        scales_itself = name.startswith("EfficientNetB")
        x = keras.layers.Rescaling(255.0)(x) if scales_itself else keras.layers.Rescaling(2.0, offset=-1.0)(x)
    features = function(**arguments, input_shape=tuple(image.shape[1:]))(x)  # [B, D]
    return keras.Model(image, _inputs.logits(features, spec), name=name.lower())


def _module(function: object) -> ModuleType:
    """The one of keras.applications that a model is in: each has a `preprocess_input` of its own."""
    modules = [value for value in vars(keras.applications).values() if inspect.ismodule(value)]
    return next(module for module in modules if function in vars(module).values())
