"""The machine: TPU chips and who holds them, page size, memory, room for temporary files."""

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

from trainer import hardware
from trainer.doctor.findings import Case, Finding, failed, passed, skipped, warned

# Held with lockf by the process that has loaded libtpu (tensorflow/core/tpu/tpu_initializer_helper.cc).
_LOCK = "tmp/libtpu_lockfile"
# conda's pyarrow carries a jemalloc for pages of up to this size and aborts on larger ones, which ARM kernels may have:
# https://github.com/conda-forge/arrow-cpp-feedstock/issues/1115, https://github.com/apache/arrow/issues/10929
_LARGEST_PAGE_BYTES = 16 << 10
# Limit and use of a container, whose own cgroup is mounted as the root of them all: version 2, version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_PROBE_BYTES = 1 << 20
_MIB = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def chips(case: Case) -> Iterator[Finding]:
    """The chips of this machine, whether they may be opened, and who holds them. Opens none: that would take it."""
    found = hardware.local_chips(case.root)
    if not found:
        yield skipped("TPU chips", "none on this machine: no /dev/accel<n> and no /dev/vfio/<n>")
        return
    closed = [path for path in found if not os.access(path, os.R_OK | os.W_OK, effective_ids=True)]
    if closed:
        yield failed(
            "TPU chips",
            f"{len(closed)} of {len(found)} may not be opened by this user: {', '.join(closed)}",
            "Join the group that owns them, or run as root; in a container, pass the devices on (--privileged)",
        )
    else:
        yield passed("TPU chips", ", ".join(found))
    yield _lock(case, found)


def _lock(case: Case, devices: list[str]) -> Finding:
    lock = os.path.join(case.root, _LOCK)
    holders = sorted(pid for pid in _lockers(lock) | _openers([*devices, lock]) if not _is_of_doctor(pid))
    if holders:
        names = "; ".join(f"PID {pid}, {_command(pid)}" for pid in holders)
        remedy = "Wait for its end, or end it: a chip serves one process"
        return failed("TPU holder", f"another process holds the chips: {names}", remedy, retryable=True)
    if os.path.exists(lock) and not os.access(lock, os.R_OK | os.W_OK, effective_ids=True):
        return failed("TPU holder", f"{lock} of another user cannot be opened, and libtpu must", f"sudo rm {lock}")
    hidden = "" if os.geteuid() == 0 else ", as far as this user can see (root sees all)"
    return passed("TPU holder", f"nobody holds the chips{hidden}")


def _lockers(path: str) -> set[int]:
    """PIDs with a lock on a file, of either kind. Format of /proc/locks: proc(5)."""
    if not os.path.exists(path):
        return set()
    found = os.stat(path)
    identity = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    pids = set()
    for line in pathlib.Path("/proc/locks").read_text().splitlines():
        fields = [field for field in line.split() if field != "->"]
        if identity in fields:
            pids.add(int(fields[fields.index(identity) - 1]))
    return pids


def _openers(paths: list[str]) -> set[int]:
    """PIDs that have one of the files open, among the processes that this user may look into."""
    wanted = {os.path.realpath(path) for path in paths}
    return {int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and wanted & _open_files(pid)}


def _open_files(pid: str) -> set[str]:
    folder, found = f"/proc/{pid}/fd", set()
    with contextlib.suppress(OSError):  # gone by now, or not ours to look into
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed by now
                found.add(os.readlink(f"{folder}/{descriptor}"))
    return found


def _is_of_doctor(pid: int) -> bool:
    """Whether it is this probe, or one beside it: that of TensorFlow takes the chips for a moment."""
    if pid in (os.getpid(), os.getppid()):
        return True
    try:
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:  # gone by now, or in another container
        return False
    return int(after_name.split()[1]) == os.getppid()


def _command(pid: int) -> str:
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words[:80] or "of another user or container"


def page_size(case: Case) -> Iterator[Finding]:
    """Pages of the kernel."""
    yield judged_page(os.sysconf("SC_PAGE_SIZE"))


def judged_page(num_bytes: int) -> Finding:
    """What a page size means."""
    if num_bytes <= _LARGEST_PAGE_BYTES:
        return passed("page size", f"{num_bytes:,} bytes")
    return warned(
        "page size",
        f"{num_bytes:,} bytes: conda's pyarrow aborts above {_LARGEST_PAGE_BYTES:,} (Unsupported system page size)",
        "Use pip's pyarrow, or a kernel with pages of 4 KiB",
    )


def memory(case: Case) -> Iterator[Finding]:
    """What this process may take, by the machine and by its container."""
    available = available_memory(case.root)
    yield passed("memory", f"{available // _MIB:,} MiB available")


def available_memory(root: str = "/") -> int:
    """Bytes that this process may still take: what the kernel has, and what the cgroup leaves."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    [kib] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limits = [kib << 10]
    for limit, used in _CGROUP_FILES:
        folder = pathlib.Path(root, "sys/fs/cgroup")
        try:
            most = (folder / limit).read_text().strip()
            if most != "max":
                limits.append(int(most) - int((folder / used).read_text()))
        except OSError:
            continue
    return max(0, min(limits))


def temporary(case: Case) -> Iterator[Finding]:
    """Whether something can be written where TensorFlow stages what goes to gs://, and how much."""
    directory = staging_directory(case.environ)
    needed = any("://" in path for path in (case.config.model_dir, case.config.init_from or ""))
    finding = writable("TMPDIR", directory, "Give another TMPDIR: what goes to gs:// is staged there first")
    if finding.status == "fail" and not needed:
        finding = warned("TMPDIR", f"{finding.what} (this run has nothing on gs:// to stage there)", finding.remedy)
    yield finding


def staging_directory(environ: Mapping[str, str]) -> str:
    """Where TensorFlow stages what goes to gs://: the first that is there (tensorflow/core/platform/default/env.cc)."""
    named = [directory for name in ("TMPDIR", "TMP") if (directory := environ.get(name))]
    return next(filter(os.path.isdir, named), "/tmp")


def writable(name: str, directory: str, remedy: str) -> Finding:
    """Writes a nameless file to a local directory, or to the one in which it will be made."""
    path = os.path.abspath(directory)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        if error.errno in _NO_ROOM:
            return failed(name, f"{directory} is full: {error.strerror}", f"Make room. {remedy}", retryable=True)
        return failed(name, f"{directory} cannot be written: {error.strerror}", remedy)
    found = os.statvfs(path)
    return passed(name, f"{directory}: {found.f_bavail * found.f_frsize // _MIB:,} MiB free")
