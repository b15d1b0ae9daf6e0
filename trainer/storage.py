"""Files and directories of a run's state on local paths and gs://: replaced whole or not at all, durable, and what a
failure means for the run.

gs:// replaces whole objects at once and knows no directories; a local file system needs a rename and several fsyncs.
"""

import contextlib
import enum
import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from trainer.errors import ConfigError, RetryError

_T = TypeVar("_T")
_NO_SPACE = ("no space left", "disk quota exceeded", "file too large")
_READ_ONLY = "read-only file system"
_DENIED = (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError, PermissionError)
# Of reading only, and never of gs:// being unwell: TensorFlow's client reports that as Unavailable, Aborted and so on.
_UNREADABLE = (tf.errors.DataLossError, tf.errors.OutOfRangeError, tf.errors.InvalidArgumentError)

# All that a file operation of TensorFlow or Python raises for a reason outside this program.
FILE_ERRORS = (tf.errors.OpError, OSError)
_MISSING = (tf.errors.NotFoundError, FileNotFoundError, NotADirectoryError)


_HTTP_CODE = re.compile(r"http response code (\d+)")
_NODE_NAMES = re.compile(r"^\{\{function_node [^}]*\}\} | \[Op:\w+\]$")
_REASON_CHARS = 600
_READ_WAITS_SECS = (1.0, 2.0, 4.0)
_READ_BYTES = 1 << 16


class Fault(enum.Enum):
    """What a failed file operation means."""

    SPACE = "no space left"
    DENIED = "no permission"
    MISSING = "something that has to be there is not"
    UNREADABLE = "bytes are there, but not those that were written"
    TRANSIENT = "another try may succeed"


# Whatever else a bucket answers says nothing of what it holds.
_HTTP = {401: Fault.DENIED, 403: Fault.DENIED, 404: Fault.MISSING}


def fault(error: BaseException) -> Fault:
    """Why a file operation failed, from what TensorFlow's file systems and Python really raise."""
    text = reason(error).lower()
    if code := _HTTP_CODE.search(text):
        return _HTTP.get(int(code[1]), Fault.TRANSIENT)
    if any(words in text for words in _NO_SPACE) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return Fault.SPACE
    if isinstance(error, _DENIED) or _READ_ONLY in text:
        return Fault.DENIED
    if isinstance(error, _MISSING) or "not a directory" in text:
        return Fault.MISSING
    return Fault.UNREADABLE if isinstance(error, _UNREADABLE) else Fault.TRANSIENT


def is_passing(error: BaseException) -> bool:
    """Whether the same operation may succeed in a moment."""
    return isinstance(error, FILE_ERRORS) and fault(error) is Fault.TRANSIENT


def reason(error: BaseException) -> str:
    """The file system's own words in one line, Google's on what is not allowed too, without TensorFlow's node names."""
    text = " ".join((getattr(error, "message", None) or str(error)).split()) or type(error).__name__
    return _NODE_NAMES.sub("", text)[:_REASON_CHARS]


@contextlib.contextmanager
def explained(directory: str) -> Iterator[None]:
    """Turns an error of the file system that is about `directory`, and that its user can mend, into one of ours.

    Raises:
        ConfigError: no permission, or the directory was removed.
        RetryError: no space left.
    """
    try:
        yield
    except FILE_ERRORS as error:
        kind, received = fault(error), f"Received: {directory}: {reason(error)}"
        if is_local(directory) and kind is Fault.MISSING and not os.path.isdir(directory):
            raise ConfigError(f"the directory was removed under the run. Use one that stays. {received}") from error
        if kind is Fault.DENIED:
            raise ConfigError(
                f"no permission. Let the run read and write there, or name another. {received}"
            ) from error
        if kind is Fault.SPACE:
            raise RetryError(f"no space left. Make room and run again. {received}") from error
        raise


