"""`status.json` of a model_dir: whose it is, how far the run is, and how it ended. Local or gs://, through tf.io.gfile.

`lease.py` keeps it; everybody may read it.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import platform
import time
import typing
import uuid
from collections.abc import Iterator

import tensorflow as tf

NAME = "status.json"
State = typing.Literal["running", "finished", "stopped", "failed"]

_LOCK_SECS = 2.0  # a lock is held for milliseconds, unless its holder was stopped
_MAX_BYTES = 65536


@dataclasses.dataclass
class Status:
    """What status.json holds."""

    owner: str  # random; of one start of a run
    host: str
    pid: int
    boot_id: str  # these three tell processes of one machine apart
    pid_namespace: str
    process_start: str  # in ticks of the kernel since boot
    started: str  # UTC; like `time` for people only
    time: str = ""
    state: State = "running"
    exit_code: int | None = None
    reason: str | None = None
    step: int | None = None  # last known, kept over restarts
    phase: str = "starting"
    beats: int = 0
    secs_since_progress: float = 0.0

    @property
    def who(self) -> str:
        """For messages."""
        return f"host {self.host}, pid {self.pid}, step {'unknown' if self.step is None else self.step}"


def read(model_dir: str) -> Status | None:
    """The status of the run in model_dir; None where there is none.

    Raises:
      tf.errors.OpError, ValueError: it cannot be read.
    """
    return StatusFile(model_dir).load()


def new_status(previous: Status | None) -> Status:
    """Of this process, with a new owner; `previous` is what stood there before."""
    return Status(
        owner=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        process_start=_process_start(os.getpid()) or "",
        started=_now(),
        step=previous.step if previous else None,
    )


def unreadable() -> Status:
    """Stands for a status that cannot be understood: of somebody who may be alive."""
    return Status("unknown", "unknown", 0, "", "", "", "")


def _is_ours_to_judge(status: Status) -> bool:
    """Whether its process is, or was, one that this process can see."""
    known = (status.boot_id, status.pid_namespace, status.process_start)
    return all(known) and known[:2] == (_boot_id(), _pid_namespace())


def is_dead(status: Status) -> bool:
    """Whether its process is known to have ended; a later process of the same id is another one."""
    return _is_ours_to_judge(status) and _process_start(status.pid) != status.process_start


def is_alive(status: Status) -> bool:
    """Whether its process is known to run. Of one on another machine or in another container neither is known."""
    return _is_ours_to_judge(status) and not is_dead(status)


class StatusFile:
    """status.json of a directory."""

    def __init__(self, model_dir: str):
        self.directory = model_dir.rstrip("/")
        self.path = f"{self.directory}/{NAME}"
        self.is_local = "://" not in model_dir

    def load(self) -> Status | None:
        """What it holds; None without file or directory.

        Raises:
          tf.errors.OpError: it cannot be read.
          ValueError: it is not JSON or of another program.
        """
        try:
            with tf.io.gfile.GFile(self.path) as file:
                # Not read(): on gs:// that takes the size from a cache, and what another one wrote may be longer.
                return Status(**json.loads(file.read(_MAX_BYTES)))
        except tf.errors.NotFoundError:
            return None
        except TypeError as error:
            raise ValueError(f"{self.path} is not of this program: {error}") from error

    def store(self, status: Status) -> None:
        """Replaces the file as a whole."""
        status.time = _now()
        part = f"{self.path}.part" if self.is_local else self.path  # an object of gs:// is written whole anyway
        with tf.io.gfile.GFile(part, "w") as file:
            file.write(json.dumps(dataclasses.asdict(status), indent=2) + "\n")
        if part != self.path:
            tf.io.gfile.rename(part, self.path, overwrite=True)

    def age_secs(self) -> float:
        """Seconds since it was last written, by the clock of the storage."""
        written = tf.io.gfile.stat(self.path).mtime_nsec
        probe = f"{self.directory}/.lease-probe-{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("now")
        try:
            return (tf.io.gfile.stat(probe).mtime_nsec - written) / 1e9
        finally:
            tf.io.gfile.remove(probe)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Keeps others from writing between our reading and writing, where the file system can; True where it does."""
        alone = False
        with contextlib.ExitStack() as stack:
            if self.is_local:
                with contextlib.suppress(OSError):  # no such directory any more, or one of a network
                    descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
                    stack.callback(os.close, descriptor)  # which also unlocks
                    alone = _lock(descriptor)
            yield alone


def _lock(descriptor: int) -> bool:
    ends_at = time.monotonic() + _LOCK_SECS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > ends_at:
                return False
            time.sleep(0.01)


def _boot_id() -> str:
    return _text("/proc/sys/kernel/random/boot_id").strip()


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _process_start(pid: int) -> str | None:
    """When a process was started, in ticks since boot: tells it from a later one of the same id; None without one."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # the name before may have spaces and brackets
    if not fields or fields[0] in ("Z", "X"):  # ended, and waiting for its parent to notice
        return None
    return fields[19]  # field 22 of proc_pid_stat(5), with the third as the first here


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text(errors="replace")
    return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
