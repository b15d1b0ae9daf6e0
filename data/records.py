"""Reading records in the order that order.py works out, beginning at any step.

    V streams of shards ─▶ pieces of windows ─▶ one window of each stream ─▶ rows of replica batches
    (TFRecordDataset)      (vectors, moved)      (vectors, moved)             (one copy, in the permuted order)

Records travel as vectors of serialized strings all the way: handling them one by one costs more than parsing them
(facts-tpu.md, "Input pipeline"). TensorFlow's `batch` moves strings without copying them, so each is copied once, when
the rows of a batch are picked from a window.

Beginning at a step reads again what lies in the window before it, and in the shard before that. On a local disk only
the 12 bytes of each header of the latter are read.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from data import catalog, errors, framing
from data.order import Order, Part

# A request to Cloud Storage costs tens of milliseconds whatever its size. A local read costs microseconds, and a small
# buffer stays in the processor's cache.
_REMOTE_BUFFER_BYTES = 4 << 20
_LOCAL_BUFFER_BYTES = 256 << 10
# Evaluation batches read ahead.
_PREFETCH = 2
_MISCOUNTED = "The shards do not hold the number of records that dataset_info.json states. Rebuild the dataset."


@dataclasses.dataclass(frozen=True)
class Split:
    """The records of one split.

    paths: one TFRecord file per shard.
    counts: number of records in each.
    num_bytes: of all serialized records together; 0 if unknown, then the files are asked.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    num_bytes: int = 0

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

    @property
    def filled(self) -> list[tuple[str, int]]:
        """(path, count) of the shards that hold records; an empty one need not even exist."""
        return [(path, count) for path, count in zip(self.paths, self.counts, strict=True) if count]

    def replaced(self, copies: Mapping[str, str]) -> "Split":
        """The same with other files in the place of some."""
        return dataclasses.replace(self, paths=tuple(copies[path] if path in copies else path for path in self.paths))

    @property
    def record_bytes(self) -> float:
        """Mean size of a serialized record."""
        total = self.num_bytes or sum(tf.io.gfile.stat(path).length for path, _ in self.filled)
        return total / self.num_examples


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of every global batch that one host's replicas take: [h*B/H, (h+1)*B/H), replica after replica.

    global_batch_size: B. per_replica_batch_size: b. host_index: h. num_hosts: H.
    """

    global_batch_size: int
    per_replica_batch_size: int
    host_index: int = 0
    num_hosts: int = 1

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

    @property
    def num_rows(self) -> int:
        """Rows of this host, B/H."""
        return self.global_batch_size // self.num_hosts

    @property
    def first_row(self) -> int:
        """First row of this host."""
        return self.host_index * self.num_rows

    def of_host(self, batch: tf.Tensor) -> tf.Tensor:
        """[B, ...] to [B / num_hosts, ...]."""
        return batch[self.first_row : self.first_row + self.num_rows]

    def streams(self, order: Order) -> tuple[int, int]:
        """First and end of the streams that hold this host's rows: it reads no other."""
        end_row = self.first_row + self.num_rows
        return self.first_row // order.block, -(-end_row // order.block)

    def describe(self, order: Order) -> str:
        """How the records are shared out, for people."""
        first, end = self.streams(order)
        of = f"of {order.num_streams} streams over {len(order.counts)} shards"
        if self.num_hosts == 1:
            return f"all {of}"
        if order.num_streams % self.num_hosts == 0:
            return f"by file: {end - first} {of} per host, read by no other"
        return (
            f"by record: {end - first} {of} per host, shared with others, as {self.num_hosts} hosts do not divide them"
        )


