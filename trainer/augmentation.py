"""What the device does to a batch before a step: flips, erases, mixes. Arithmetic only, of numbers that it is given.

Each operation is a function of a batch of images [b, H, W, C] and of numbers [b, n] float32 in [0, 1] (what they are
for: `data.augment.numbers`), and keeps shape and dtype: uint8 stays uint8, so that model and export know nothing of all
this. Blending then rounds by half a level of 255 at most.

Pairs are the rows 2n and 2n + 1 of the global batch, which is shuffled already; both are on one replica. Either becomes
a mixture of the two by the same weight, which Beta(alpha, alpha) allows, being symmetric.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

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
        given = dict(zip(columns, _split(drawn[0], list(columns.values())), strict=True)) if columns else {}
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


def flipped(images: Any, given: Any) -> Any:
    """Images mirrored left to right where the first number is below 1/2, upside down where a second one is."""
    for column, axis in zip(ops.unstack(given, axis=1), (2, 1), strict=False):
        images = ops.where(column[:, None, None, None] < 0.5, ops.flip(images, axis), images)
    return images


def erased(images: Any, given: Any, chance: float) -> Any:
    """Images of which a rectangle takes the image's mean, each with probability `chance` (arXiv:1708.04896).

    given: whether, area, ratio, top and left of the rectangle; one that is longer than the image is cut to it.
    """
    whether, area, ratio, top, left = ops.unstack(given, axis=1)
    _, height, width, _ = images.shape
    least, most = _ERASED_AREA
    pixels = (least + area * (most - least)) * (height * width)
    low, high = (math.log(bound) for bound in _ERASED_RATIO)
    ratio = ops.exp(low + ratio * (high - low))
    rows = ops.clip(ops.round(ops.sqrt(pixels * ratio)), 1.0, float(height))
    columns = ops.clip(ops.round(ops.sqrt(pixels / ratio)), 1.0, float(width))
    rows = ops.where(whether < chance, rows, 0.0)
    first_row, first_column = ops.floor(top * (height - rows + 1.0)), ops.floor(left * (width - columns + 1.0))
    inside = _box(height, width, first_row, first_row + rows, first_column, first_column + columns)
    mean = ops.mean(ops.cast(images, "float32"), axis=(1, 2), keepdims=True)
    return ops.where(inside, _like(mean, images), images)


def mixed(images: Any, labels: Any, given: Any) -> tuple[Any, Any]:
    """Images and labels [b, C] float32 of pairs: mixup (arXiv:1710.09412) or CutMix (arXiv:1905.04899).

    given: the part that is an example's own; 1 for CutMix and 0 for mixup; the centre of CutMix's rectangle, which is
    cut at the image's edge. Labels follow the area that it then has.
    """
    own, is_box, centre_y, centre_x = ops.unstack(given, axis=1)
    _, height, width, _ = images.shape
    spans = []
    for length, centre in ((height, centre_y), (width, centre_x)):
        half = ops.floor(ops.floor(length * ops.sqrt(1.0 - own)) / 2.0)
        middle = ops.floor(centre * length)
        spans += [ops.maximum(middle - half, 0.0), ops.minimum(middle + half, float(length))]
    top, bottom, left, right = spans
    cut = is_box > 0.5
    share = ops.where(cut, 1.0 - (bottom - top) * (right - left) / (height * width), own)[:, None]  # [b, 1]
    inside = _box(height, width, top, bottom, left, right)
    of_own = ops.where(cut[:, None, None, None], 1.0 - ops.cast(inside, "float32"), share[:, :, None, None])
    values = ops.cast(images, "float32")
    blended = of_own * values + (1.0 - of_own) * _partners(values)
    return _like(blended, images), share * labels + (1.0 - share) * _partners(labels)


def _partners(values: Any) -> Any:
    """[b, ...] with the two rows of each pair exchanged."""
    pairs = ops.reshape(values, [-1, 2, *values.shape[1:]])
    return ops.reshape(ops.flip(pairs, 1), values.shape)


def _box(height: int, width: int, top: Any, bottom: Any, left: Any, right: Any) -> Any:
    """[b, H, W, 1] bool: rows from top to before bottom, columns from left to before right, [b] float32 each."""

    def between(length: int, first: Any, end: Any) -> Any:  # [b, length]
        at = ops.arange(length, dtype="float32")
        return (at >= first[:, None]) & (at < end[:, None])

    return (between(height, top, bottom)[:, :, None] & between(width, left, right)[:, None, :])[..., None]


def _split(values: Any, widths: Sequence[int]) -> list[Any]:
    """[b, sum of widths] to parts of these widths."""
    ends = itertools.accumulate(widths)
    return [values[:, end - width : end] for width, end in zip(widths, ends, strict=True)]


def _like(values: Any, images: Any) -> Any:
    """float32 values in the dtype of `images`."""
    return ops.cast(ops.round(values) if keras.backend.is_int_dtype(images.dtype) else values, images.dtype)
