"""What the device does to a batch before a step: flips, erases, mixes. Arithmetic only, of numbers that it is given.

Each operation is a function of a batch of images [b, H, W, C] and of numbers [b, n] float32 in [0, 1] (what they are
for: `data.augment.numbers`), and keeps shape and dtype: uint8 stays uint8, so that model and export know nothing of all
this. Blending then rounds by half a level of 255 at most.

Pairs are the rows 2n and 2n + 1 of the global batch, which is shuffled already; both are on one replica. Either becomes
a mixture of the two by the same weight, which Beta(alpha, alpha) allows, being symmetric.
"""

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from data import augment
from data.augment import numbers
from data.spec import Array, Spec
from trainer import tasks
from trainer.config import Config
from trainer.errors import ConfigError

_IMAGE_RANK = 3  # [H, W, C]
_RAND_AUGMENT_CHANNELS = (1, 3)
# Of the image's area, and of height to width: as in arXiv:1708.04896, but with the ratio even on a logarithmic scale,
# so that upright rectangles are as frequent as lying ones.
_ERASED_AREA = (0.02, 0.4)
_ERASED_RATIO = (0.3, 1 / 0.3)

Prepare = Callable[[tuple], tuple]


def of(config: Config) -> augment.Augmentation:
    """What the options of a run say of images; each is called alike there."""
    return augment.Augmentation(**{f.name: getattr(config, f.name) for f in dataclasses.fields(augment.Augmentation)})


def check(config: Config, spec: Spec) -> None:
    """Raises ConfigError where data cannot be augmented as the options say."""
    wanted = of(config)
    image = spec.inputs
    named = [*wanted.on_host, *wanted.on_device]
    if named:
        if not isinstance(image, Array) or len(image.shape) != _IMAGE_RANK:
            raise ConfigError(
                f"{', '.join(named)} is for data whose input is one image. Received: {spec.described}. Leave it out"
            )
        if wanted.rand_augment and (image.dtype != "uint8" or image.shape[-1] not in _RAND_AUGMENT_CHANNELS):
            raise ConfigError(f"RandAugment takes uint8 images with 1 or 3 channels. Received: {image}. Leave it out")
    if makes_shares(config) and tasks.shares(spec) is None:
        raise ConfigError(
            "mixup, cutmix and label_smoothing are for labels that can be shares of classes; leave them out. Received: "
            f"task {spec.task or 'of the model'!r}, label {spec.label}"
        )


def makes_shares(config: Config) -> bool:
    """Whether training has labels that are shares of classes, whatever is stored."""
    return bool(config.mixup or config.cutmix or config.label_smoothing)


def label(config: Config, spec: Spec) -> Array:
    """What training has for a label."""
    return Array((tasks.num_outputs(spec),), "float32") if makes_shares(config) else spec.label


def describe(config: Config) -> str:
    """What happens where, for people; "" where nothing does."""
    wanted = of(config)
    on_device = [*wanted.on_device, *(["label smoothing"] if config.label_smoothing else [])]
    parts = [("host", wanted.on_host), ("device", on_device)]
    return "; ".join(f"{', '.join(done)} on the {side}" for side, done in parts if done)


def prepare(config: Config, spec: Spec) -> Prepare | None:
    """Makes the function from what the training input yields, (x, y) or (x, y, numbers), to the (x, y) of a step.

    None where the input yields them as they are.
    """
    wanted, smoothing = of(config), config.label_smoothing
    shares = tasks.shares(spec) if makes_shares(config) else None
    columns = numbers.columns(wanted)
    if not columns and shares is None:
        return None

    def prepared(data: tuple) -> tuple:
        x, y, *drawn = data
        given = dict(zip(columns, tf.split(drawn[0], list(columns.values()), axis=1), strict=True)) if columns else {}
        if shares is not None:
            y = shares(y, smoothing, spec)
        if numbers.FLIP in given:
            x = flipped(x, given[numbers.FLIP])
        if numbers.ERASE in given:
            x = erased(x, given[numbers.ERASE], wanted.random_erasing)
        if numbers.MIX in given:
            x, y = mixed(x, y, given[numbers.MIX])
        return x, y

    return prepared