def training_records(
    split: Split,
    order: Order,
    share: Share,
    finish: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Any],
    parallel: int = 1,
    start_step: int = 0,
    part: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """The records of one host's replicas, without end.

    Args:
      split: what to read.
      order: from `order.plan`, with the counts of `split.filled`.
      share: rows of this host.
      finish: what to make of (records [b] string, step int64, row int64), where `row` is the place of the first record
        in the global batch. It runs in the same call that picks the records, while these are in the processor's cache.
      parallel: batches finished at a time.
      start_step: step of the first batch. From step s it is what follows s steps from 0.
      part: (k, K) for every K-th element, beginning with the k-th; the others are not finished.

    Returns:
      Dataset of what `finish` returns. A host with R replicas takes R elements a step.

    Raises:
      DataError: `start_step` is negative, or (on a local disk) a shard ends before the first record.
      tf.errors.OpError: (while reading) damaged shards, or such that do not hold the counted number of records.
    """
    if start_step < 0:
        raise errors.DataError(f"The first step must not be negative. Received: {start_step}.")
    first_window, skipped_steps = divmod(start_step, order.steps_per_window)
    first, end = share.streams(order)
    replicas = share.num_rows // share.per_replica_batch_size

    # pieces: [pieces * streams, W/pieces] string
    def batches_of(window: tf.Tensor, pieces: tf.Tensor) -> tf.data.Dataset:
        skipped = tf.where(window == first_window, tf.constant(skipped_steps * replicas, tf.int64), 0)
        rows = _places(order, share, window)[skipped:]  # [batches, b]
        number = window * order.steps_per_window * replicas + skipped + tf.range(tf.shape(rows, tf.int64)[0])
        records = tf.data.Dataset.from_tensors(tf.reshape(pieces, [-1])).repeat()  # one tensor, never copied
        return tf.data.Dataset.zip(records, tf.data.Dataset.from_tensor_slices((rows, number)))

    def pick(records: tf.Tensor, rows: tuple[tf.Tensor, tf.Tensor]) -> Any:
        places, number = rows
        row = share.first_row + number % replicas * share.per_replica_batch_size
        return finish(tf.gather(records, places), number // replicas, row)

    pieces = _pieces(split, order, first, end, offset=first_window * order.window)
    windows = pieces.batch((end - first) * order.pieces, drop_remainder=True).prefetch(1)
    batches = windows.enumerate(start=first_window).flat_map(batches_of)
    batches = batches.shard(part[1], part[0]) if part != (0, 1) else batches
    return batches.map(pick, num_parallel_calls=parallel, deterministic=True)


def unshuffled_records(split: Split, order: Order, share: Share) -> tf.data.Dataset:
    """The same records as `training_records` from step 0, before windows are shuffled: string vectors [W/pieces]."""
    first, end = share.streams(order)
    return _pieces(split, order, first, end, offset=0)


def evaluation_records(split: Split, *, batch_size: int) -> tf.data.Dataset:
    """Every record once, in file order.

    Returns:
      Dataset of string vectors [batch_size]; the last may be shorter.

    Raises:
      tf.errors.InvalidArgumentError: (while reading) shards that do not hold the counted number of records.
    """
    paths = [path for path, _ in split.filled]
    batches = tf.data.TFRecordDataset(paths, buffer_size=_buffer_bytes(paths[0])).batch(batch_size)
    num_batches = -(-split.num_examples // batch_size)
    # A file that ends too early would otherwise end evaluation early, unnoticed.
    batches = batches.apply(tf.data.experimental.assert_cardinality(num_batches))

    def check(index: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
        expected = tf.minimum(tf.constant(batch_size, tf.int64), split.num_examples - index * batch_size)
        tf.debugging.assert_equal(tf.size(records, out_type=tf.int64), expected, message=_MISCOUNTED)
        return records

    return batches.enumerate().map(check).prefetch(_PREFETCH)


def _places(order: Order, share: Share, window: tf.Tensor) -> tf.Tensor:
    """[steps * R, b] int32: where the rows of each replica's batch lie in a window as `_pieces` delivers it."""
    first, end = share.streams(order)
    begin = share.first_row - first * order.block
    rows = order.batch_rows(window, first, end)[:, begin : begin + share.num_rows]  # [steps, B/H, 2]
    stream, offset = rows[..., 0], rows[..., 1]
    piece = order.window // order.pieces
    place = (offset // piece * (end - first) + stream) * piece + offset % piece
    return tf.reshape(place, [-1, share.per_replica_batch_size])


def _pieces(split: Split, order: Order, first: int, end: int, offset: int) -> tf.data.Dataset:
    """Streams [first, end) from `offset` on, taking turns, each time with W/pieces records: [W/pieces] string."""
    paths = [path for path, _ in split.filled]
    seeks = tf.constant([_seek(paths, order, stream, offset) for stream in range(first, end)], tf.int64)
    shard_paths = tf.constant(paths)

    def stream_pieces(stream: tf.Tensor) -> tf.data.Dataset:
        first_epoch = order.epoch_at(stream, tf.constant(offset, tf.int64))

        def epoch_records(epoch: tf.Tensor) -> tf.data.Dataset:
            done = tf.maximum(offset - order.part_begin(stream, epoch), 0)
            seek = tf.where(epoch == first_epoch, seeks[stream - first], -1)
            return _read(shard_paths, order.part(stream, epoch, done), seek, _buffer_bytes(paths[0]))

        # Not the first epoch concatenated with the rest: that costs 0.4 us for every record of all epochs.
        records = tf.data.Dataset.counter(first_epoch).flat_map(epoch_records)
        return records.batch(order.window // order.pieces, drop_remainder=True)

    # On a local disk reading is work for the cores; from a network it is mostly waiting.
    threads = end - first if catalog.is_remote(paths[0]) else min(end - first, cores())
    return tf.data.Dataset.range(first, end).interleave(
        stream_pieces, cycle_length=end - first, block_length=1, num_parallel_calls=threads, deterministic=True
    )


def _read(paths: tf.Tensor, part: Part, seek: tf.Tensor, buffer_size: int) -> tf.data.Dataset:
    """The records of a part, one by one; `seek` is the byte at which its head begins, or -1 to count up to it."""
    exactly = tf.data.experimental.assert_cardinality
    head = _from_byte(paths[part.first], tf.maximum(seek, 0), buffer_size).skip(tf.where(seek < 0, part.skip, 0))
    # Where the part goes on to the end of a file, the file must end there too: `take` would hide that it does not.
    head = head.take(tf.where(part.head_ends, tf.constant(-1, tf.int64), part.head)).apply(exactly(part.head))
    whole = tf.data.TFRecordDataset(tf.gather(paths, part.whole), buffer_size=buffer_size)
    tail = tf.data.TFRecordDataset(paths[part.last], buffer_size=buffer_size).take(part.tail)
    return head.concatenate(whole.apply(exactly(part.whole_count))).concatenate(tail.apply(exactly(part.tail)))


def _from_byte(path: tf.Tensor, offset: tf.Tensor, buffer_size: int) -> tf.data.Dataset:
    """The records of a file from a byte on, which tf.data.TFRecordDataset cannot be asked for.

    To be called within a function of another dataset: TensorFlow 2.20 writes its graph without the offsets, so
    outside of one it fails ("3 inputs specified of 4").
    """
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], compression_type="", buffer_size=buffer_size, byte_offsets=[offset]
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))


def _seek(paths: list[str], order: Order, stream: int, offset: int) -> int:
    """The byte at which the record of a stream begins in its file, or -1 where finding it costs more than it saves."""
    if not offset or catalog.is_remote(paths[0]):
        return -1
    number = tf.constant(stream, tf.int64)
    epoch = order.epoch_at(number, offset)
    part = order.part(number, epoch, offset - order.part_begin(number, epoch))
    return byte_offset(paths[int(part.first)], int(part.skip))


def byte_offset(path: str, record: int) -> int:
    """The byte at which a record of a local file begins; reads the lengths of those before it and nothing else.

    Raises:
      DataError: the file ends before it.
    """
    offset = 0
    with open(path, "rb", buffering=0) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        for _ in range(record):
            if offset + framing.OVERHEAD_BYTES > size:
                raise errors.DataError(f"{path} ends before its record {record}. {_MISCOUNTED}")
            length = int.from_bytes(os.pread(descriptor, 8, offset), "little")
            offset += length + framing.OVERHEAD_BYTES
    return offset


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _buffer_bytes(path: str) -> int:
    return _REMOTE_BUFFER_BYTES if catalog.is_remote(path) else _LOCAL_BUFFER_BYTES
