"""Directories on gs://, which knows objects only: made, listed, and replaced whole or not at all.

A rename of a directory there is a copy and a removal of each object, in the order of their names. So of the objects
that make up something one is its mark, without which nobody takes the rest for whole: it is removed first and comes
last.

TensorFlow's `makedirs` is not used: it never returns where the bucket does not exist, and asks for storage.buckets.get,
which no role on objects includes.
"""

import concurrent.futures
import io
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import tensorflow as tf

from data import faults

_T = TypeVar("_T")
# A copy within Cloud Storage takes some tenths of a second, whatever its size.
_PARALLEL_REQUESTS = 32
_READ_BUFFER_BYTES = 4 << 20


def entries(directory: str) -> list[str]:
    """What is directly below, sorted, directories with a slash at their end; nothing where there is none.

    Raises:
      tf.errors.OpError: the bucket does not answer.
    """
    try:
        return sorted({name for name in tf.io.gfile.listdir(directory)} - {"", "/"})
    except tf.errors.NotFoundError:
        # listdir first asks isdir, which takes a bucket that does not answer for no directory; exists passes errors on.
        if tf.io.gfile.exists(directory):
            raise tf.errors.UnavailableError(None, None, f"{directory} is there, but was not listed") from None
        return []


def files(directory: str) -> list[str]:
    """Names of all objects below, with the directories between."""
    found = []
    for name in entries(directory):
        found += [f"{name}{below}" for below in files(f"{directory}/{name[:-1]}")] if name.endswith("/") else [name]
    return found


def open_seekable(path: str) -> io.BufferedReader:
    """An object as a file of Python's, for libraries that read in any order; TensorFlow's own is not quite one."""
    return io.BufferedReader(_Raw(path), _READ_BUFFER_BYTES)


class _Raw(io.RawIOBase):
    def __init__(self, path: str):
        self._file, self._size = tf.io.gfile.GFile(path, "rb"), tf.io.gfile.stat(path).length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._file.seek(begin + offset)
        return begin + offset

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def replace_directory(source: str, target: str, mark: str) -> None:
    """Puts what `source` holds in the place of what `target` holds; `source` is gone afterwards.

    Whenever `target` holds `mark`, it is all of the old or all of the new. Passing errors are tried again.

    Args:
      source, target: directories of one bucket; `target` need not exist.
      mark: object in `source` without which nobody reads the others.

    Raises:
      tf.errors.OpError: what the bucket says. `target` is whole, or has no mark.
    """
    source, target = source.rstrip("/"), target.rstrip("/")
    names = _again(lambda: files(source))
    if mark not in names:
        raise ValueError(f"there is no {mark} in {source}. Received: {', '.join(names) or 'nothing'}")
    _again(lambda: _remove(f"{target}/{mark}"))
    _again(lambda: _remove_all(target))
    _again(lambda: _move(source, target, but=(mark,)))
    lost = set(names) - {mark, *_again(lambda: files(target))}
    if lost:
        raise tf.errors.DataLossError(None, None, f"{target} has not kept {', '.join(sorted(lost))}")
    _again(lambda: _move(source, target))
    _again(lambda: _remove_all(source))


def _again(work: Callable[[], _T]) -> _T:
    return faults.retry(work, faults.RETRY_WAITS_SECS, faults.is_passing)


def _move(source: str, target: str, *, but: Collection[str] = ()) -> None:
    """Moves what is left to be moved, so that a second try goes on where the first one failed."""
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        moves = [
            pool.submit(tf.io.gfile.rename, f"{source}/{name}", f"{target}/{name}", overwrite=True)
            for name in files(source)
            if name not in but
        ]
        for move in moves:
            move.result()


def _remove(path: str) -> None:
    try:
        tf.io.gfile.remove(path)
    except tf.errors.NotFoundError:
        return


def _remove_all(directory: str) -> None:
    if not entries(directory):
        return
    try:
        tf.io.gfile.rmtree(directory)
    except tf.errors.NotFoundError:
        return
