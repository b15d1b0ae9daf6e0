"""What a failed file operation means and what mends it, from what TensorFlow's file systems and Python really raise."""

import contextlib
import enum
import errno
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from data import errors

_T = TypeVar("_T")
# All that a file operation of TensorFlow or Python raises for a reason outside this program.
FILE_ERRORS = (tf.errors.OpError, OSError)
# Before what failed for a passing reason is tried again; TensorFlow's client has by then tried each request ten times.
RETRY_WAITS_SECS = (1.0, 2.0, 4.0, 8.0)

_NO_SPACE = ("no space left", "disk quota exceeded", "file too large")
_READ_ONLY = "read-only file system"
_DENIED = (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError, PermissionError)
# Of reading only, and never of gs:// being unwell: TensorFlow's client reports that as Unavailable, Aborted and so on.
_UNREADABLE = (tf.errors.DataLossError, tf.errors.OutOfRangeError, tf.errors.InvalidArgumentError)
_MISSING = (tf.errors.NotFoundError, FileNotFoundError, NotADirectoryError)

_HTTP_CODE = re.compile(r"http response code (\d+)")
# Where a graph fails, the stack of who built it comes first, and is long.
_GRAPH = re.compile(r"^Graph execution error:.*?(?=All \d+ retry attempts failed|Error executing an HTTP request)")
_NODE_NAMES = re.compile(r"^\{\{function_node [^}]*\}\} | ?\[\[\{\{node .*| \[Op:\w+\].*$")
_REASON_CHARS = 600

# https://cloud.google.com/storage/docs/requester-pays, and the text of the API's answer
_PAYER = re.compile(r"requester pays|user project", re.IGNORECASE)
_NO_BUCKET = "The specified bucket does not exist"
_PERMISSION = re.compile(r"storage\.\w+\.\w+")
# TensorFlow's own words of what it was doing (gcs_file_system.cc), where Google does not name what is missing.
_DOING = (
    (re.compile(r"when (initiating|resuming|uploading|renaming)"), "storage.objects.create"),
    (re.compile(r"when deleting"), "storage.objects.delete"),
    (re.compile(r"when reading metadata"), "storage.objects.get"),
    (re.compile(r"when reading gs://\S*/$"), "storage.objects.list"),
)
_OBJECT = re.compile(r"(gs://[^/\s]+)/?\S*")
_UNAUTHENTICATED = 401


class Fault(enum.Enum):
    """What a failed file operation means."""

    SPACE = "no space left"
    DENIED = "no permission"
    MISSING = "something that has to be there is not"
    UNREADABLE = "bytes are there, but not those that were written"
    TRANSIENT = "another try may succeed"


# Whatever else a bucket answers says nothing of what it holds.
_HTTP = {_UNAUTHENTICATED: Fault.DENIED, 403: Fault.DENIED, 404: Fault.MISSING}


def fault(error: BaseException) -> Fault:
    """Why a file operation failed."""
    text = reason(error).lower()
    if code := _HTTP_CODE.search(text):
        return Fault.DENIED if _PAYER.search(text) else _HTTP.get(int(code[1]), Fault.TRANSIENT)
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
    return _NODE_NAMES.sub("", _GRAPH.sub("", text))[:_REASON_CHARS]


def remedy(error: BaseException) -> str | None:
    """What is wrong with access to a bucket and what mends it, in sentences without the last full stop.

    None where the error is about something else.
    """
    text = reason(error)
    found = _OBJECT.search(text[text.rfind(" when ") :])
    if found is None:
        return None
    path, bucket = found[0], found[1]
    if _NO_BUCKET in text:
        return f"there is no bucket {bucket}. Mend its name, or create it: gcloud storage buckets create {bucket}"
    if fault(error) is not Fault.DENIED:
        return None
    if _PAYER.search(text):
        return f"{bucket} bills its readers, and TensorFlow's client names no project to bill. Use another bucket"
    code = _HTTP_CODE.search(text.lower())
    if code and int(code[1]) == _UNAUTHENTICATED:
        return (
            f"Google takes no credentials of this process for {path}. Run `gcloud auth application-default login`, or "
            "set GOOGLE_APPLICATION_CREDENTIALS to a service account's key"
        )
    named = _PERMISSION.search(text)
    tried = (permission for words, permission in _DOING if words.search(text))
    permission = named[0] if named else next(tried, "storage.objects.get or storage.objects.list")
    role = "roles/storage.objectViewer" if permission.endswith((".get", ".list")) else "roles/storage.objectAdmin"
    return (
        f"no permission: {permission} is missing for {path}. Give the account of this process {role}: gcloud storage "
        f"buckets add-iam-policy-binding {bucket} --member=serviceAccount:ACCOUNT --role={role}"
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns TensorFlow's errors about files into those that the commands of this package tell.

    Raises:
      DataError: no permission, no such bucket or file.
      StorageError: storage does not answer, or has no room.
    """
    try:
        yield
    except tf.errors.OpError as error:
        said = remedy(error)
        told = f"{said}. Received: {reason(error)}" if said else reason(error)
        if fault(error) in (Fault.TRANSIENT, Fault.SPACE):
            raise errors.StorageError(f"Storage does not answer, or has no room: run again later. {told}") from error
        raise errors.DataError(told) from error


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
