"""Which record stands at which position, and how to begin reading at any of them.

The order is a pure function of (split, seed, epoch); hosts, replicas and threads do not enter. In each epoch:

1. The shards are permuted and dealt, like cards, to V streams, V = min(shards, 8, W).
2. A round takes a block of K = W // V records from each stream that still has any, stream after stream.
3. The rounds, laid end to end, are cut anew into windows of W records; the last one of an epoch is shorter.
4. Each window is permuted.

Epochs follow each other without a gap, so nothing is dropped between them. Records travel as vectors of serialized
strings all the way: handling them one by one costs more than parsing them (facts-tpu.md, "Input pipeline").

A position is a number of records. Where it lies follows by arithmetic on the records each shard holds, so beginning
there reads at most one shard per stream (up to the offset in it), one round and one window too much, never an epoch.
"""

import dataclasses

import tensorflow as tf

from data import errors

MAX_STREAMS = 8
# Large reads: a request to Cloud Storage costs tens of milliseconds whatever its size.
_READ_BUFFER_BYTES = 4 << 20
# Blocks read ahead in each stream.
_STREAM_PREFETCH = 2
# Windows permuted at a time: enough to keep ahead of the parser, and a bound on memory on a host of a hundred cores.
_PARALLEL_WINDOWS = 2
# Room for the windows of one epoch in the seed; see `_seed`.
_EPOCH_SHIFT_BITS = 32


