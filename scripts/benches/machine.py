"""What a table of figures has to say of the machine that they are from."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Sequence

_PACKAGES = (
    "tensorflow-cpu",
    "tensorflow",
    "keras",
    "jax",
    "jaxlib",
    "tf-keras",
    "tf-models-official",
    "flax",
    "optax",
    "numpy",
)
_GIB = 1 << 30


def describe() -> Sequence[tuple[str, str]]:
    """Rows of a table: processor, cores, memory, system, versions."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    return [
        ("processor", _processor()),
        ("cores", str(len(os.sched_getaffinity(0)))),
        ("memory", f"{memory:.0f} GiB"),
        ("system", f"{_system()}, {platform.release()}, Python {platform.python_version()}"),
        ("packages", ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))),
    ]


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