def flipped(images: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """Images mirrored left to right where the first number is below 1/2, upside down where a second one is."""
    for column, axis in zip(tf.split(given, given.shape[1], axis=1), (2, 1), strict=False):
        images = tf.where(column[:, :, None, None] < 0.5, tf.reverse(images, [axis]), images)
    return images


def erased(images: tf.Tensor, given: tf.Tensor, chance: float) -> tf.Tensor:
    """Images of which a rectangle takes the image's mean, each with probability `chance` (arXiv:1708.04896).

    given: whether, area, ratio, top and left of the rectangle; one that is longer than the image is cut to it.
    """
    whether, area, ratio, top, left = tf.unstack(given, axis=1)
    _, height, width, _ = images.shape
    least, most = _ERASED_AREA
    pixels = (least + area * (most - least)) * (height * width)
    low, high = (math.log(bound) for bound in _ERASED_RATIO)
    ratio = tf.exp(low + ratio * (high - low))
    rows = tf.clip_by_value(tf.round(tf.sqrt(pixels * ratio)), 1.0, float(height))
    columns = tf.clip_by_value(tf.round(tf.sqrt(pixels / ratio)), 1.0, float(width))
    rows = tf.where(whether < chance, rows, 0.0)
    first_row, first_column = tf.floor(top * (height - rows + 1.0)), tf.floor(left * (width - columns + 1.0))
    inside = _box(height, width, first_row, first_row + rows, first_column, first_column + columns)
    mean = tf.reduce_mean(tf.cast(images, tf.float32), axis=(1, 2), keepdims=True)
    return tf.where(inside, _like(mean, images), images)


def mixed(images: tf.Tensor, labels: tf.Tensor, given: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Images and labels [b, C] float32 of pairs: mixup (arXiv:1710.09412) or CutMix (arXiv:1905.04899).

    given: the part that is an example's own; 1 for CutMix and 0 for mixup; the centre of CutMix's rectangle, which is
    cut at the image's edge. Labels follow the area that it then has.
    """
    own, is_box, centre_y, centre_x = tf.unstack(given, axis=1)
    _, height, width, _ = images.shape
    spans = []
    for length, centre in ((height, centre_y), (width, centre_x)):
        half = tf.floor(tf.floor(length * tf.sqrt(1.0 - own)) / 2.0)
        middle = tf.floor(centre * length)
        spans += [tf.maximum(middle - half, 0.0), tf.minimum(middle + half, float(length))]
    top, bottom, left, right = spans
    cut = is_box > 0.5
    share = tf.where(cut, 1.0 - (bottom - top) * (right - left) / (height * width), own)[:, None]  # [b, 1]
    inside = _box(height, width, top, bottom, left, right)
    of_own = tf.where(cut[:, None, None, None], 1.0 - tf.cast(inside, tf.float32), share[:, :, None, None])
    values = tf.cast(images, tf.float32)
    blended = of_own * values + (1.0 - of_own) * _partners(values)
    return _like(blended, images), share * labels + (1.0 - share) * _partners(labels)


def _partners(values: tf.Tensor) -> tf.Tensor:
    """[b, ...] with the two rows of each pair exchanged."""
    pairs = tf.reshape(values, [-1, 2, *values.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), values.shape)


def _box(height: int, width: int, top: tf.Tensor, bottom: tf.Tensor, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """[b, H, W, 1] bool: rows from top to before bottom, columns from left to before right, [b] float32 each."""

    def between(length: int, first: tf.Tensor, end: tf.Tensor) -> tf.Tensor:  # [b, length]
        at = tf.range(length, dtype=tf.float32)
        return (at >= first[:, None]) & (at < end[:, None])

    return (between(height, top, bottom)[:, :, None] & between(width, left, right)[:, None, :])[..., None]


def _like(values: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """float32 values in the dtype of `images`."""
    return tf.cast(tf.round(values) if images.dtype.is_integer else values, images.dtype)
