"""RandAugment (Cubuk et al., arXiv:1909.13719): for each image some operations out of 14, each of one strength.

Keras' layer of that name is not used: it draws one operation for all images of a batch, from a state of its own, and
computes every operation for every image. What the operations do is what Pillow's do, as in the paper, and ranges are
AutoAugment's (arXiv:1805.09501, table 6); as torchvision has it, each is the stronger the larger the magnitude, and
those that have two directions take either. Shears and rotations are about the centre; moved images take the nearest
pixel, as torchvision's and the authors' do, which costs a third of bilinear ones, and are grey where it does not reach.
"""

import math
from collections.abc import Callable

import tensorflow as tf

# The magnitude at which operations reach the ends of their ranges.
MOST = 10.0
# Random numbers an operation: which one, and in which direction.
NUMBERS = 2

_SHEAR = 0.3
_TRANSLATE = 150 / 331  # of the side of the image
_ROTATE = math.radians(30)
_ENHANCE = 0.9  # up to 0.1 or 1.9 times the colour, contrast, brightness, sharpness
_POSTERIZE_BITS = 4  # that are lost at most
_BITS = 8
_WHITE, _LEVELS, _GREY = 255, 256, 128.0
# Of red, green and blue in brightness (ITU-R 601-2, as in Pillow).
_LUMA = (0.299, 0.587, 0.114)
# Pillow's SMOOTH.
_SMOOTH_CENTRE, _SMOOTH_SUM = 5.0, 13.0

# From an image [H, W, C] uint8, strength in [0, 1] and direction [] float32, 1 or -1, to an image.
Operation = Callable[[tf.Tensor, float, tf.Tensor], tf.Tensor]


def rand_augment(images: tf.Tensor, numbers: tf.Tensor, layers: int, magnitude: float) -> tf.Tensor:
    """[b, H, W, 1 or 3] uint8 to the same, each image changed `layers` times.

    Args:
      images: the batch.
      numbers: [b, layers * NUMBERS] float32 in [0, 1).
      layers: operations, one after the other.
      magnitude: in (0, MOST].
    """
    strength = magnitude / MOST

    def augmented(image_and_numbers: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image, own = image_and_numbers
        for layer in range(layers):
            which, direction = tf.unstack(own[layer * NUMBERS : (layer + 1) * NUMBERS])
            image = _one(image, which, tf.where(direction < 0.5, 1.0, -1.0), strength)
        return image

    return tf.map_fn(augmented, (images, numbers), fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype))


def _one(image: tf.Tensor, which: tf.Tensor, direction: tf.Tensor, strength: float) -> tf.Tensor:
    branches = [lambda operation=operation: operation(image, strength, direction) for operation in OPERATIONS.values()]
    return tf.ensure_shape(tf.switch_case(tf.cast(which * len(branches), tf.int32), branches), image.shape)


# --- colours ----------------------------------------------------------------------------------------------------------


