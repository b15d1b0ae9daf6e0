"""Parts of images, of which no more is decoded than the part needs.

Photographs, which vary in size, are cropped in any case. A square of 87.5% of the shorter side is cut out and resized
(bilinear) to the side that the model takes: 224 of 256 pixels, as ImageNet models have been trained and evaluated since
AlexNet. It keeps the aspect ratio. Evaluation takes the central square, training one at a random place. Photographs
stored with a shorter side of image_size / 0.875 are not resized at all, which saves a third of the work.

Training may instead take a part of random area and shape (Inception, arXiv:1409.4842), of any image, or an image of the
same size out of the image with black around it (arXiv:1409.5185, as CIFAR is trained with).
"""

from collections.abc import Callable

import tensorflow as tf

# Of the shorter side of the image.
SIDE = 0.875
# Width to height of parts of random area.
RATIOS = (3 / 4, 4 / 3)
# Then the whole image is taken: where it is so long and narrow that hardly any part of these ratios fits.
_ATTEMPTS = 100

# From an image's height and width, [2] int32, and numbers of one example to [4] int32 top, left, height, width.
Window = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def square(shape: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """The `Window` of 87.5% of the shorter side; place: [2] float32 in [0, 1], where it lies; 0.5 is the centre."""
    shorter = tf.cast(tf.reduce_min(shape), tf.float32)
    side = tf.maximum(tf.cast(tf.round(shorter * SIDE), tf.int32), 1)
    room = shape - side  # [2]
    corner = tf.cast(place * tf.cast(room + 1, tf.float32), tf.int32)
    return tf.concat([tf.minimum(corner, room), [side, side]], axis=0)


def of_area(least: float) -> Window:
    """The `Window` of random area, from `least` to all of the image, of random ratio and place, by a seed [2] int64."""

    def window(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            image_size=tf.concat([shape, [1]], axis=0),
            bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed=seed,
            min_object_covered=0.0,  # of the box, which is all of the image
            aspect_ratio_range=RATIOS,
            area_range=(least, 1.0),
            max_attempts=_ATTEMPTS,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    return window


def crop_encoded(
    encoded: tf.Tensor, numbers: tf.Tensor, window: Window, size: int, channels: int, is_jpeg: bool
) -> tf.Tensor:
    """A part of one encoded image: [] string to [size, size, channels] uint8.

    Args:
      encoded: the file's bytes: JPEG, PNG, GIF or BMP.
      numbers: for `window`.
      window: which part.
      size: side in pixels.
      channels: to decode to; 0 for those of the file.
      is_jpeg: True where nothing but JPEG comes; asking each image costs time.
    """

    def jpeg() -> tf.Tensor:  # entropy decoding goes through the rows above, the rest is done for the part alone
        part = window(tf.io.extract_jpeg_shape(encoded)[:2], numbers)
        return tf.io.decode_and_crop_jpeg(encoded, part, channels=channels)

    def other() -> tf.Tensor:
        image = tf.io.decode_image(encoded, channels, expand_animations=False)
        return cut(image, window(tf.shape(image)[:2], numbers))

    part = jpeg() if is_jpeg else tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    part = tf.ensure_shape(part, [None, None, channels or None])
    return tf.cond(tf.reduce_all(tf.equal(tf.shape(part)[:2], size)), lambda: part, lambda: resize(part, (size, size)))


def cut(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """[H, W, C] to the part of it that `window` says, [4] int32 top, left, height, width."""
    top, left, height, width = tf.unstack(window)
    return image[top : top + height, left : left + width]


def resize(images: tf.Tensor, size: tuple[int, ...]) -> tf.Tensor:
    """[..., H, W, C] to [..., *size, C], of height and width `size`, of the same dtype: bilinear, integers rounded."""
    resized = tf.image.resize(images, size)  # float32
    return tf.cast(tf.round(resized) if images.dtype.is_integer else resized, images.dtype)


def out_of_padded(images: tf.Tensor, places: tf.Tensor, padding: int) -> tf.Tensor:
    """[b, H, W, C] to the same shape, cut out of the images with `padding` zeros around them.

    places: [b, 2] float32 in [0, 1), where each lies, vertically and horizontally; just above 0.5 it stays in place.
    """
    _, height, width, _ = images.shape
    around = [padding, padding]
    padded = tf.pad(images, [[0, 0], around, around, [0, 0]])
    first = tf.cast(places * (2 * padding + 1), tf.int32)  # [b, 2]
    rows, columns = (first[:, axis, None] + tf.range(length) for axis, length in enumerate((height, width)))
    return tf.gather(tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)