def retry(work: Callable[[], _T], waits_secs: Sequence[float], again: Callable[[BaseException], bool]) -> _T:
    """Returns what `work` does; tries again after each wait (give or take half of it) while `again(error)` holds."""
    for wait_secs in waits_secs:
        try:
            return work()
        except Exception as error:
            if not again(error):
                raise
        # Many jobs meet the same outage: none of them should come back in step with the others.
        time.sleep(wait_secs * random.uniform(0.5, 1.5))
    return work()


def is_local(path: str) -> bool:
    """Whether Python's own file functions reach `path`."""
    return "://" not in path


def is_there(directory: str) -> bool:
    """Whether a local directory, or the bucket of one on gs://, exists; true where that cannot be told."""
    if is_local(directory):
        return os.path.isdir(directory)
    scheme, _, rest = directory.partition("://")
    try:
        return tf.io.gfile.exists(f"{scheme}://{rest.split('/')[0]}/")
    except tf.errors.OpError:
        return True


def names(directory: str) -> list[str]:
    """What is in a directory, sorted; nothing where there is none."""
    if is_local(directory):
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):  # perhaps just removed by another process
            return []
    try:
        return sorted({name.rstrip("/") for name in tf.io.gfile.listdir(directory)} - {""})
    except tf.errors.NotFoundError:
        # listdir first asks isdir, which takes a bucket that does not answer for no directory; exists passes errors on.
        if tf.io.gfile.exists(directory):
            raise tf.errors.UnavailableError(None, None, f"{directory} is there, but was not listed") from None
        return []


def read(path: str) -> bytes:
    """The content of a file."""
    content = b""
    with tf.io.gfile.GFile(path, "rb") as file:
        # Not read(): on gs:// that takes the size from a cache, and what another process wrote may be longer.
        while len(chunk := file.read(_READ_BYTES)) == _READ_BYTES:
            content += chunk
    return content + chunk


def read_text(path: str) -> str:
    """The text of a file that has to be there.

    Raises:
        ConfigError: it is not, or may not be read.
        RetryError: the storage does not answer, also after some tries.
    """
    try:
        return retry(lambda: read(path), _READ_WAITS_SECS, is_passing).decode()
    except FILE_ERRORS as error:
        received = f"Received: {path}: {reason(error)}"
        if is_passing(error):
            raise RetryError(f"the storage does not answer. Run again when it does. {received}") from error
        raise ConfigError(
            f"the file cannot be read. Name one that is there, and let the run read it. {received}"
        ) from error


def make_directory(path: str) -> None:
    """Makes one directory, durably; the one it stands in must exist, for a directory that is gone is not made anew."""
    if not is_local(path):
        return
    if not os.path.isdir(path):
        os.mkdir(path)
        sync([os.path.dirname(os.path.abspath(path))])


def replace(path: str, content: bytes) -> None:
    """Writes a file so that at every moment it holds the old content or the new, also after a power cut."""
    if not is_local(path):
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(content)
        return
    part = f"{path}.part"
    with open(part, "wb") as local:
        local.write(content)
        local.flush()
        os.fsync(local.fileno())
    os.replace(part, path)
    sync([os.path.dirname(path)])


def remove(path: str) -> None:
    """Removes a file, durably; one that is not there is fine."""
    try:
        tf.io.gfile.remove(path)
    except tf.errors.NotFoundError:
        return
    if is_local(path):
        sync([os.path.dirname(path)])


def remove_directory(path: str) -> None:
    """Removes a directory with all in it; one that is not there is fine."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=not os.path.exists(path))
        return
    try:
        tf.io.gfile.rmtree(path)
    except tf.errors.NotFoundError:
        return


def sync(paths: Iterable[str]) -> None:
    """Makes local files and directories durable; what is on gs:// is so already."""
    for path in paths:
        if not is_local(path):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def size(directory: str) -> int:
    """Bytes of the files in a local directory and below."""
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, files in os.walk(directory) for name in files)


def free_bytes(path: str) -> int:
    """Bytes that can be written under a local path, which need not exist yet."""
    return shutil.disk_usage(_first_existing(path)).free


def total_bytes(path: str) -> int:
    """Bytes of the whole disk under a local path, which need not exist yet."""
    return shutil.disk_usage(_first_existing(path)).total


def _first_existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
