"""From a prepared dataset to the batches of one host.

    vectors of serialized records ─▶ global batches ─▶ this host's rows ─▶ replica batches ─▶ parse ─▶ prefetch
             (records.py)                                                                  (parse.py)

The global batch at a step depends on (dataset, seed, step) only. Of its B rows, host h of H takes [h*B/H, (h+1)*B/H),
and the r-th batch of b rows within them is for its r-th replica: however many hosts and replicas share a step, it is
made of the same rows. Every host reads all records for it and parses its own.
"""

import dataclasses
import os
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from data import catalog, errors, parse, records
from data.spec import Spec

_RECORD_FORMAT = "tfrecord"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared dataset, opened.

    name: as TFDS names it, e.g. "digits/1.0.0".
    directory: where its files are.
    info: tfds.core.DatasetInfo.
    """

    name: str
    directory: str
    info: Any

    @property
    def splits(self) -> dict[str, int]:
        """Name of each split and its number of examples."""
        return {name: split.num_examples for name, split in self.info.splits.items()}

    def split(self, name: str) -> records.Split:
        """The files of a split.

        Raises:
          DataError: no such split, no examples in it, or files that are missing or empty.
        """
        if name not in self.info.splits:
            guess = catalog.nearest(name, list(self.splits))
            raise errors.DataError(
                f"{self.name} has no split {name!r}{guess}. It has: {', '.join(self.splits) or 'none'}. Choose one."
            )
        split = self.info.splits[name]
        if not split.num_examples:
            raise errors.DataError(
                f"Split {name!r} of {self.name} in {self.directory} is empty: 0 examples. Rebuild the dataset."
            )
        paths = tuple(os.fspath(path) for path in split.filepaths)
        counts = tuple(int(length) for length in split.shard_lengths)
        _check_files(self.directory, [path for path, count in zip(paths, counts, strict=True) if count])
        return records.Split(paths, counts)

    def spec(self, image_size: int | None = None) -> Spec:
        """Shapes, dtypes and number of classes of the examples; `image_size` in pixels as in `train_batches`.

        Raises:
          DataError: examples that cannot be batched with fixed shapes.
        """
        return parse.select_fields(self.info, image_size).spec()


def open_dataset(dataset: str, data_dir: str | None = None) -> Dataset:
    """Opens a dataset in TFDS format, by name under `data_dir` or by path (see `catalog.locate`).

    Raises:
      DataError: not there, or not readable by this program.
    """
    directory = catalog.locate(dataset, data_dir)
    try:
        builder = tfds.builder_from_directory(directory)
    except (ValueError, KeyError, OSError) as error:  # damaged JSON, a feature no TFDS knows, files missing
        raise errors.DataError(f"{directory} does not open as a TFDS dataset: {error}. Rebuild it.") from error
    stored_as = builder.info.file_format.value if builder.info.file_format else _RECORD_FORMAT
    if stored_as != _RECORD_FORMAT:
        raise errors.DataError(
            f"{directory} is stored as {stored_as}, this program reads {_RECORD_FORMAT}. "
            f"Rebuild it: tfds build {builder.name} --file_format={_RECORD_FORMAT}"
        )
    return Dataset(builder.info.full_name, os.fspath(directory), builder.info)


def train_batches(
    dataset: Dataset,
    split: str = "train",
    *,
    global_batch_size: int,
    per_replica_batch_size: int,
    seed: int,
    shuffle_window: int,
    start_step: int = 0,
    host_index: int = 0,
    num_hosts: int = 1,
    image_size: int | None = None,
) -> tf.data.Dataset:
    """The training batches of one host's replicas, without end.

    Args:
      dataset: from `open_dataset`.
      split: name of the split to train on.
      global_batch_size: B, examples of a step over all hosts and replicas; a multiple of
        `num_hosts * per_replica_batch_size`.
      per_replica_batch_size: b, examples of a step on one replica.
      seed: of the order of the examples.
      shuffle_window: records that are shuffled together; see `records.training_records`.
      start_step: step of the first batch: position `start_step * global_batch_size` of the order.
      host_index: of this host, in [0, num_hosts).
      num_hosts: hosts (workers) that share the global batch.
      image_size: side in pixels to which images are resized (bilinear), or None.

    Returns:
      Dataset of (x, y), of static shape: tensors [b, *shape] as `Dataset.spec` tells. A host with R replicas takes R
      of them a step.

    Raises:
      DataError: a mistake in the arguments, or a dataset that is missing files or cannot be batched.
    """
    rows = _HostRows(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    fields = parse.select_fields(dataset.info, image_size)
    ordered = records.training_records(
        dataset.split(split), seed=seed, window=shuffle_window, start_example=start_step * global_batch_size
    )
    if num_hosts > 1:  # otherwise the rows of all replicas already lie in order
        ordered = ordered.rebatch(global_batch_size, drop_remainder=True).map(rows.of_host)
    batches = ordered.rebatch(per_replica_batch_size, drop_remainder=True)
    batches = batches.map(
        parse.batch_parser(fields, per_replica_batch_size), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    return batches.prefetch(tf.data.AUTOTUNE).with_options(_options())


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
    """The evaluation batches of one host's replicas: every example once, in file order, then padding.

    Every host and replica gets exactly `eval_steps` batches, so that none waits for another in a collective. Arguments
    as in `train_batches`.

    Returns:
      Dataset of (x, y, mask), of static shape; mask [b] float32 is 1 for an example, 0 for padding. Padding repeats a
      real example: a batch of zeros may give NaN, and NaN times 0 is NaN.

    Raises:
      DataError: as `train_batches`.
    """
    rows = _HostRows(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    parser = parse.batch_parser(parse.select_fields(dataset.info, image_size), per_replica_batch_size)

    def pad(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:  # [<=B] string to [B] string, [B] float32
        missing = global_batch_size - tf.size(batch)
        padded = tf.concat([batch, tf.fill([missing], batch[0])], axis=0)
        return rows.of_host(padded), rows.of_host(tf.sequence_mask(tf.size(batch), global_batch_size, tf.float32))

    def finish(batch: tf.Tensor, mask: tf.Tensor) -> tuple[parse.Tensors, tf.Tensor, tf.Tensor]:
        return *parser(batch), mask

    ordered = records.evaluation_records(dataset.split(split), batch_size=global_batch_size)
    batches = ordered.map(pad).rebatch(per_replica_batch_size, drop_remainder=True)
    batches = batches.map(finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return batches.prefetch(tf.data.AUTOTUNE).with_options(_options())


def eval_steps(num_examples: int, global_batch_size: int) -> int:
    """Steps of one evaluation: the last global batch may be part padding."""
    return -(-num_examples // global_batch_size)


@dataclasses.dataclass(frozen=True)
class _HostRows:
    """Which rows of a global batch are this host's."""

    global_batch_size: int
    per_replica_batch_size: int
    host_index: int
    num_hosts: int

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.per_replica_batch_size, self.num_hosts) < 1:
            raise errors.DataError(f"Batch sizes and the number of hosts must be at least 1. Received: {self}.")
        if not 0 <= self.host_index < self.num_hosts:
            raise errors.DataError(f"host_index must be in [0, {self.num_hosts}). Received: {self.host_index}.")
        step = self.num_hosts * self.per_replica_batch_size
        if self.global_batch_size % step:
            nearest = max(step, round(self.global_batch_size / step) * step)
            raise errors.DataError(
                f"global_batch_size must be a multiple of num_hosts * per_replica_batch_size = {step}. "
                f"Received: {self.global_batch_size}; the nearest that fits is {nearest}."
            )

    def of_host(self, batch: tf.Tensor) -> tf.Tensor:
        """[B, ...] to [B / num_hosts, ...]."""
        size = self.global_batch_size // self.num_hosts
        return batch[self.host_index * size : (self.host_index + 1) * size]


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # Each host has taken its rows; tf.distribute must not shard a second time.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def _check_files(directory: str, paths: list[str]) -> None:
    """Raises DataError where a shard is missing or, on a local disk, empty. One listing, however many shards."""
    folder = epath.Path(directory)
    there = {path.name for path in folder.iterdir()}
    missing = [path for path in paths if os.path.basename(path) not in there]
    if missing:
        raise errors.DataError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}. Rebuild the dataset."
        )
    empty = [] if catalog.is_remote(directory) else [path for path in paths if not os.path.getsize(path)]
    if empty:
        raise errors.DataError(
            f"{len(empty)} of {len(paths)} shards are empty files, the first is {empty[0]}. Rebuild the dataset."
        )
