"""A small convolutional network for small images."""

import dataclasses

import keras

from data.spec import Spec
from trainer.models import _inputs

# Keras' 0.99 averages over hundreds of steps, more than a short run on a small dataset has.
BATCH_NORM_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Options:
    """filters: channels of each stage, which halves the image; units: width of the hidden layer behind them;
    batch_norm: normalise after each convolution; dropout: rate before the logits."""

    filters: tuple[int, ...] = (32, 64)
    units: int = 128
    batch_norm: bool = True
    dropout: float = 0.3


def build(options: Options, spec: Spec) -> keras.Model:
    """[B, H, W, C] image -> [B, num_classes] float32 logits.

    Raises:
        ValueError: the image is too small to be halved once for each stage.
    """
    image, x = _inputs.image_input(spec)
    smallest = 2 ** len(options.filters)
    if min(x.shape[1:3]) < smallest:
        raise ValueError(
            f"{len(options.filters)} stages halve an image of at least {smallest} x {smallest} pixels. "
            f"Received: {x.shape[1]} x {x.shape[2]}. Set image_size, or fewer filters in model_options"
        )
    for filters in options.filters:
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=not options.batch_norm)(x)
        if options.batch_norm:
            x = keras.layers.BatchNormalization(momentum=BATCH_NORM_MOMENTUM)(x)
        x = keras.layers.Activation("relu")(x)
        x = keras.layers.MaxPooling2D()(x)  # [B, H/2, W/2, filters]
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(options.units, activation="relu")(x)
    if options.dropout:
        x = keras.layers.Dropout(options.dropout)(x)
    return keras.Model(image, _inputs.logits(x, spec), name="cnn")
