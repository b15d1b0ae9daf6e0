"""What the built-in models share: raw inputs in, float32 logits out."""

from typing import Any

import keras

from data.spec import Array, Spec
from trainer import tasks

UINT8_SCALE = 1.0 / 255.0
RGB_CHANNELS = 3


def image_input(spec: Spec) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """The model's input and the same image ready to compute on.

    Returns:
        input: [B, H, W, C] of the dataset's dtype.
        image: [B, H, W, C] in the compute dtype; uint8 is scaled to 0..1.

    Raises:
        ValueError: the data is not one image.
    """
    array = spec.inputs
    if not isinstance(array, Array) or len(array.shape) != 3:
        raise ValueError(f"it takes one image of shape (height, width, channels). Received: {spec.described}")
    image = keras.Input(array.shape, dtype=array.dtype, name="image")
    return image, normalised(image, array)


def published_image_input(spec: Spec) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """As `image_input`, but the image is [B, H, W, 3] float32 in 0..255, which published weights are prepared from.

    float32, because a mean subtracted from 0..255 would lose digits in the bfloat16 that a model computes in.

    Raises:
        ValueError: the data is not one image of three channels.
    """
    image, _ = image_input(spec)
    if image.shape[-1] != RGB_CHANNELS:
        raise ValueError(f"trained weights take images of {RGB_CHANNELS} channels. Received: {tuple(image.shape[1:])}")
    return image, keras.layers.Rescaling(1.0 if image.dtype == "uint8" else 1.0 / UINT8_SCALE, dtype="float32")(image)


def normalised(tensor: keras.KerasTensor, array: Array) -> keras.KerasTensor:
    """`tensor` in the compute dtype, uint8 scaled to 0..1; on the device, so that bytes cross to it, not floats."""
    scale = UINT8_SCALE if array.dtype == "uint8" else 1.0
    return keras.layers.Rescaling(scale)(tensor)


def logits(features: keras.KerasTensor, spec: Spec, initializer: Any = "glorot_uniform") -> keras.KerasTensor:
    """[B, ..., D] -> [B, ..., num_outputs of the task] float32, in full precision whatever the compute dtype.

    Of a regression they are predictions [B, *label.shape] in the units of the label: what is learned has mean 0 and
    variance 1, and a layer that adapts to the label (see `trainer/adapting.py`) turns it into them.

    Args:
        features: what the model has made of the input.
        spec: of the data.
        initializer: of the kernel, as Keras takes it.

    Raises:
        ValueError: no task fits the label.
    """
    outputs = tasks.num_outputs(spec)
    x = keras.layers.Dense(outputs, dtype="float32", kernel_initializer=initializer, name="logits")(features)
    if spec.task != "regression":
        return x
    x = keras.layers.Normalization(invert=True, dtype="float32", name="label")(x)  # [B, n]
    return keras.layers.Reshape(spec.label.shape, dtype="float32", name="prediction")(x)
