"""Which record stands at which position: arithmetic on counts and seeds, without reading a file.

V logical streams feed every global batch with B/V records each, stream after stream. V is fixed by the dataset and B
(`plan`), so that hosts, replicas, threads and restarts do not enter:

1. Each epoch permutes the shards. Their records laid end to end, and the end joined to the beginning, make a ring of n.
2. The ring is cut into V parts. Part v of epoch e has S_v(e+1) - S_v(e) records with S_v(e) = floor((e*n + v) / V).
   By Hermite's identity the parts of an epoch sum to n, so each epoch visits each record exactly once, and after any
   number of epochs the streams are within one record of each other. Where the first cut lies is free: it is put so
   that parts begin as near behind the first record of a shard as can be, because what lies before is skipped.
3. Stream v is its part of epoch 0, then that of epoch 1, ... It is shuffled in windows of W records; where an epoch
   ends within a window, each side is shuffled on its own, so no record moves over the end of an epoch.

All streams stand at the same offset at every step: step j takes records [j*B/V, (j+1)*B/V) of each. A position is
therefore one number, the step. The first J batches hold min(J*B, E*n) records of the first E epochs; only within the
one batch in which an epoch ends its last records and the first of the next stand next to each other, stream by stream.

How well it mixes, for the worst case: 10 classes, sorted, in batches of 256. Given is the variance of a class's count
in a batch, 1 being that of batches drawn at random (`python -m scripts.bench_input --parts=m`):

    shards  shuffle_mib of 10% of the dataset    100%    300%
         1                               227.7    67.9     1.0
        16                                 2.6     1.7     0.2
        64                                11.3     6.3     0.8
       256                                14.4     3.4     0.9

With 16 equal shards every stream is a shard and every batch a fair sample of all; with more, streams stand in shards at
random and each gives up to B/V = 16 records of one class. With few shards only memory helps, or, better, not to sort:
`data.build` writes records in an order that depends on their keys.
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from data import errors

MAX_STREAMS = 16
# Windows in memory at a time: one that batches are taken from, one read ahead, pieces of the next (records.py), and
# what the allocator keeps of those before; measured by part c of scripts/bench_input.py.
WINDOWS_IN_MEMORY = 3.0
# A window is read in up to this many pieces, so that a stream that reads ahead of the others holds little.
MAX_PIECES = 8
# What a record takes beside its bytes: TensorFlow's string (24) and the allocator's header and rounding.
RECORD_OVERHEAD_BYTES = 48
_MIB = 1 << 20
_RANDOM_BITS = 32


class Part(NamedTuple):
    """What a stream reads in an epoch, as int64 tensors: `head` records, whole shards, `tail` records.

    first: shard that holds the head; skip: records of it before the head.
    head: records of it; they reach its end where `head_ends`. 0 where the part begins with a shard.
    whole: [shards] shards read from end to end, `whole_count` records together.
    last: shard whose first `tail` records end the part.
    """

    first: tf.Tensor
    skip: tf.Tensor
    head: tf.Tensor
    head_ends: tf.Tensor
    whole: tf.Tensor
    whole_count: tf.Tensor
    last: tf.Tensor
    tail: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of one split; make it with `plan`.

    counts: records of each shard.
    seed: another seed, another order.
    global_batch_size: B.
    num_streams: V, divides B.
    window: W, records of a stream that are shuffled together; a multiple of B/V.
    """

    counts: tuple[int, ...]
    seed: int
    global_batch_size: int
    num_streams: int
    window: int

    @property
    def num_examples(self) -> int:
        """n, records of all shards."""
        return sum(self.counts)

    @property
    def block(self) -> int:
        """B/V, records that a stream gives to each global batch."""
        return self.global_batch_size // self.num_streams

    @property
    def steps_per_window(self) -> int:
        """Global batches from one window of each stream."""
        return self.window // self.block

    @property
    def pieces(self) -> int:
        """Pieces in which a window is read, of W/pieces records each."""
        return min(self.steps_per_window, MAX_PIECES)

    def part_begin(self, stream: Any, epoch: Any) -> Any:
        """S_v(e): offset in stream v at which epoch e begins; for Python's integers and int64 tensors."""
        return (epoch * self.num_examples + stream) // self.num_streams

    def epoch_at(self, stream: Any, offset: Any) -> Any:
        """The epoch of the record at an offset of a stream: the last e with S_v(e) <= offset."""
        return ((offset + 1) * self.num_streams - stream - 1) // self.num_examples

    def part(self, stream: tf.Tensor, epoch: tf.Tensor, offset: tf.Tensor) -> Part:
        """What `stream` reads in `epoch` from its record `offset` of the epoch on; int64 scalars."""
        shards, starts, begins = self._ring(epoch)
        length = self.part_begin(stream, epoch + 1) - self.part_begin(stream, epoch) - offset
        at = (begins[stream] + offset) % self.num_examples
        index = tf.searchsorted(starts, [at], side="right")[0] - 1
        skip = at - starts[index]
        shards = tf.roll(shards, -index, axis=0)
        shards = tf.concat([shards, shards[:1]], axis=0)  # [shards + 1]: a part may end in the shard that it began in
        ends = tf.cumsum(tf.gather(self._counts(), shards)) - skip  # records of the part up to the end of each shard
        complete = tf.searchsorted(ends, [length], side="right", out_type=tf.int64)[0]  # shards read to their end
        before = tf.concat([[0], ends], axis=0)[complete]
        begun = tf.cast(skip > 0, tf.int64)  # a shard that is read from its beginning is no head
        head = begun * tf.minimum(ends[0], length)
        whole_count = tf.maximum(before - head, 0)
        return Part(
            first=shards[0],
            skip=skip,
            head=head,
            head_ends=begun * complete > 0,
            whole=shards[begun : tf.maximum(complete, begun)],
            whole_count=whole_count,
            last=shards[complete],
            tail=length - head - whole_count,
        )

    def shuffled(self, window: tf.Tensor, first_stream: int, end_stream: int) -> tf.Tensor:
        """The permutation of a window: [streams, W] int32, for each place the offset in the window that comes there."""
        streams = tf.range(first_stream, end_stream, dtype=tf.int64)[:, tf.newaxis]
        offsets = window * self.window + tf.range(self.window, dtype=tf.int64)  # [W]
        epochs = self.epoch_at(streams, offsets)  # [streams, W]
        # Drawn for all streams: what a host draws for its own must not depend on which they are.
        random = self._random([self.num_streams, self.window], 2 * window + 1)[first_stream:end_stream]
        keys = tf.bitwise.left_shift(epochs - epochs[:, :1], _RANDOM_BITS) + random
        return tf.argsort(keys, axis=1)

    def batch_rows(self, window: tf.Tensor, first_stream: int, end_stream: int) -> tf.Tensor:
        """[steps, streams * B/V, 2] int32: for each row of each batch from a window its stream and offset in there."""
        streams = tf.range(end_stream - first_stream)[:, tf.newaxis]  # [streams, 1]
        steps = tf.range(self.steps_per_window)[:, tf.newaxis, tf.newaxis]  # [steps, 1, 1]
        # Not tf.transpose, of which oneDNN says in red that it cannot do it for integers.
        index = streams * self.window + steps * self.block + tf.range(self.block)  # [steps, streams, B/V]
        offsets = tf.gather(tf.reshape(self.shuffled(window, first_stream, end_stream), [-1]), index)
        return tf.reshape(tf.stack([index // self.window, offsets], axis=-1), [self.steps_per_window, -1, 2])

    def record_ids(self, start_step: int, num_steps: int) -> tf.Tensor:
        """Which records some global batches hold, without reading them.

        Returns:
          [num_steps, B, 2] int64: of each row the shard (index into `counts`) and the number of the record in it.
        """
        per_window = self.steps_per_window
        first, end = start_step // per_window, -(-(start_step + num_steps) // per_window)
        batches = tf.concat([self._ids_of_window(window) for window in range(first, end)], axis=0)
        return batches[start_step - first * per_window :][:num_steps]

    def _ids_of_window(self, window: int) -> tf.Tensor:
        """[steps, B, 2] int64."""
        streams = tf.range(self.num_streams, dtype=tf.int64)[:, tf.newaxis]
        offsets = window * self.window + tf.range(self.window, dtype=tf.int64)  # [W]
        epochs = self.epoch_at(streams, offsets)  # [V, W]
        ids = tf.zeros([self.num_streams, self.window, 2], tf.int64)
        for epoch in range(int(tf.reduce_min(epochs)), int(tf.reduce_max(epochs)) + 1):
            shards, starts, begins = self._ring(tf.constant(epoch, tf.int64))
            at = (begins[:, tf.newaxis] + offsets - self.part_begin(streams, epoch)) % self.num_examples
            index = tf.searchsorted(starts, tf.reshape(at, [-1]), side="right") - 1
            index = tf.reshape(index, tf.shape(at))
            found = tf.stack([tf.gather(shards, index), at - tf.gather(starts, index)], axis=-1)
            ids = tf.where((epochs == epoch)[..., tf.newaxis], found, ids)
        rows = self.batch_rows(tf.constant(window, tf.int64), 0, self.num_streams)
        return tf.gather_nd(ids, rows)

    def _ring(self, epoch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Shards in the order of an epoch [shards], where each begins [shards], where each part begins [V]; int64."""
        shards = tf.argsort(self._random([len(self.counts)], 2 * epoch))
        shards = tf.cast(shards, tf.int64)
        starts = tf.cumsum(tf.gather(self._counts(), shards), exclusive=True)
        streams = tf.range(self.num_streams, dtype=tf.int64)
        lengths = self.part_begin(streams, epoch + 1) - self.part_begin(streams, epoch)  # [V]
        cuts = tf.cumsum(lengths, exclusive=True)  # [V]
        # V candidates for the first cut: each lets one part begin with a shard. The one that skips least is taken.
        borders = tf.concat([starts, [self.num_examples]], axis=0)
        shifts = tf.gather(borders, tf.searchsorted(borders, cuts, side="left")) - cuts  # [V]
        begins = (cuts + shifts[:, tf.newaxis]) % self.num_examples  # [candidates, V]
        holders = tf.searchsorted(starts, tf.reshape(begins, [-1]), side="right") - 1
        skipped = begins - tf.reshape(tf.gather(starts, holders), tf.shape(begins))
        return shards, starts, begins[tf.argmin(tf.reduce_sum(skipped, axis=1))]

    def _counts(self) -> tf.Tensor:
        return tf.constant(self.counts, tf.int64)

    def _random(self, shape: list[int], index: tf.Tensor) -> tf.Tensor:
        """int64 in [0, 2**32), a function of (seed, index): even ones for shards of epochs, odd ones for windows."""
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(index, tf.int64)])
        # The algorithm is named because the automatic choice depends on the device.
        bits = tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox")
        return tf.cast(bits, tf.int64)


def plan(
    counts: tuple[int, ...], record_bytes: float, *, seed: int, global_batch_size: int, shuffle_mib: float
) -> Order:
    """The order of a split: derived from facts of the dataset only, so every host derives the same.

    Args:
      counts: records of each shard, none of them 0.
      record_bytes: mean size of a serialized record.
      seed: of the order.
      global_batch_size: B.
      shuffle_mib: memory for shuffling, over all streams, in MiB. A host that reads its own streams only holds
        its share of it.

    Raises:
      DataError: an argument out of range.
    """
    if global_batch_size < 1:
        raise errors.DataError(f"global_batch_size must be at least 1. Received: {global_batch_size}.")
    if not shuffle_mib > 0:
        raise errors.DataError(f"shuffle_mib must be above 0 MiB. Received: {shuffle_mib}.")
    num_streams = 1
    while 2 * num_streams <= min(MAX_STREAMS, len(counts)) and global_batch_size % (2 * num_streams) == 0:
        num_streams *= 2
    block = global_batch_size // num_streams
    per_record = (record_bytes + RECORD_OVERHEAD_BYTES) * WINDOWS_IN_MEMORY * num_streams
    steps = int(shuffle_mib * _MIB / per_record) // block
    epoch = -(-sum(counts) // global_batch_size)  # a window larger than an epoch would only take memory
    if epoch > MAX_PIECES:
        epoch = -(-epoch // MAX_PIECES) * MAX_PIECES
    steps = max(1, min(steps, epoch))
    if steps > MAX_PIECES:
        steps -= steps % MAX_PIECES
    return Order(tuple(counts), seed, global_batch_size, num_streams, steps * block)
