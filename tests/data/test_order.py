"""Which record stands where: exactly once per epoch, whatever the shards, and well mixed."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from data import errors, order

# Records per shard: alone, few, tiny beside large, more shards than streams, shards that differ by one.
LAYOUTS = [(7,), (5, 9, 3), (99, 1), (1, 40, 2, 3, 1, 1, 1, 2, 5, 6), (38,) * 8 + (37,) * 8, (10,) * 17]


def plan(counts: tuple[int, ...], batch: int = 8, window: int = 24, seed: int = 3) -> order.Order:
    """An order with windows of about `window` records over all streams."""
    mib = (window + 0.5) * (1 + order.RECORD_OVERHEAD_BYTES) * order.WINDOWS_IN_MEMORY / 2**20
    return order.plan(counts, 1, seed=seed, global_batch_size=batch, shuffle_mib=mib)


def numbers(planned: order.Order, steps: int, start: int = 0) -> np.ndarray:
    """[steps, B]: records numbered through all shards."""
    ids = planned.record_ids(start, steps).numpy()
    return np.cumsum((0, *planned.counts))[ids[..., 0]] + ids[..., 1]


@pytest.mark.parametrize("batch", [1, 6, 8, 32])
@pytest.mark.parametrize("counts", LAYOUTS)
def test_each_epoch_visits_each_record_once(counts, batch):
    planned = plan(counts, batch)
    n = planned.num_examples
    found = numbers(planned, -(-4 * n // batch))
    for steps, epochs in itertools.product(range(0, len(found) + 1, 3), range(4)):
        if steps * batch <= epochs * n:  # the first E epochs hold no record more than E times
            assert np.bincount(found[:steps].ravel(), minlength=n).max(initial=0) <= epochs
        else:  # and lack none
            assert np.bincount(found[:steps].ravel(), minlength=n).min() >= epochs


@pytest.mark.parametrize("counts", LAYOUTS)
def test_epochs_and_seeds_differ_and_nothing_else_matters(counts):
    planned = plan(counts, batch=sum(counts), window=sum(counts))
    first, second, third = numbers(planned, 3)
    assert not np.array_equal(first, second) and not np.array_equal(second, third)
    np.testing.assert_array_equal(numbers(planned, 1, start=2)[0], third)
    other = plan(counts, batch=sum(counts), window=sum(counts), seed=4)
    assert not np.array_equal(numbers(other, 1)[0], first)


def test_each_epoch_has_another_order_of_shards():
    planned = plan((10,) * 16, batch=16)
    orders = set()
    for epoch in range(5):
        parts = [
            planned.part(tf.constant(stream, tf.int64), tf.constant(epoch, tf.int64), tf.constant(0, tf.int64))
            for stream in range(16)
        ]
        orders.add(tuple(int(part.whole[0]) for part in parts))
        assert sorted(int(part.whole[0]) for part in parts) == list(range(16))
    assert len(orders) == 5


def test_streams_stay_within_a_record_of_each_other_for_ever():
    planned = plan((38, 37, 37, 1), batch=4)
    for epoch in (0, 1, 2, 1000, 10**9):
        begins = [planned.part_begin(stream, epoch) for stream in range(planned.num_streams)]
        assert sum(begins) == epoch * planned.num_examples
        assert max(begins) - min(begins) <= 1
        for stream, begin in enumerate(begins):
            assert planned.epoch_at(stream, begin) == epoch
            assert planned.epoch_at(stream, begin - 1) == epoch - 1


@pytest.mark.parametrize("counts", LAYOUTS)
def test_parts_are_the_epoch(counts):
    planned = plan(counts, batch=16)
    for epoch in range(3):
        read = 0
        for stream in range(planned.num_streams):
            part = planned.part(tf.constant(stream, tf.int64), tf.constant(epoch, tf.int64), tf.constant(0, tf.int64))
            assert part.whole_count == sum(counts[shard] for shard in part.whole.numpy())
            if part.head_ends:
                assert part.skip + part.head == counts[int(part.first)]
            read += int(part.head + part.whole_count + part.tail)
        assert read == planned.num_examples


@pytest.mark.parametrize(("counts", "most"), [((38,) * 9 + (37,) * 7, 80), ((1000,) * 32, 0), ((1001, 1000) * 32, 80)])
def test_parts_begin_with_shards_where_these_are_alike(counts, most):
    """What lies before a part in its first shard is read for nothing."""
    planned = plan(counts, batch=32)
    for epoch in range(5):
        skipped = [
            int(
                planned.part(tf.constant(stream, tf.int64), tf.constant(epoch, tf.int64), tf.constant(0, tf.int64)).skip
            )
            for stream in range(planned.num_streams)
        ]
        assert sum(skipped) <= most


@pytest.mark.parametrize(
    ("shards", "batch", "streams"),
    [(1, 8, 1), (3, 8, 2), (16, 8, 8), (17, 64, 16), (99, 96, 16), (16, 99, 1), (16, 6, 2)],
)
def test_streams_are_a_power_of_two_that_divides_the_batch(shards, batch, streams):
    assert plan((10,) * shards, batch).num_streams == streams


def test_the_window_is_bounded_in_bytes():
    def window(mib: float, record_bytes: int = 1000) -> int:
        planned = order.plan((10_000,) * 16, record_bytes, seed=0, global_batch_size=64, shuffle_mib=mib)
        assert planned.window % planned.block == planned.window // planned.block % planned.pieces == 0
        return planned.window * planned.num_streams

    in_memory = window(64) * (1000 + order.RECORD_OVERHEAD_BYTES) * order.WINDOWS_IN_MEMORY / 2**20
    assert 0.9 * 64 < in_memory <= 64
    assert window(64, record_bytes=10_000) < window(64) / 9
    assert window(0.001) == 64, "at least a batch"
    assert 160_000 <= window(10_000) < 161_000, "no more than an epoch"


def test_classes_mix_though_files_are_sorted():
    """16 shards, each of one class or two of ten; memory for a tenth of the data."""
    counts = (4096,) * 16
    planned = order.plan(counts, 1000, seed=0, global_batch_size=256, shuffle_mib=6.5)
    labels = numbers(planned, sum(counts) // 256) * 10 // sum(counts)
    classes = (labels[..., np.newaxis] == np.arange(10)).sum(axis=1)  # [steps, 10]
    assert classes.min() >= 16, "every batch has every class"
    # Within a window no trace of the file's order is left: neighbours of the file are neighbours by chance.
    rows = numbers(planned, 16)
    assert (np.diff(rows, axis=1) == 1).mean() < 0.02


def test_mistakes_are_named():
    with pytest.raises(errors.DataError, match="global_batch_size must be at least 1. Received: 0"):
        order.plan((1,), 1, seed=0, global_batch_size=0, shuffle_mib=1)
    with pytest.raises(errors.DataError, match="shuffle_mib must be above 0 MiB. Received: 0"):
        order.plan((1,), 1, seed=0, global_batch_size=1, shuffle_mib=0)
