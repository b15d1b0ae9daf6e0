"""A transformer of patches of an image (ViT, arXiv:2010.11929), as a user's own model outside of the trainer."""

import dataclasses

import keras

from data.spec import Spec


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes; those of ViT-S/16 by default."""

    patch: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6


def build(options: Options, spec: Spec) -> keras.Model:
    """[B, H, W, C] uint8 image -> [B, num_classes] float32 logits."""
    image = keras.Input(spec.inputs.shape, dtype=spec.inputs.dtype)
    x = keras.layers.Rescaling(1 / 255)(image)
    x = keras.layers.Conv2D(options.width, options.patch, strides=options.patch, name="patches")(x)
    x = keras.layers.Reshape((-1, options.width))(x)  # [B, T, width]
    positions = keras.layers.Embedding(x.shape[1], options.width, name="positions")
    x = x + positions(keras.ops.arange(x.shape[1]))
    for _ in range(options.depth):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(options.heads, options.width // options.heads)(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * options.width, activation="gelu")(y)
        x = x + keras.layers.Dense(options.width)(y)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(image, keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x))