@dataclasses.dataclass(frozen=True)
class Split:
    """The records of one split.

    paths: one TFRecord file per shard.
    counts: number of records in each.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.counts):
            raise errors.DataError(
                f"{len(self.paths)} shards but {len(self.counts)} counts of records. Rebuild the dataset."
            )
        if self.num_examples == 0:
            raise errors.DataError(f"The dataset is empty: {len(self.paths)} shards with 0 records. Rebuild it.")

    @property
    def num_examples(self) -> int:
        """Number of records of all shards together."""
        return sum(self.counts)


def training_records(split: Split, *, seed: int, window: int, start_example: int = 0) -> tf.data.Dataset:
    """All epochs of a split, one after the other, without end.

    Args:
      split: what to read.
      seed: another seed, another order.
      window: W, records that are shuffled together; memory holds several windows of serialized records.
      start_example: position of the first record, counted over epochs.

    Returns:
      Dataset of string vectors [<=W], whose concatenation is the order. From position p it is the order from 0, less
      its first p records.

    Raises:
      DataError: `window` or `start_example` out of range.
      tf.errors.InvalidArgumentError: (while reading) shards that do not hold the counted number of records.
    """
    if window < 1:
        raise errors.DataError(
            f"The shuffle window must be at least 1 record, which leaves all but shards unshuffled. Received: {window}."
        )
    if start_example < 0:
        raise errors.DataError(f"The first position must not be negative. Received: {start_example}.")
    first_epoch, start = divmod(start_example, split.num_examples)

    def finish(epoch: tf.Tensor, index: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
        expected = tf.minimum(tf.constant(window, tf.int64), split.num_examples - index * window)
        _check_rows(records, expected)
        records = _shuffle(records, _seed(seed, epoch, index + 1))
        before = tf.where(epoch == first_epoch, tf.constant(start, tf.int64), 0) - index * window
        return records[tf.maximum(before, 0) :]  # less what lies before the first position

    first = _epoch_windows(split, seed, window, tf.constant(first_epoch, tf.int64), start // window)
    later = tf.data.Dataset.counter(first_epoch + 1).flat_map(
        lambda epoch: _epoch_windows(split, seed, window, epoch, first_window=0)
    )
    # One map behind all epochs: its worker threads live on over the end of an epoch.
    return first.concatenate(later).map(finish, num_parallel_calls=_PARALLEL_WINDOWS, deterministic=True)


def evaluation_records(split: Split, *, batch_size: int) -> tf.data.Dataset:
    """Every record once, in file order.

    Returns:
      Dataset of string vectors [batch_size]; the last may be shorter.

    Raises:
      tf.errors.InvalidArgumentError: (while reading) shards that do not hold the counted number of records.
    """
    paths = [path for path, count in zip(split.paths, split.counts, strict=True) if count]
    batches = tf.data.TFRecordDataset(paths, buffer_size=_READ_BUFFER_BYTES).batch(batch_size)
    num_batches = -(-split.num_examples // batch_size)
    # A file that ends too early would otherwise end evaluation early, unnoticed.
    batches = batches.apply(tf.data.experimental.assert_cardinality(num_batches))

    def check(index: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
        expected = tf.minimum(tf.constant(batch_size, tf.int64), split.num_examples - index * batch_size)
        _check_rows(records, expected)
        return records

    return batches.enumerate().map(check)


def _epoch_windows(split: Split, seed: int, window: int, epoch: tf.Tensor, first_window: int) -> tf.data.Dataset:
    """(epoch, index, records [<=W]) of one epoch, from window `first_window` on, not yet permuted."""
    shards = [(path, count) for path, count in zip(split.paths, split.counts, strict=True) if count]
    num_streams = min(len(shards), MAX_STREAMS, window)  # V
    block = window // num_streams  # K, so V * K <= W
    order = _shuffle(tf.range(len(shards)), _seed(seed, epoch, tf.zeros([], tf.int64)))  # [shards] int32
    paths = tf.gather(tf.constant([path for path, _ in shards]), order)  # [shards] string
    counts = tf.gather(tf.constant([count for _, count in shards], tf.int64), order)  # [shards] int64
    lengths = tf.stack([tf.reduce_sum(counts[stream::num_streams]) for stream in range(num_streams)])  # [V]
    first_round, surplus = _locate(lengths, block, first_window * window)

    def stream_blocks(stream: tf.Tensor) -> tf.data.Dataset:
        stream_paths, stream_counts = paths[stream::num_streams], counts[stream::num_streams]
        if first_window == 0:  # apart, because even skip(0) costs something for every record of the epoch
            records = tf.data.TFRecordDataset(stream_paths, buffer_size=_READ_BUFFER_BYTES)
        else:
            records = _read_from(stream_paths, stream_counts, first_round * block)
        return records.batch(block).prefetch(_STREAM_PREFETCH)

    windows = tf.data.Dataset.range(num_streams).interleave(
        stream_blocks, cycle_length=num_streams, block_length=1, num_parallel_calls=num_streams, deterministic=True
    )
    # The surplus leaves by whole vectors too: filled up to a window of its own, which is then skipped.
    filler = tf.data.Dataset.from_tensors(tf.fill([window - surplus], ""))
    windows = filler.concatenate(windows).rebatch(window).skip(1)
    # A file that ends too early by whole windows would otherwise shorten the epoch, unnoticed.
    num_windows = -(-split.num_examples // window)
    windows = windows.apply(tf.data.experimental.assert_cardinality(num_windows - first_window))
    return windows.enumerate(start=first_window).map(lambda index, records: (epoch, index, records))


def _locate(lengths: tf.Tensor, block: int, position: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The last round that begins at or before `position` of an epoch, and how many records it begins before; int64.

    lengths: [V] int64, records of each stream.
    """
    rounds = tf.range(tf.reduce_max(lengths) // block + 1)  # [rounds]
    taken = tf.reduce_sum(tf.minimum(lengths, rounds[:, tf.newaxis] * block), axis=1)  # [rounds], by all rounds before
    first_round = tf.searchsorted(taken, tf.constant([position], tf.int64), side="right", out_type=tf.int64)[0] - 1
    return first_round, position - taken[first_round]


def _read_from(paths: tf.Tensor, counts: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
    """The records of a stream from the `offset`-th on; opens no shard before the one that holds it."""
    ends = tf.cumsum(counts)  # [shards of the stream] int64
    shard = tf.searchsorted(ends, [offset], side="right")[0]  # past the last shard if the stream is used up
    begin = tf.concat([[0], ends], axis=0)[shard]
    return tf.data.TFRecordDataset(paths[shard:], buffer_size=_READ_BUFFER_BYTES).skip(offset - begin)


def _seed(seed: int, epoch: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """[2] int64, another for every (seed, epoch, index); index 0 is the order of the shards, i + 1 is window i."""
    return tf.stack([tf.constant(seed, tf.int64), tf.bitwise.left_shift(epoch, _EPOCH_SHIFT_BITS) + index])


def _shuffle(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    # The algorithm is named because the automatic choice depends on the device.
    return tf.random.experimental.stateless_shuffle(values, seed=seed, alg="philox")


def _check_rows(records: tf.Tensor, expected: tf.Tensor) -> None:
    """An error where the shards do not hold what dataset_info.json counts. Within a tf.data function it always runs."""
    tf.debugging.assert_equal(
        tf.size(records, out_type=tf.int64),
        expected,
        message="The shards do not hold the number of records that dataset_info.json states. Rebuild the dataset.",
    )
