"""What the host does to the images of a training batch, beside decoding them."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import tensorflow as tf

from data.augment import Augmentation, crops, numbers, rand_augment

# Purpose -> what the rows of a batch need for it: [b, ...].
Numbers: TypeAlias = Mapping[str, tf.Tensor]
CROP, PAD, RAND_AUGMENT = "crop", "pad", "rand_augment"


def draw(augmentation: Augmentation, photographs: bool, seed: int, step: tf.Tensor, rows: int) -> Numbers:
    """What the global batch of a step needs, [rows, ...] each; see numbers.py.

    photographs: whether images vary in size, and so are cropped in any case.
    """
    found = {}
    if augmentation.crop_area is not None:
        found[CROP] = numbers.seeds(numbers.Purpose.CROP, seed, step, rows)
    elif photographs:
        found[CROP] = numbers.uniform(numbers.Purpose.CROP, seed, step, rows, 2)
    if augmentation.crop_padding:
        found[PAD] = numbers.uniform(numbers.Purpose.PAD, seed, step, rows, 2)
    if augmentation.rand_augment:
        columns = augmentation.rand_augment * rand_augment.NUMBERS
        found[RAND_AUGMENT] = numbers.uniform(numbers.Purpose.RAND_AUGMENT, seed, step, rows, columns)
    return found


def window(augmentation: Augmentation) -> crops.Window:
    """Which part of an image is taken by the numbers CROP."""
    return crops.square if augmentation.crop_area is None else crops.of_area(augmentation.crop_area)


def crop(
    stored: tf.Tensor,
    given: Numbers,
    augmentation: Augmentation,
    out: tf.TensorSpec,
    decode: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
) -> tf.Tensor:
    """Parts of whole images, resized: [b, ...] to [b, H, W, C]. `out`: of one image; `decode`: from stored to image."""

    def cropped(one: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image = decode(one[0])
        part = crops.cut(image, window(augmentation)(tf.shape(image)[:2], one[1]))
        return crops.resize(part, out.shape[:2])

    return tf.map_fn(cropped, (stored, given[CROP]), fn_output_signature=out)


def change(images: tf.Tensor, given: Numbers, augmentation: Augmentation) -> tf.Tensor:
    """What is done to images [b, H, W, C] of the size that the model takes."""
    if augmentation.crop_padding:
        images = crops.out_of_padded(images, given[PAD], augmentation.crop_padding)
    if augmentation.rand_augment:
        layers, magnitude = augmentation.rand_augment, augmentation.rand_augment_magnitude
        images = rand_augment.rand_augment(images, given[RAND_AUGMENT], layers, magnitude)
    return images
