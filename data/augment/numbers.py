"""The random numbers of augmentation: a function of (seed, step, row of the global batch).

A row of a step is one record in one epoch (order.py), so they are as well a function of record and epoch. They are
drawn for the whole global batch and cut to the rows at hand: neither hosts, replicas, threads, helpers nor a restart
change them. Each purpose has a stream of its own, so that an option does not change what another one draws.
"""

import enum

import tensorflow as tf

from data.augment import BOTH, NO_FLIP, Augmentation

FLIP, ERASE, MIX = "flip", "erase", "mix"
# An image is erased or not; area, ratio of the sides, top, left.
_ERASE_COLUMNS = 5
# How much of an example is its own, whether the rest comes as a box, the box's centre.
_MIX_COLUMNS = 4
# The seed of a run is below 2**31 (trainer/options/run.py): purposes stand above it.
_PURPOSE_BITS = 32


class Purpose(enum.IntEnum):
    """What numbers are for."""

    CROP = 0
    PAD = 1
    RAND_AUGMENT = 2
    FLIP = 3
    ERASE = 4
    MIX = 5
    MIXUP = 6
    CUTMIX = 7


def uniform(purpose: Purpose, seed: int, step: tf.Tensor, rows: int, columns: int) -> tf.Tensor:
    """[rows, columns] float32 in [0, 1)."""
    # The algorithm is named because the automatic choice depends on the device.
    return tf.random.stateless_uniform([rows, columns], _key(purpose, seed, step), alg="philox")


def seeds(purpose: Purpose, seed: int, step: tf.Tensor, rows: int) -> tf.Tensor:
    """[rows, 2] int64, a seed for each row: of an operation that draws by itself."""
    key, step = tf.unstack(_key(purpose, seed, step))
    return tf.stack([tf.fill([rows], key), step * rows + tf.range(rows, dtype=tf.int64)], axis=1)


def columns(augmentation: Augmentation) -> dict[str, int]:
    """What the device needs for each example: purpose -> columns, in the order of `of_device`."""
    found = {}
    if augmentation.flip != NO_FLIP:
        found[FLIP] = 2 if augmentation.flip == BOTH else 1
    if augmentation.random_erasing:
        found[ERASE] = _ERASE_COLUMNS
    if augmentation.mixes:
        found[MIX] = _MIX_COLUMNS
    return found


def of_device(
    augmentation: Augmentation, seed: int, step: tf.Tensor, rows: int, first: tf.Tensor, count: int
) -> tf.Tensor | None:
    """What the device needs, see `columns`; None where that is nothing.

    Args:
      augmentation: what is done.
      seed: of the run.
      step: [] int64.
      rows: of the global batch.
      first: [] int64, the first of the `count` rows that are wanted; an even one, as is `count`, where examples mix.

    Returns:
      [count, K] float32 in [0, 1].
    """
    wanted = columns(augmentation)
    if not wanted:
        return None
    parts = [
        uniform(purpose, seed, step, rows, wanted[name])
        for name, purpose in ((FLIP, Purpose.FLIP), (ERASE, Purpose.ERASE))
        if name in wanted
    ]
    if MIX in wanted:
        parts.append(tf.repeat(_mixing(augmentation, seed, step, rows // 2), 2, axis=0))
    return tf.ensure_shape(tf.concat(parts, axis=1)[first : first + count], [count, sum(wanted.values())])


def _mixing(augmentation: Augmentation, seed: int, step: tf.Tensor, pairs: int) -> tf.Tensor:
    """[pairs, 4] float32: how much of an example is its own; 1 where the rest is a box; the box's centre."""
    chance = 0.5 if augmentation.mixup and augmentation.cutmix else float(bool(augmentation.cutmix))
    choice, *centre = tf.unstack(uniform(Purpose.MIX, seed, step, pairs, 3), axis=1)
    is_box = choice < chance
    own = tf.ones([pairs])
    if augmentation.mixup:
        own = _beta(augmentation.mixup, _key(Purpose.MIXUP, seed, step), pairs)
    if augmentation.cutmix:
        own = tf.where(is_box, _beta(augmentation.cutmix, _key(Purpose.CUTMIX, seed, step), pairs), own)
    return tf.stack([own, tf.cast(is_box, tf.float32), *centre], axis=1)


def _beta(alpha: float, key: tf.Tensor, count: int) -> tf.Tensor:
    """[count] float32 of Beta(alpha, alpha): X / (X + Y) with X and Y of Gamma(alpha)."""
    # float64, since for a small alpha most of what is drawn is smaller than float32 can say.
    x, y = tf.unstack(tf.random.stateless_gamma([2, count], key, tf.constant(alpha, tf.float64), dtype=tf.float64))
    return tf.cast(x / (x + y), tf.float32)


def _key(purpose: Purpose, seed: int, step: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.constant(seed + (purpose << _PURPOSE_BITS), tf.int64), step])
