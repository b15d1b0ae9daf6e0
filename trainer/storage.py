"""Files and directories of a run's state on local paths and gs://: replaced whole or not at all, durable, and what a
failure means for the run.

gs:// replaces whole objects at once and knows no directories; a local file system needs a rename and several fsyncs.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator

import tensorflow as tf

from data import objects
from data.faults import FILE_ERRORS, RETRY_WAITS_SECS, Fault, fault, is_passing, reason, remedy, retry
from trainer.errors import ConfigError, RetryError

__all__ = [
    "FILE_ERRORS",
    "RETRY_WAITS_SECS",
    "Fault",
    "explained",
    "fault",
    "free_bytes",
    "is_local",
    "is_passing",
    "is_there",
    "make_directories",
    "make_directory",
    "names",
    "read",
    "read_text",
    "reason",
    "remedy",
    "remove",
    "remove_directory",
    "replace",
    "replace_directory",
    "retry",
    "size",
    "sync",
    "total_bytes",
]

_READ_BYTES = 1 << 16


@contextlib.contextmanager
def explained(directory: str) -> Iterator[None]:
    """Turns an error of the file system that its user can mend into one of ours.

    Args:
        directory: what it is about, unless it names an object on gs:// itself.

    Raises:
        ConfigError: no permission, no such bucket, or the directory was removed.
        RetryError: no space left.
    """
    try:
        yield
    except FILE_ERRORS as error:
        kind, received = fault(error), f"Received: {directory}: {reason(error)}"
        if is_local(directory) and kind is Fault.MISSING and not os.path.isdir(directory):
            raise ConfigError(f"the directory was removed under the run. Use one that stays. {received}") from error
        if told := remedy(error):
            raise ConfigError(f"{told}. Received: {reason(error)}") from error
        if kind is Fault.DENIED:
            raise ConfigError(
                f"no permission. Let the run read and write there, or name another. {received}"
            ) from error
        if kind is Fault.SPACE:
            raise RetryError(f"no space left. Make room and run again. {received}") from error
        raise


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
    return [name.rstrip("/") for name in objects.entries(directory)]


def read(path: str) -> bytes:
    """The content of a file."""
    chunks = []
    with tf.io.gfile.GFile(path, "rb") as file:
        # Not read(): on gs:// that takes the size from a cache, and what another process wrote may be longer.
        while len(chunk := file.read(_READ_BYTES)) == _READ_BYTES:
            chunks.append(chunk)
    return b"".join([*chunks, chunk])


def read_text(path: str) -> str:
    """The text of a file that has to be there.

    Raises:
        ConfigError: it is not, or may not be read.
        RetryError: the storage does not answer, also after some tries.
    """
    try:
        return retry(lambda: read(path), RETRY_WAITS_SECS, is_passing).decode()
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


def make_directories(path: str) -> None:
    """Makes a directory and those around it; on gs:// there are none to make (see `data.objects`)."""
    if is_local(path):
        os.makedirs(path, exist_ok=True)


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


def remove_empty(path: str, top: str) -> None:
    """Removes a local directory, and those above it up to `top`, as far as nothing is in them."""
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return
        if path in (top, os.path.dirname(path)):
            return
        path = os.path.dirname(path)


def replace_directory(source: str, target: str, mark: str) -> None:
    """Puts a directory in the place of another, or of none; a kill leaves the old one, none, or the new one.

    Args:
        source: is gone afterwards.
        target: on gs:// it is whole only while it holds `mark` (see `data.objects`).
        mark: name of the file that whoever reads the directory reads first.
    """
    if not is_local(target):
        objects.replace_directory(source, target, mark)
        return
    remove_directory(target)
    os.rename(source, target)


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
