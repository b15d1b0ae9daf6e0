"""From a prepared dataset to the batches of one host.

    order ─▶ serialized records of replica batches ─▶ parse, decode, augment ─▶ prefetch
  (order.py)          (records.py)                     (parse.py, augment/)

The global batch at a step depends on (dataset, seed, step) only. Of its B rows, host h of H takes [h*B/H, (h+1)*B/H),
and the r-th batch of b rows within them is for its r-th replica: however many hosts and replicas share a step, it is
made of the same rows. A host reads the streams that its rows come from, and no other.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from data import augment, catalog, errors, order, parse, records
from data.augment import host, numbers
from data.spec import Spec

_RECORD_FORMAT = "tfrecord"
# Bound on the memory of batches that are being parsed: a host has up to a few hundred cores.
_PARSED_BYTES = 1 << 30


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
        return records.Split(paths, counts, split.num_bytes or 0)

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


def plan_order(
    dataset: Dataset, split: str = "train", *, global_batch_size: int, seed: int, shuffle_mib: float
) -> order.Order:
    """Which record of a split stands at which position; arguments and errors as of `train_batches`.

    `Order.record_ids` tells which records a step holds, `records.Share.describe` how hosts share the reading.
    """
    return _plan(dataset.split(split), global_batch_size, seed, shuffle_mib)


def train_batches(
    dataset: Dataset,
    split: str = "train",
    *,
    global_batch_size: int,
    per_replica_batch_size: int,
    seed: int,
    shuffle_mib: float,
    start_step: int = 0,
    host_index: int = 0,
    num_hosts: int = 1,
    image_size: int | None = None,
    copies: Mapping[str, str] | None = None,
    augmentation: augment.Augmentation = augment.NONE,
    part: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """The training batches of one host's replicas, without end.

    Args:
      dataset: from `open_dataset`.
      split: name of the split to train on.
      global_batch_size: B, examples of a step over all hosts and replicas; a multiple of
        `num_hosts * per_replica_batch_size`.
      per_replica_batch_size: b, examples of a step on one replica.
      seed: of the order of the examples, and of augmentation.
      shuffle_mib: memory for shuffling serialized records, MiB over all streams of the dataset; a host that reads only
        its own streams holds its share.
      start_step: step of the first batch.
      host_index: of this host, in [0, num_hosts).
      num_hosts: hosts (workers) that share the global batch.
      image_size: side in pixels to which images are cropped (encoded ones that vary in size) or resized, or None.
      copies: path of a shard -> path of the file to read in its place, which holds as many records
        (`quarantine.prepare`, `cache`).
      augmentation: what is done to images; data with other inputs than one image takes the default only.
      part: (k, K) for every K-th batch, beginning with the k-th, to be computed by another machine (`service.read`).

    Returns:
      Dataset of (x, y), of static shape: tensors [b, *shape] as `Dataset.spec` tells. A host with R replicas takes R
      of them a step. Where the device augments, (x, y, numbers): [b, K] float32 of `augment.numbers.of_device`.

    Raises:
      DataError: a mistake in the arguments, or a dataset that is missing files or cannot be batched.
    """
    share = records.Share(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    fields = parse.select_fields(dataset.info, image_size)
    parser = parse.batch_parser(fields, per_replica_batch_size, augmentation)
    shards = dataset.split(split)
    planned = _plan(shards, global_batch_size, seed, shuffle_mib)

    photographs = parse.crops_photographs(fields)

    def finish(batch: tf.Tensor, step: tf.Tensor, row: tf.Tensor) -> tuple:
        drawn = host.draw(augmentation, photographs, seed, step, global_batch_size)
        here = {purpose: given[row : row + per_replica_batch_size] for purpose, given in drawn.items()}
        made = parser(batch, here)
        device = numbers.of_device(augmentation, seed, step, global_batch_size, row, per_replica_batch_size)
        return made if device is None else (*made, device)

    read = records.training_records(
        shards.replaced(copies or {}),
        planned,
        share,
        finish,
        # The cores of another machine are known there only: then one batch a core, and 16 at most.
        _parallel(fields, share) if part is None else tf.data.AUTOTUNE,
        start_step,
        part or (0, 1),
    )
    return read.prefetch(_ahead(share)).with_options(options())


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
    rows = records.Share(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    fields = parse.select_fields(dataset.info, image_size)
    parser = parse.batch_parser(fields, per_replica_batch_size)

    def pad(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:  # [<=B] string to [B] string, [B] float32
        missing = global_batch_size - tf.size(batch)
        padded = tf.concat([batch, tf.fill([missing], batch[0])], axis=0)
        return rows.of_host(padded), rows.of_host(tf.sequence_mask(tf.size(batch), global_batch_size, tf.float32))

    def finish(batch: tf.Tensor, mask: tf.Tensor) -> tuple[parse.Tensors, tf.Tensor, tf.Tensor]:
        return *parser(batch, None), mask

    ordered = records.evaluation_records(dataset.split(split), batch_size=global_batch_size)
    batches = ordered.map(pad).rebatch(per_replica_batch_size, drop_remainder=True)
    batches = batches.map(finish, num_parallel_calls=_parallel(fields, rows), deterministic=True)
    return batches.prefetch(_ahead(rows)).with_options(options())


def eval_steps(num_examples: int, global_batch_size: int) -> int:
    """Steps of one evaluation: the last global batch may be part padding."""
    return -(-num_examples // global_batch_size)


def _plan(shards: records.Split, global_batch_size: int, seed: int, shuffle_mib: float) -> order.Order:
    counts = tuple(count for _, count in shards.filled)
    return order.plan(
        counts, shards.record_bytes, seed=seed, global_batch_size=global_batch_size, shuffle_mib=shuffle_mib
    )


def _parallel(fields: parse.Fields, share: records.Share) -> int:
    """Batches parsed at a time: one a core, as far as memory allows."""
    arrays = [*(field.array for field in fields.inputs.values()), fields.label.array]
    batch_bytes = share.per_replica_batch_size * sum(math.prod(a.shape) * tf.as_dtype(a.dtype).size for a in arrays)
    return max(1, min(records.cores(), _PARSED_BYTES // max(1, batch_bytes)))


def _ahead(share: records.Share) -> int:
    """Batches ready for the devices: those of two steps."""
    return 2 * share.num_rows // share.per_replica_batch_size


def options() -> tf.data.Options:
    """How TensorFlow runs these pipelines: in order, and with no tuning of its own."""
    options = tf.data.Options()
    options.deterministic = True
    # Every number it would tune is set here. Its clock reads for every record cost a third of reading it
    # (scripts/bench_input.py), and the buffers it grows are nobody's to bound.
    options.autotune.enabled = False
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
