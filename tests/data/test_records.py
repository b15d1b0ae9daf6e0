"""The order of records: exactly once per epoch, and the same from wherever reading begins."""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from data import errors, records

# Records per shard: alone, unequal with an empty one, fewer and more shards than streams.
LAYOUTS = [(7,), (5, 0, 9, 3), (1, 40, 2, 0, 3, 1, 1, 1, 2, 5, 6)]
CASES = [(LAYOUTS[0], 4), (LAYOUTS[1], 1), (LAYOUTS[1], 4), (LAYOUTS[2], 4), (LAYOUTS[2], 64)]  # and their window


def write(directory: pathlib.Path, counts: tuple[int, ...]) -> records.Split:
    """Shards whose records are numbered 0, 1, ... through all of them."""
    paths, number = [], 0
    for shard, count in enumerate(counts):
        paths.append(str(directory / f"shard-{shard}"))
        if not count:
            continue  # not even a file
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for _ in range(count):
                writer.write(str(number).encode())
                number += 1
    return records.Split(tuple(paths), counts)


def read(dataset: tf.data.Dataset, count: int) -> list[int]:
    """The first `count` record numbers."""
    found: list[int] = []
    for vector in dataset:
        found.extend(int(record) for record in vector.numpy())
        if len(found) >= count:
            break
    return found[:count]


def train(split: records.Split, count: int, seed: int = 3, window: int = 4, start: int = 0) -> list[int]:
    return read(records.training_records(split, seed=seed, window=window, start_example=start), count)


@pytest.mark.parametrize(("counts", "window"), CASES)
def test_each_epoch_visits_each_record_once(tmp_path, counts, window):
    split = write(tmp_path, counts)
    size = split.num_examples
    order = train(split, 3 * size, window=window)
    epochs = [order[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
    if window > 1:  # with a window of 1 only shards are permuted, and 3 shards have few orders
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize(("counts", "window"), CASES)
def test_beginning_at_a_position_continues_the_order(tmp_path, counts, window):
    split = write(tmp_path, counts)
    size = split.num_examples
    order = train(split, 3 * size, window=window)
    edges = {1, window - 1, window, window + 1, size // 2, size - 1, size, size + 1, size + window, 2 * size - 1}
    for start in sorted(edge for edge in edges if 0 < edge < 2 * size):
        assert train(split, 3 * size - start, window=window, start=start) == order[start:], f"from {start}"


def test_order_depends_on_the_seed_and_nothing_else(tmp_path):
    split = write(tmp_path, (30, 30, 30))
    assert train(split, 200) == train(split, 200)
    assert train(split, 200) != train(split, 200, seed=4)


def test_windows_mix_records_of_all_streams(tmp_path):
    split = write(tmp_path, (100,) * 4)
    order = np.array(train(split, 400, window=80))
    for window in order.reshape(5, 80):
        assert (
            np.bincount(window // 100, minlength=4).tolist() == [20] * 4
        )  # 20 of each shard, each a stream of its own
        assert (np.diff(window) != 1).mean() > 0.9  # few neighbours of the file are still neighbours


def test_resume_opens_only_the_shards_it_needs(tmp_path):
    split = write(tmp_path, (10,) * 16)  # 8 streams of 2 shards
    start = 120  # in the second shard of each
    order = train(split, 320, window=16)
    needed = {number // 10 for number in order[start:160]}
    assert len(needed) == 8
    for shard in set(range(16)) - needed:
        os.remove(split.paths[shard])
    assert train(split, 160 - start, window=16, start=start) == order[start:160]


def test_evaluation_reads_each_record_once_in_file_order(tmp_path):
    split = write(tmp_path, (5, 0, 9, 3))
    assert read(records.evaluation_records(split, batch_size=4), 99) == list(range(17))


@pytest.mark.parametrize("counted", [(5, 4), (5, 2), (5, 7), (2, 2)])
def test_shards_that_hold_another_number_of_records_are_an_error(tmp_path, counted):
    split = records.Split(write(tmp_path, (5, 3)).paths, counted)
    with pytest.raises(tf.errors.OpError, match="Rebuild the dataset|contained"):
        train(split, 20, window=4)
    with pytest.raises(tf.errors.OpError, match="Rebuild the dataset|contained"):
        read(records.evaluation_records(split, batch_size=4), 99)


def test_mistakes_are_named():
    with pytest.raises(errors.DataError, match="empty"):
        records.Split(("a",), (0,))
    with pytest.raises(errors.DataError, match="2 counts"):
        records.Split(("a",), (1, 2))
    split = records.Split(("a",), (1,))
    with pytest.raises(errors.DataError, match="at least 1 record.*Received: 0"):
        records.training_records(split, seed=0, window=0)
    with pytest.raises(errors.DataError, match="Received: -1"):
        records.training_records(split, seed=0, window=1, start_example=-1)
