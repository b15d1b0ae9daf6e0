"""Reading in that order: the same records on any number of hosts, from wherever it begins."""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from data import errors, order, records

# Records per shard: alone, unequal with an empty one, more than streams, 16 and 17 alike.
LAYOUTS = [(7,), (5, 0, 9, 3), (1, 40, 2, 0, 3, 1, 1, 1, 2, 5, 6), (12,) * 16, (12,) * 17]
BATCH = 16


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


def plan(split: records.Split, batch: int = BATCH, window: int = 48) -> order.Order:
    counts = tuple(count for _, count in split.filled)
    mib = (window + 0.5) * (1 + order.RECORD_OVERHEAD_BYTES) * order.WINDOWS_IN_MEMORY / 2**20
    return order.plan(counts, 1, seed=3, global_batch_size=batch, shuffle_mib=mib)


def expected(split: records.Split, planned: order.Order, steps: int, start: int = 0) -> list[list[int]]:
    """Record numbers of each global batch, by arithmetic alone."""
    ids = planned.record_ids(start, steps).numpy()
    first = np.cumsum((0, *(count for _, count in split.filled)))
    return (first[ids[..., 0]] + ids[..., 1]).tolist()


def train(
    split: records.Split,
    steps: int,
    planned: order.Order | None = None,
    hosts: int = 1,
    replicas: int = 1,
    start: int = 0,
) -> list[list[int]]:
    """Record numbers of each global batch, read by `hosts` hosts one after the other."""
    planned = planned or plan(split)
    batches: list[list[int]] = [[] for _ in range(steps)]
    for host in range(hosts):
        share = records.Share(planned.global_batch_size, planned.global_batch_size // hosts // replicas, host, hosts)
        read = records.training_records(split, planned, share, lambda *batch: batch, parallel=2, start_step=start)
        for element, (found, step, row) in enumerate(read.take(steps * replicas)):
            assert step == start + element // replicas
            assert row == len(batches[element // replicas])
            batches[element // replicas] += [int(record) for record in found.numpy()]
    return batches


@pytest.mark.parametrize("counts", LAYOUTS)
def test_reads_what_the_arithmetic_says_from_any_step(tmp_path, counts):
    split = write(tmp_path, counts)
    planned = plan(split)
    steps = 2 * split.num_examples // BATCH + 5
    order_of_all = expected(split, planned, steps)
    for start in sorted({0, 1, planned.steps_per_window, split.num_examples // BATCH, steps - 2}):
        assert train(split, steps - start, planned, start=start) == order_of_all[start:], f"from {start}"


@pytest.mark.parametrize("counts", LAYOUTS)
def test_hosts_share_the_same_batches(tmp_path, counts):
    """By stream and, with more hosts than streams, by record."""
    split = write(tmp_path, counts)
    wanted = expected(split, plan(split), 20)
    for hosts, replicas in ((2, 2), (4, 1)):
        assert train(split, 20, hosts=hosts, replicas=replicas) == wanted, f"{hosts} hosts"


def test_hosts_read_their_own_streams_and_say_so(tmp_path):
    split = write(tmp_path, (12,) * 16)
    planned = plan(split)
    for hosts, each, text in (
        (1, 16, "all of 16 streams over 16 shards"),
        (4, 4, "by file: 4 of 16 streams over 16 shards per host"),
        (2, 8, "by file: 8 of 16"),
    ):
        shares = [records.Share(BATCH, 1, host, hosts) for host in range(hosts)]
        assert [share.streams(planned) for share in shares] == [(h * each, (h + 1) * each) for h in range(hosts)]
        assert text in shares[0].describe(planned)
    few = plan(records.Split(split.paths[:2], split.counts[:2]))
    shares = [records.Share(BATCH, 1, host, 4) for host in range(4)]
    assert [share.streams(few) for share in shares] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert "by record: 1 of 2 streams over 2 shards per host, shared" in shares[0].describe(few)


def test_a_host_opens_no_shard_of_others(tmp_path):
    split = write(tmp_path, (16,) * 16)
    planned = plan(split, window=16)
    share = records.Share(BATCH, 4, 0, 4)
    used = {shard for shard, _ in planned.record_ids(0, 8).numpy()[:, :4].reshape(-1, 2)}
    assert len(used) == 4
    for shard in set(range(16)) - used:
        os.remove(split.paths[shard])
    read = records.training_records(split, planned, share, lambda *batch: batch)
    found = [[int(record) for record in batch.numpy()] for batch, _, _ in read.take(8)]
    assert found == [batch[:4] for batch in expected(split, planned, 8)]


def test_resume_opens_only_the_shards_it_needs(tmp_path):
    split = write(tmp_path, (10,) * 32)  # 16 streams of 2 shards
    planned = plan(split, window=16)
    start = 14  # in the second shard of each
    needed = {shard for shard, _ in planned.record_ids(start, 4).numpy().reshape(-1, 2)}
    assert len(needed) == 16
    for shard in set(range(32)) - needed:
        os.remove(split.paths[shard])
    assert train(split, 4, planned, start=start) == expected(split, planned, 4, start)


def test_other_files_stand_in_for_some(tmp_path):
    split = write(tmp_path, (5, 5))
    os.rename(split.paths[1], tmp_path / "copy")
    replaced = split.replaced({split.paths[1]: str(tmp_path / "copy")})
    assert replaced.paths == (split.paths[0], str(tmp_path / "copy"))
    assert train(replaced, 3) == expected(split, plan(split), 3)


def test_byte_offsets_are_those_of_the_records(tmp_path):
    path = str(tmp_path / "shard")
    with tf.io.TFRecordWriter(path) as writer:
        for size in range(5):
            writer.write(b"x" * size)
    assert [records.byte_offset(path, record) for record in range(6)] == [0, 16, 33, 51, 70, 90]
    with pytest.raises(errors.DataError, match="shard ends before its record 7"):
        records.byte_offset(path, 7)


def test_evaluation_reads_each_record_once_in_file_order(tmp_path):
    split = write(tmp_path, (5, 0, 9, 3))
    batches = list(records.evaluation_records(split, batch_size=4).as_numpy_iterator())
    assert [int(record) for record in np.concatenate(batches)] == list(range(17))


@pytest.mark.parametrize("counted", [(50, 34), (50, 32), (50, 43), (49, 33), (40, 33)])
def test_shards_that_hold_another_number_of_records_are_an_error(tmp_path, counted):
    split = records.Split(write(tmp_path, (50, 33)).paths, counted)
    with pytest.raises(tf.errors.OpError, match="expected to contain"):
        train(split, 20)
    if sum(counted) != 83:  # evaluation minds the sum alone
        with pytest.raises(tf.errors.OpError, match="Rebuild the dataset|expected to contain"):
            list(records.evaluation_records(split, batch_size=4))


def test_a_shard_that_ends_within_the_tail_of_a_part_is_an_error(tmp_path):
    """Another stream would find it later in the epoch; by then this one would have gone wrong."""
    split = write(tmp_path, (5,))
    zero = tf.constant(0, tf.int64)
    part = order.Part(zero, zero, zero, tf.constant(False), tf.zeros([0], tf.int64), zero, zero, zero + 6)
    with pytest.raises(tf.errors.OpError, match="expected to contain 6 elements but contained only 5"):
        list(
            tf.data.Dataset.range(1).flat_map(
                lambda _: records._read(tf.constant(split.paths), part, zero - 1, buffer_size=1 << 16)
            )
        )


def test_mistakes_are_named(tmp_path):
    with pytest.raises(errors.DataError, match="empty"):
        records.Split(("a",), (0,))
    with pytest.raises(errors.DataError, match="2 counts"):
        records.Split(("a",), (1, 2))
    split = write(tmp_path, (3,))
    with pytest.raises(errors.DataError, match="Received: -1"):
        train(split, 1, start=-1)
