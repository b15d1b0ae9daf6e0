"""Squares out of photographs, of which no more is decoded than the square needs.

A square of 87.5% of the image's shorter side is cut out and resized (bilinear) to the side that the model takes: 224 of
256 pixels, as ImageNet models have been trained and evaluated since AlexNet. It keeps the aspect ratio. Evaluation
takes the central square, training one at a random place. Photographs stored with a shorter side of image_size / 0.875
are not resized at all, which saves a third of the work.

What is random is given as numbers, never drawn here: `random_places` makes them a function of (seed, step, row), so a
record at a position has the same crop on any number of hosts and after any restart.
"""

import tensorflow as tf

# Of the shorter side of the image.
SIDE = 0.875


def random_places(seed: int, step: tf.Tensor, global_batch_size: int) -> tf.Tensor:
    """Where squares lie, for the global batch of a step: [B, 2] float32 in [0, 1), vertically and horizontally."""
    key = tf.stack([tf.constant(seed, tf.int64), step])
    # The algorithm is named because the automatic choice depends on the device.
    return tf.random.stateless_uniform([global_batch_size, 2], key, alg="philox")


def crop_encoded(encoded: tf.Tensor, place: tf.Tensor, size: int, channels: int, is_jpeg: bool) -> tf.Tensor:
    """A square of one encoded image: [] string to [size, size, channels] uint8.

    Args:
      encoded: the file's bytes: JPEG, PNG, GIF or BMP.
      place: [2] float32 in [0, 1], where the square lies; 0.5 is the centre.
      size: side in pixels.
      channels: to decode to; 0 for those of the file.
      is_jpeg: True where nothing but JPEG comes; asking each image costs time.
    """

    def jpeg() -> tf.Tensor:  # entropy decoding goes through the rows above, the rest is done for the square alone
        window = _window(tf.io.extract_jpeg_shape(encoded)[:2], place)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=channels)

    def other() -> tf.Tensor:
        image = tf.io.decode_image(encoded, channels, expand_animations=False)
        top, left, side, _ = tf.unstack(_window(tf.shape(image)[:2], place))
        return image[top : top + side, left : left + side]

    square = jpeg() if is_jpeg else tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
    square = tf.ensure_shape(square, [None, None, channels or None])
    return tf.cond(tf.equal(tf.shape(square)[0], size), lambda: square, lambda: resize(square, size))


def resize(images: tf.Tensor, size: int) -> tf.Tensor:
    """[..., H, W, C] to [..., size, size, C] of the same dtype: bilinear, rounded where it is an integer."""
    resized = tf.image.resize(images, [size, size])  # float32
    return tf.cast(tf.round(resized) if images.dtype.is_integer else resized, images.dtype)


def _window(shape: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """[4] int32 top, left, height, width of a square in an image of `shape` [2] int32 height, width."""
    shorter = tf.cast(tf.reduce_min(shape), tf.float32)
    side = tf.maximum(tf.cast(tf.round(shorter * SIDE), tf.int32), 1)
    room = shape - side  # [2]
    corner = tf.cast(place * tf.cast(room + 1, tf.float32), tf.int32)
    return tf.concat([tf.minimum(corner, room), [side, side]], axis=0)
