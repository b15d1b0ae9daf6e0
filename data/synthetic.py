"""Batches without files, for measuring: as fast as memory, of the shapes of a real dataset.

`--dataset=synthetic` is a dataset of square RGB images, as many and as large as ImageNet's unless told otherwise;
`--dataset=synthetic:NAME` has shapes, classes and numbers of examples of the dataset NAME, of which it reads the
description and no record.

What stands at a position is a function of the position alone, on any number of hosts and replicas and after any
restart: `DISTINCT` examples in turn, each image always with the same label. A model can learn them by heart, so a loss
that does not fall tells of a fault; how well it does tells nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from data import augment, catalog, errors, pipeline, records
from data.augment import host, numbers
from data.spec import Array, Spec

# Prime, so that the global batches of successive steps differ whatever their size.
DISTINCT = 61
# ImageNet's (https://www.image-net.org/challenges/LSVRC/2012/).
_IMAGE_SIZE = 224
_NUM_CLASSES = 1000
_SPLITS = {"train": 1_281_167, "test": 50_000}
# Bytes take all values. The range of other integers is not known: these are indices of any vocabulary.
_BYTES_BELOW, _INTEGERS_BELOW = 256, 2
_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Split:
    """As many examples as a split of the real dataset; no shards."""

    num_examples: int
    paths: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Stands where `pipeline.Dataset` does.

    name: "synthetic" or "synthetic:NAME/VERSION".
    splits: name of each split and its number of examples.
    describe: from `image_size` to the spec of an example, see `pipeline.Dataset.spec`.
    """

    name: str
    splits: Mapping[str, int]
    describe: Callable[[int | None], Spec]

    def split(self, name: str) -> Split:
        """The size of a split.

        Raises:
          DataError: no such split.
        """
        if name not in self.splits:
            guess = catalog.nearest(name, list(self.splits))
            raise errors.DataError(f"{self.name} has no split {name!r}{guess}. It has: {', '.join(self.splits)}.")
        return Split(self.splits[name])

    def spec(self, image_size: int | None = None) -> Spec:
        """Shapes, dtypes and number of classes; `image_size` in pixels, by default the real dataset's or 224.

        Raises:
          DataError: as `pipeline.Dataset.spec`.
        """
        return self.describe(image_size)


def open_dataset(
    dataset: str, data_dir: str | None = None, num_classes: int | None = None, sequence_length: int | None = None
) -> Dataset:
    """Opens "synthetic", with 1,000 classes unless told otherwise, or "synthetic:NAME".

    With a `sequence_length` its examples are token records of so many positions (data/datasets/sources/tokens.py),
    and `num_classes` is the vocabulary. NAME is found as `pipeline.open_dataset` finds it, and has its
    own number of classes.

    Raises:
      DataError: there is no dataset NAME.
    """
    name = catalog.described_by(dataset)
    if name is not None:
        like = pipeline.open_dataset(name, data_dir)
        return Dataset(f"{catalog.SYNTHETIC}:{like.name}", like.splits, like.spec)
    label, classes = Array((), "int32"), num_classes or _NUM_CLASSES
    if sequence_length is not None:
        tokens, segments = (Array((sequence_length,), "int32", below) for below in (classes, sequence_length + 1))
        packed = Spec({"tokens": tokens, "segments": segments}, label=tokens, num_classes=None)
        return Dataset(catalog.SYNTHETIC, _SPLITS, lambda image_size: packed)

    def describe(image_size: int | None) -> Spec:
        side = image_size or _IMAGE_SIZE
        return Spec(Array((side, side, 3), "uint8"), label, classes)

    return Dataset(catalog.SYNTHETIC, _SPLITS, describe)


