"""Copies of shards on a disk and in memory: complete or not there, shared, and refused where they cannot fit."""

import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from data import cache, errors, pipeline
from tests.conftest import GUARD_SECS, ROOT, Trainer, metrics_of
from trainer import config

OTHER_DISK = pathlib.Path("/dev/shm")


@pytest.fixture
def shards(tmp_path: pathlib.Path) -> list[str]:
    """Three files of other sizes, one of them empty."""
    paths = [tmp_path / "shards" / f"shard-{size}" for size in (0, 1000, 3000)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_bytes(os.urandom(int(path.name[6:])))
    return [str(path) for path in paths]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder on another disk than the shards."""
    if not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two disks")
    with tempfile.TemporaryDirectory(dir=OTHER_DISK) as directory:
        yield pathlib.Path(directory) / "made"


def contents(copies: dict[str, str]) -> dict[str, bytes]:
    return {path: pathlib.Path(copy).read_bytes() for path, copy in copies.items()}


def originals(shards: list[str]) -> dict[str, bytes]:
    return {path: pathlib.Path(path).read_bytes() for path in shards}


def test_copies_on_disk_are_made_once(shards, folder):
    said: list[str] = []
    copies = cache.to_disk(shards, str(folder), said.append)
    assert contents(copies) == originals(shards)
    assert said == [f"cache: copying 3 shards, 0.00 GB, to {folder}"]
    before = {copy: os.stat(copy).st_ino for copy in copies.values()}
    assert cache.to_disk(shards, str(folder), pytest.fail) == copies
    assert {copy: os.stat(copy).st_ino for copy in copies.values()} == before


def test_a_changed_shard_is_copied_again(shards, folder):
    old = cache.to_disk(shards, str(folder))
    pathlib.Path(shards[1]).write_bytes(b"another")
    new = cache.to_disk(shards, str(folder))
    assert contents(new) == originals(shards)
    assert [new[path] != old[path] for path in shards] == [False, True, False]
    os.truncate(new[shards[2]], 5)  # a copy of another size is none
    assert contents(cache.to_disk(shards, str(folder))) == originals(shards)


KILLED_WHILE_COPYING = """
import os, signal, sys
from data import cache
copy = cache._copy
def killed(path, size, out):
    os.write(out, b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
cache._copy = killed
cache.to_disk(sys.argv[2:], sys.argv[1])
"""


def test_a_killed_process_leaves_nothing_that_counts(shards, folder):
    command = [sys.executable, "-c", KILLED_WHILE_COPYING, str(folder), *shards]
    assert subprocess.run(command, cwd=ROOT, timeout=GUARD_SECS).returncode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir() if path.name.endswith(".incomplete")]
    assert contents(cache.to_disk(shards, str(folder))) == originals(shards)
    assert len(list(folder.iterdir())) == len(shards) + 1  # and the lock


WAITS_FOR_THE_OTHER = """
import sys
from data import cache
cache.to_disk(sys.argv[2:], sys.argv[1], lambda text: print(text, flush=True))
"""


def test_two_processes_copy_once(shards, folder):
    folder.mkdir()
    command = [sys.executable, "-c", WAITS_FOR_THE_OTHER, str(folder), *shards]
    with cache._alone(folder, pytest.fail):
        other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert "waiting for another process" in other.stdout.readline()
    out, _ = other.communicate(timeout=GUARD_SECS)
    assert other.returncode == 0
    assert "copying 3 shards" in out


def test_a_full_disk_is_told_before_anything_is_copied(shards, folder, monkeypatch):
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(1 << 30) + 3999))
    with pytest.raises(errors.DataError, match="cannot hold 3 shards of 0.00 GB together: the disk of .* to spare"):
        cache.to_disk(shards, str(folder))
    assert [path.name for path in folder.iterdir()] == [".lock"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(1 << 30) + 4000))
    assert contents(cache.to_disk(shards, str(folder))) == originals(shards)


def test_a_disk_that_helps_nothing_is_refused(shards, tmp_path):
    with pytest.raises(errors.DataError, match="no effect: .*shard-0 lies on the same disk"):
        cache.to_disk(shards, str(tmp_path / "cache"))
    with pytest.raises(errors.DataError, match="disk of this machine. Received: 'gs://bucket/cache'"):
        cache.to_disk(shards, "gs://bucket/cache")


def test_a_shard_that_changes_meanwhile_is_told(shards, folder, monkeypatch):
    monkeypatch.setattr(cache, "_facts", lambda paths: {path: (999, 1) for path in paths})
    with pytest.raises(errors.DataError, match="changed while it was copied: 999 bytes at first, then"):
        cache.to_disk(shards, str(folder))
    with pytest.raises(errors.DataError, match="changed while it was copied"):
        cache.to_memory(shards)


def test_copies_in_memory_leave_nothing_behind(shards):
    copies = cache.to_memory(shards)
    assert contents(copies) == originals(shards)
    assert all(re.fullmatch(r"/proc/self/fd/\d+", copy) for copy in copies.values())
    for copy in copies.values():
        assert os.readlink(copy).startswith("/memfd:shard-")
        os.close(int(pathlib.Path(copy).name))


def test_memory_that_is_short_is_told_before_anything_is_copied(shards, monkeypatch):
    monkeypatch.setattr(cache, "memory_available", lambda: 7998)
    with pytest.raises(errors.DataError, match="half of the memory available is 0.00 GB to spare. Use --cache=disk"):
        cache.to_memory(shards)
    monkeypatch.setattr(cache, "memory_available", lambda: 8000)
    for copy in cache.to_memory(shards).values():
        os.close(int(pathlib.Path(copy).name))


def test_more_shards_than_open_files_are_told(shards, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 514))
    with pytest.raises(errors.DataError, match="keeps 3 shards open, and this process may open 514 files"):
        cache.to_memory(shards)


def test_the_container_limits_memory(monkeypatch):
    assert 0 < cache.memory_available() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    read = pathlib.Path.read_text
    small = {"memory.max": "5000", "memory.current": "3000"}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda p, *a: small[p.name] if p.name in small else read(p, *a))
    assert cache.memory_available() == 2000


@pytest.mark.parametrize("start_step", [0, 9])
def test_batches_from_memory_are_those_of_the_files(numbered, start_step):
    dataset = pipeline.open_dataset("numbered", numbered)
    paths = [path for path, _ in dataset.split("n297").filled]
    arguments = {"global_batch_size": 16, "per_replica_batch_size": 16, "seed": 3, "shuffle_mib": 0.01}
    copies = cache.to_memory(paths)
    read = [
        [y for _, y in pipeline.train_batches(dataset, "n297", start_step=start_step, copies=which, **arguments)
         .take(40).as_numpy_iterator()]
        for which in ({}, copies)
    ]  # fmt: skip
    assert np.array_equal(*read)
    for copy in copies.values():
        os.close(int(pathlib.Path(copy).name))


@pytest.mark.nightly
def test_training_from_copies_is_the_same(trainer: Trainer, tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    flags = ["--mode=train", "--train_steps=20", "--log_every_steps=10"]
    caches = {"none": [], "memory": ["--cache=memory"], "disk": ["--cache=disk", f"--cache_dir={folder}"]}
    for name, cached in caches.items():
        done = trainer.run(f"--model_dir={tmp_path}/{name}", *flags, *cached)
        assert ("cache: copying" in done.stdout) == bool(cached)
    assert metrics_of(tmp_path / "none") == metrics_of(tmp_path / "memory") == metrics_of(tmp_path / "disk")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cache": "disk"}, "give --cache_dir"),
        ({"cache_dir": "/fast"}, "cache_dir has no effect with cache=none"),
        ({"cache": "memory", "cache_dir": "/fast"}, "cache_dir has no effect with cache=memory"),
        ({"cache": "memory", "data_service": "grpc://a:1"}, "cache=memory has no effect with data_service"),
        ({"mode": "profile_input", "data_service": "grpc://a:1"}, "leave out data_service"),
        ({"cache": "ram"}, "cache must be one of none, memory, disk"),
    ],
)
def test_options_without_effect_are_refused(options, problem):
    _, problems = config.inspect({"model_dir": "run", "dataset": "digits", **options})
    assert [problem in found for found in problems] == [True]
