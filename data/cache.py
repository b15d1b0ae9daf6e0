"""Shards copied once to where reading them costs little: a local disk, or this process' memory.

    gs://… or a slow disk ─▶ copies, before training ─▶ pipeline.train_batches(copies=...)

The order is not touched: a copy stands in the place of its file, byte for byte. Copies are made whole before the first
step, because an epoch of ours takes records from all shards at once.

What is kept is encoded records. Decoded photographs would take ten times the room, and each epoch crops them anew;
other images are better built raw, which are read faster than most decoded caches (scripts/bench_input.py).

It helps where the disk or the network is the slowest stage: 5 times the examples a second from memory as from a disk
slowed down to 100 MB/s (records of 0.8 KB, 2 cores), and nothing over a local disk of 1.5 GB/s.

Every host copies every shard, because the streams that a host reads hold other shards in each epoch. So H hosts read H
times the dataset once, instead of once an epoch: worth it from about H epochs on.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import pathlib
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence

from etils import epath

from data import catalog, errors

# Shards copied at a time. One request to Cloud Storage brings some 100 MB/s at most.
_THREADS = 16
_CHUNK_BYTES = 16 << 20
# Of the memory that is available, the part that copies may take: the rest is for shuffling, batches and the program.
_MEMORY_FRACTION = 0.5
# Left free on the disk.
_DISK_RESERVE_BYTES = 1 << 30
_FILES_RESERVE = 512  # file descriptors for everything else
_LOCK = ".lock"
_UNFINISHED = ".incomplete"
_GB = 1e9


def to_disk(paths: Sequence[str], cache_dir: str, say: Callable[[str], None] = lambda text: None) -> dict[str, str]:
    """Copies shards into a directory, where the next start and other runs find them.

    A copy is known by path, size and time of change of its shard, so a changed one is copied again; copies of what has
    gone are not removed. A second process waits for the first, then finds all there.

    Args:
      paths: of the shards.
      cache_dir: on a disk of this machine; made where it is not there.
      say: told before waiting and copying.

    Returns:
      Path of each shard -> path of its copy.

    Raises:
      DataError: the disk has no room for what is missing, or holds the shards themselves; or a shard changed meanwhile.
      OSError: what reading and writing raise.
    """
    if catalog.is_remote(cache_dir):
        raise errors.DataError(f"cache_dir must be on a disk of this machine. Received: {cache_dir!r}.")
    folder = pathlib.Path(os.path.expanduser(cache_dir))
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_same_disk(paths, folder)
    with _alone(folder, say):
        for left_over in folder.glob(f"*{_UNFINISHED}"):  # of a process that was killed: there is no other now
            left_over.unlink()
        sizes, copies = {}, {}
        for path, (size, changed) in _facts(paths).items():
            copies[path] = folder / _name(path, size, changed)
            if not _is_complete(copies[path], size):
                sizes[path] = size
        free = shutil.disk_usage(folder).free - _DISK_RESERVE_BYTES
        _refuse_too_large(sizes, free, f"the disk of {folder} has", "Name another --cache_dir, or leave out --cache")

        def copy(path: str) -> None:
            unfinished = folder / f"{copies[path].name}{_UNFINISHED}"
            with unfinished.open("wb") as out:
                _copy(path, sizes[path], out.fileno())
                os.fsync(out.fileno())  # its name must not be there before its bytes are
            unfinished.rename(copies[path])

        _copy_all(sizes, copy, f"to {folder}", say)
    return {path: os.fspath(copy) for path, copy in copies.items()}


def to_memory(paths: Sequence[str], say: Callable[[str], None] = lambda text: None) -> dict[str, str]:
    """Copies shards into memory of this process, which ends with it and is shared with no other.

    The copies are anonymous files (memfd_create of Linux): nothing is left behind however the process ends.

    Args:
      paths: of the shards.
      say: told before copying.

    Returns:
      Path of each shard -> path of its copy, which this process alone can open.

    Raises:
      DataError: more bytes than half of the memory that is available to this process, or more shards than it may open;
        or a shard changed meanwhile.
      OSError: what reading raises.
    """
    sizes = {path: size for path, (size, _) in _facts(paths).items()}
    room = int(memory_available() * _MEMORY_FRACTION)
    _refuse_too_large(sizes, room, "half of the memory available is", "Use --cache=disk, or leave it out")
    _allow_files(len(sizes))
    files = {path: os.memfd_create(os.path.basename(path)) for path in sizes}
    try:
        _copy_all(sizes, lambda path: _copy(path, sizes[path], files[path]), "to memory", say)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    return {path: f"/proc/self/fd/{file}" for path, file in files.items()}


def memory_available() -> int:
    """Bytes that this process can still take: of the machine, and of its container (cgroup 1 or 2) if it has one."""
    meminfo = pathlib.Path("/proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # not this version of cgroup, or no limit ("max")
            root = pathlib.Path("/sys/fs/cgroup")
            available.append(int((root / limit).read_text()) - int((root / used).read_text()))
    return max(0, min(available))


def _facts(paths: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Path -> size in bytes and time of change."""

    def facts(path: str) -> tuple[int, float]:
        stat = epath.Path(path).stat()
        return stat.length, stat.mtime

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(facts, paths), strict=True))


def _name(path: str, size: int, changed: float) -> str:
    digest = hashlib.sha256(f"{path} {size} {changed}".encode()).hexdigest()[:16]
    return f"{digest}-{os.path.basename(path)}"


def _is_complete(copy: pathlib.Path, size: int) -> bool:
    return copy.exists() and copy.stat().st_size == size


def _refuse_same_disk(paths: Sequence[str], folder: pathlib.Path) -> None:
    local = [path for path in paths if not catalog.is_remote(path)]
    if local and os.stat(local[0]).st_dev == folder.stat().st_dev:
        raise errors.DataError(
            f"cache=disk has no effect: {local[0]} lies on the same disk as cache_dir. Name one on another disk, or "
            f"leave out --cache. Received: {folder}."
        )


def _refuse_too_large(sizes: dict[str, int], room: int, whose: str, remedy: str) -> None:
    total = sum(sizes.values())
    if sizes and total > room:
        raise errors.DataError(
            f"The cache cannot hold {len(sizes)} shards of {total / _GB:,.2f} GB together: {whose} "
            f"{max(0, room) / _GB:,.2f} GB to spare. {remedy}."
        )


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _FILES_RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise errors.DataError(
                f"cache=memory keeps {count} shards open, and this process may open {hard} files. "
                "Use --cache=disk, build fewer shards, or raise the limit (ulimit -Hn)."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def _alone(folder: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a cache; the kernel lets go of it whatever becomes of this process."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"cache: waiting for another process that copies to {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy_all(sizes: dict[str, int], copy: Callable[[str], None], where: str, say: Callable[[str], None]) -> None:
    if not sizes:
        return
    say(f"cache: copying {len(sizes)} shards, {sum(sizes.values()) / _GB:,.2f} GB, {where}")
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        tasks = [pool.submit(copy, path) for path in sizes]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _copy(path: str, size: int, out: int) -> None:
    """Copies a file to a descriptor."""
    written = 0
    with epath.Path(path).open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(out, rest) :]
            written += len(chunk)
    if written != size:
        raise errors.DataError(f"{path} changed while it was copied: {size:,} bytes at first, then {written:,}.")
