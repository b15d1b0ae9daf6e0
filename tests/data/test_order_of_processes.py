"""The order over real processes: 1, 2 and 4 hosts, killed or not; and what beginning late reads."""

import hashlib
import json
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.data import read_order

pytestmark = pytest.mark.slow

STEPS = 60
# Records per shard: 1, 3, 16 and 17 shards, fewer than hosts, of unequal size, an empty one among them.
LAYOUTS = {
    "one": (101,),
    "three, one empty": (70, 0, 31),
    "sixteen": (13,) * 16,
    "seventeen, unequal": tuple(range(1, 18)),
}


def write(directory: pathlib.Path, counts: tuple[int, ...], size: int, shuffle_mib: float) -> pathlib.Path:
    """Shards of records "NUMBER:" filled up to `size` bytes, numbered through all of them."""
    directory.mkdir()
    number = 0
    for shard, count in enumerate(counts):
        with tf.io.TFRecordWriter(str(directory / f"shard-{shard}")) as writer:
            for _ in range(count):
                writer.write(f"{number}:".encode().ljust(size, b"."))
                number += 1
    facts = {"counts": counts, "num_bytes": number * size, "shuffle_mib": shuffle_mib}
    (directory / "counts.json").write_text(json.dumps(facts))
    return directory


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, read_order.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.splitlines()


def read_and_be_killed(host: int, hosts: int, directories: list[pathlib.Path], kills: list[int]) -> list[str]:
    """The lines of a host that is killed as soon as it has printed so many, and goes on where it stopped."""
    lines: list[str] = []
    for kill in kills:
        process = start(host, hosts, len(lines), STEPS, *directories)
        assert process.stdout is not None
        while len(lines) < kill:
            line = process.stdout.readline()
            assert line, process.communicate()
            lines.append(line.rstrip("\n"))
        process.kill()
        process.communicate()
    return lines + lines_of(start(host, hosts, len(lines), STEPS, *directories))


def digests(shares: list[list[str]]) -> list[str]:
    """One of the record numbers of each step, from the lines of all hosts."""
    return [hashlib.sha256(" ".join(rows).encode()).hexdigest() for rows in zip(*shares, strict=True)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp("layouts")
    return [write(folder / name, counts, size=60, shuffle_mib=0.02) for name, counts in LAYOUTS.items()]


@pytest.fixture(scope="module")
def wanted(directories: list[pathlib.Path]) -> list[str]:
    """Digests of all steps of all layouts by arithmetic, where each epoch is seen to be complete."""
    lines = []
    for directory in directories:
        split, planned = read_order.open_split(directory)
        ids = planned.record_ids(0, STEPS).numpy()
        batches = np.cumsum((0, *planned.counts))[ids[..., 0]] + ids[..., 1]  # [STEPS, B]
        for epoch in range(STEPS * read_order.BATCH // split.num_examples):
            begin, end = (position * split.num_examples for position in (epoch, epoch + 1))
            assert set(batches[begin // read_order.BATCH : -(-end // read_order.BATCH)].flat) == set(
                range(split.num_examples)
            )
        lines += [" ".join(map(str, batch)) for batch in batches]
    return digests([lines])


# Two of them are killed below.
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.nightly), 4])
def test_any_number_of_hosts_reads_the_same(directories, wanted, hosts):
    processes = [start(host, hosts, 0, STEPS, *directories) for host in range(hosts)]
    assert digests([lines_of(process) for process in processes]) == wanted


def test_killed_hosts_go_on_as_if_nothing_had_been(directories, wanted):
    kills = [random.randrange(1, len(wanted))]
    killed = [read_and_be_killed(host, 2, directories, kills) for host in range(2)]
    assert digests(killed) == wanted, f"killed after {kills}"


@pytest.mark.parametrize("shards", [1, pytest.param(16, marks=pytest.mark.nightly), 24])
def test_beginning_late_in_an_epoch_reads_little_of_it(tmp_path, shards):
    size, total = 4096, 200 << 20
    counts = (total // size // shards + 1,) * shards
    directory = write(tmp_path / "shards", counts, size, shuffle_mib=16)
    (read,) = lines_of(start("bytes", sum(counts) * 9 // 10 // read_order.BATCH, directory))
    assert int(read) < 0.15 * total, f"{int(read) / total:.1%}"
