"""Programs that XLA has compiled, kept for the next start: `--compile_cache=DIR`.

What the libraries do by themselves is not safe enough to be left alone (TensorFlow 2.21, JAX 0.10, on CPU): TensorFlow
ends with an error where an entry is cut short, runs one with flipped bytes, and does not ask which CPU it was compiled
for; JAX writes into the place from which others read, and never mends an entry. So the library gets a directory of this
process alone, and the store beside it is ours:

    DIR/KEY/NAME.SUM    KEY says versions and CPU, SUM is the SHA-256 of the entry; put there by renaming, whole or not
    DIR/KEY/.work-*     what a process works in; removed when it ends, or by a later one where it was killed

An entry is code that the process runs: DIR must be writable by nobody who may not run code as its user.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator

from trainer import backend
from trainer.errors import ConfigError

MAX_BYTES = 4 * 2**30  # of all entries of a key
_ABANDONED_SECS = 7 * 24 * 3600.0  # longer than any process needs its directory for compiling
_WORK = ".work-"
_PACKAGES = ("jax", "jaxlib", "libtpu", "tensorflow")
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_OF_CPU = ("model name", "flags", "CPU part", "Features")

_log = logging.getLogger(__name__)


class CompileCache:
    """The store of one key, and the directory of this process. `opened` makes it.

    found: names of the entries that were there and whole.
    """

    def __init__(self, store: pathlib.Path, work: pathlib.Path):
        self._store, self._work = store, work
        self.found = [self._take(path) for path in _entries(store) if _is_whole(path)]

    def publish(self) -> None:
        """Keeps what has been compiled since; a failure is a warning, for nothing depends on it."""
        try:
            for path in self._work.iterdir():
                stored = self._store / f"{path.name}.{_sum(path)}"
                if path.name not in self.found and path.is_file():
                    partial = self._work.with_name(f"{self._work.name}.part")
                    shutil.copyfile(path, partial)
                    os.replace(partial, stored)
                    self.found.append(path.name)
            _bound(self._store)
        except OSError as error:
            _log.warning("compiled programs cannot be kept in %s: %s", self._store, error)

    def _take(self, path: pathlib.Path) -> str:
        name = path.name.rpartition(".")[0]
        shutil.copyfile(path, self._work / name)
        with contextlib.suppress(OSError):  # another's file; it is only not the newest then
            os.utime(path)
        return name


@contextlib.contextmanager
def opened(directory: str) -> Iterator[CompileCache]:
    """Lets XLA keep its programs in `directory`; before anything is compiled.

    Raises:
        ConfigError: it cannot be written.
    """
    store = pathlib.Path(directory, key())
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clean(store)
        work = pathlib.Path(tempfile.mkdtemp(prefix=_WORK, dir=store))
    except OSError as error:
        raise ConfigError(
            f"compile_cache cannot be written: {error.strerror}. Received: {directory}. Give a directory of your own"
        ) from error
    try:
        cache = CompileCache(store, work)
        backend.part("programs").keep(str(work))
        yield cache
        cache.publish()
    finally:
        shutil.rmtree(work, ignore_errors=True)
        work.with_name(f"{work.name}.part").unlink(missing_ok=True)


def key() -> str:
    """Names what compiled programs depend on beside themselves: versions, and the CPU with its features."""
    versions = [f"{name}={_version(name)}" for name in _PACKAGES]
    text = "\n".join([*versions, platform.platform(), platform.machine(), *_cpu()])
    return f"{backend.chosen()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "none"


def _cpu() -> list[str]:
    """What /proc/cpuinfo says of the first CPU; elsewhere its name is all there is."""
    if not _CPU_INFO.exists():
        return [platform.processor()]
    lines = _CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith(_OF_CPU)]


def _entries(store: pathlib.Path) -> list[pathlib.Path]:
    """All of them, the oldest first."""
    found = [path for path in store.iterdir() if not path.name.startswith(_WORK)]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _is_whole(path: pathlib.Path) -> bool:
    """Whether an entry is what was written; one that is not is removed, and compiled anew."""
    if _sum(path) == path.name.rpartition(".")[2]:
        return True
    _log.warning("%s is damaged: it is removed, and what it held is compiled again", path)
    path.unlink(missing_ok=True)
    return False


def _sum(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _bound(store: pathlib.Path) -> None:
    """Removes the entries that have not been used for longest, until the rest is small enough."""
    entries = _entries(store)
    total = sum(path.stat().st_size for path in entries)
    for path in entries:
        if total <= MAX_BYTES:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)


def _clean(store: pathlib.Path) -> None:
    """Removes what killed processes left behind."""
    for path in store.glob(f"{_WORK}*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECS:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