def _identity(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return tf.identity(image)


def _auto_contrast(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    low, high = (tf.cast(reduce(image, axis=(0, 1)), tf.float32) for reduce in (tf.reduce_min, tf.reduce_max))  # [C]
    scale = tf.where(high > low, tf.math.divide_no_nan(float(_WHITE), high - low), 1.0)
    return _bytes(tf.cast(image, tf.float32) * scale - tf.where(high > low, low, 0.0) * scale)


def _equalize(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    def equalized(channel: tf.Tensor) -> tf.Tensor:  # [H, W] int32
        counts = tf.math.bincount(tf.reshape(channel, [-1]), minlength=_LEVELS, maxlength=_LEVELS)
        last = tf.gather(counts, tf.reduce_max(channel))
        step = (tf.size(channel) - last) // _WHITE
        table = (tf.cumsum(counts, exclusive=True) + step // 2) // tf.maximum(step, 1)
        table = tf.where(step > 0, tf.minimum(table, _WHITE), tf.range(_LEVELS))
        return tf.gather(table, channel)

    channels = [equalized(channel) for channel in tf.unstack(tf.cast(image, tf.int32), axis=-1)]
    return tf.cast(tf.stack(channels, axis=-1), tf.uint8)


def _solarize(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    threshold = round(_LEVELS * (1.0 - strength))
    return tf.identity(image) if threshold > _WHITE else tf.where(image < threshold, image, _WHITE - image)


def _posterize(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    lost = round(_POSTERIZE_BITS * strength)
    return tf.bitwise.bitwise_and(image, tf.constant(_WHITE >> lost << lost, tf.uint8))


def _color(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _enhanced(image, tf.round(_luma(image)), strength, direction)


def _contrast(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _enhanced(image, tf.round(tf.reduce_mean(tf.round(_luma(image)))), strength, direction)


def _brightness(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _enhanced(image, tf.constant(0.0), strength, direction)


def _sharpness(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    values = tf.cast(image, tf.float32)
    height, width, _ = image.shape
    if min(height, width) < 3:  # nothing but edges, which stay
        return tf.identity(image)
    rows = values[:-2] + values[1:-1] + values[2:]
    box = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]  # [H - 2, W - 2, C]
    inside = values[1:-1, 1:-1]
    smooth = tf.round((box + (_SMOOTH_CENTRE - 1.0) * inside) / _SMOOTH_SUM)
    return _enhanced(image, values + tf.pad(smooth - inside, [[1, 1], [1, 1], [0, 0]]), strength, direction)


def _enhanced(image: tf.Tensor, without: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    """`image`, as far from `without`, which lacks what is enhanced, as strength and direction say."""
    factor = 1.0 + direction * (_ENHANCE * strength)
    return _bytes(without + factor * (tf.cast(image, tf.float32) - without))


def _luma(image: tf.Tensor) -> tf.Tensor:
    """[H, W, C] uint8 to [H, W, 1] float32."""
    values = tf.cast(image, tf.float32)
    return values if image.shape[-1] == 1 else tf.linalg.matmul(values, tf.constant(_LUMA)[:, None])


def _bytes(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.clip_by_value(tf.round(values), 0.0, float(_WHITE)), tf.uint8)


# --- places -----------------------------------------------------------------------------------------------------------


def _rotate(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    angle = direction * (_ROTATE * strength)
    return _moved(image, [tf.cos(angle), -tf.sin(angle), tf.sin(angle), tf.cos(angle)])


def _shear_x(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _moved(image, [1.0, direction * (_SHEAR * strength), 0.0, 1.0])


def _shear_y(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _moved(image, [1.0, 0.0, direction * (_SHEAR * strength), 1.0])


def _translate_x(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _moved(image, [1.0, 0.0, 0.0, 1.0], x=direction * (_TRANSLATE * strength * image.shape[1]))


def _translate_y(image: tf.Tensor, strength: float, direction: tf.Tensor) -> tf.Tensor:
    return _moved(image, [1.0, 0.0, 0.0, 1.0], y=direction * (_TRANSLATE * strength * image.shape[0]))


def _moved(image: tf.Tensor, matrix: list, x: tf.Tensor | float = 0.0, y: tf.Tensor | float = 0.0) -> tf.Tensor:
    """`image` with, at each place, the pixel that `matrix` (xx, xy, yx, yy) about the centre, then x and y, lead to."""
    height, width, _ = image.shape
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    xx, xy, yx, yy = matrix
    x += middle_x - xx * middle_x - xy * middle_y
    y += middle_y - yx * middle_x - yy * middle_y
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=[tf.stack([xx, xy, x, yx, yy, y, 0.0, 0.0])],
        output_shape=[height, width],
        fill_value=_GREY,
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )
    return moved[0]


OPERATIONS: dict[str, Operation] = {
    "identity": _identity,
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "color": _color,
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
}