def train_batches(
    dataset: Dataset,
    split: str = "train",
    *,
    global_batch_size: int,
    per_replica_batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    host_index: int = 0,
    num_hosts: int = 1,
    image_size: int | None = None,
    augmentation: augment.Augmentation = augment.NONE,
) -> tf.data.Dataset:
    """The training batches of one host's replicas, without end; arguments as in `pipeline.train_batches`.

    The seed is that of augmentation: which examples come, and in which order, is always the same.

    Returns:
      As `pipeline.train_batches`.

    Raises:
      DataError: no such split, or sizes that do not divide.
    """
    dataset.split(split)
    share = records.Share(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    spec = dataset.spec(image_size)
    at = _examples(spec, per_replica_batch_size)

    def batch(number: tf.Tensor) -> tuple:
        position = _position(share, number)
        x, y = at(position)
        step, row = position // global_batch_size, position % global_batch_size
        drawn = host.draw(augmentation, False, seed, step, global_batch_size)
        here = {purpose: given[row : row + per_replica_batch_size] for purpose, given in drawn.items()}
        if host.CROP in here:
            x = host.crop(x, here, augmentation, tf.TensorSpec(x.shape[1:], x.dtype))
        x = host.change(x, here, augmentation)
        device = numbers.of_device(augmentation, seed, step, global_batch_size, row, per_replica_batch_size)
        return (x, y) if device is None else (x, y, device)

    # Batches that the host does nothing to are slices, which no thread makes faster.
    parallel = records.cores() if augmentation.on_host else None
    batches = tf.data.Dataset.counter(start_step * _replicas(share)).map(batch, num_parallel_calls=parallel)
    return batches.prefetch(_STEPS_AHEAD * _replicas(share)).with_options(_options())


def eval_batches(
    dataset: Dataset,
    split: str = "test",
    *,
    global_batch_size: int,
    per_replica_batch_size: int,
    host_index: int = 0,
    num_hosts: int = 1,
    image_size: int | None = None,
) -> tf.data.Dataset:
    """The evaluation batches of one host's replicas: as many examples as the split has, then padding.

    Returns:
      Dataset of (x, y, mask), of static shape, as `pipeline.eval_batches` returns it.

    Raises:
      DataError: as `train_batches`.
    """
    num_examples = dataset.split(split).num_examples
    share = records.Share(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    at = _examples(dataset.spec(image_size), per_replica_batch_size)

    def batch(number: tf.Tensor) -> tuple[Any, tf.Tensor, tf.Tensor]:
        position = _position(share, number)
        mask = position + tf.range(per_replica_batch_size, dtype=tf.int64) < num_examples  # [b]
        return *at(position), tf.cast(mask, tf.float32)

    steps = pipeline.eval_steps(num_examples, global_batch_size)
    batches = tf.data.Dataset.range(steps * _replicas(share)).map(batch)
    return batches.prefetch(_STEPS_AHEAD * _replicas(share)).with_options(_options())


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    # Each host has taken its rows; tf.distribute must not shard a second time.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def _replicas(share: records.Share) -> int:
    """Replicas of the host."""
    return share.num_rows // share.per_replica_batch_size


def _position(share: records.Share, number: tf.Tensor) -> tf.Tensor:
    """Position in the order of all examples, int64, at which a host's batch `number` begins."""
    replicas = _replicas(share)
    row = share.first_row + number % replicas * share.per_replica_batch_size
    return number // replicas * share.global_batch_size + row


def _examples(spec: Spec, batch_size: int) -> Callable[[tf.Tensor], tuple[Any, tf.Tensor]]:
    """Makes the function from a position to the (x, y) of the `batch_size` examples from there on."""
    index = 0

    def values(array: Array, num_classes: int | None = None) -> tf.Tensor:  # [DISTINCT + b, *shape]
        nonlocal index
        index += 1
        below = num_classes or array.below
        # The algorithm is named because the automatic choice depends on the device.
        values = tf.random.stateless_uniform([DISTINCT, *array.shape], [0, index], alg="philox")  # in [0, 1)
        if below or not tf.as_dtype(array.dtype).is_floating:
            values = tf.floor(values * (below or (_BYTES_BELOW if array.dtype == "uint8" else _INTEGERS_BELOW)))
        repeats = -(-batch_size // DISTINCT) + 1
        return tf.concat([tf.cast(values, array.dtype)] * repeats, axis=0)[: DISTINCT + batch_size]

    if isinstance(spec.inputs, Array):
        inputs: Any = values(spec.inputs)
    else:
        inputs = {name: values(array) for name, array in spec.inputs.items()}
    everything = inputs, values(spec.label, spec.num_classes)

    def at(position: tf.Tensor) -> tuple[Any, tf.Tensor]:
        # A slice shares the memory of what it is cut from, so a batch costs no copy (rows of a multiple of 64 bytes).
        begin = position % DISTINCT

        def cut(values: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(values[begin : begin + batch_size], [batch_size, *values.shape[1:]])

        return tf.nest.map_structure(cut, everything)

    return at
