"""Packages and their versions, as far as possible before anything heavy is imported."""

import configparser
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import warnings
from collections.abc import Container, Iterator, Mapping

from trainer.doctor.findings import Case, Finding, failed, passed, skipped, warned
from trainer.errors import ConfigError

# tensorflow-tpu aborts the process on import with this libtpu or a later one (seen for 0.0.32 to 0.0.52).
FIRST_BROKEN_LIBTPU = (0, 0, 32)
# Builds of TensorFlow that install the same module over one another, and the extra of ours that brings each.
_BUILDS = {"tensorflow": "gpu", "tensorflow-cpu": "cpu", "tensorflow-tpu": "tpu"}
_OURS = "keras-tpu-trainer"
_SETUP_CFG = pathlib.Path(__file__).parents[2] / "setup.cfg"


def check_packages(*, wants_tpu: bool, backend: str = "tensorflow", environ: Mapping[str, str] = os.environ) -> None:
    """Looks at installed packages only by their metadata.

    Args:
        wants_tpu: whether the run is for a TPU.
        backend: of Keras.
        environ: environment variables.

    Raises:
        ConfigError: no TensorFlow or no JAX, or a libtpu on which importing TensorFlow would abort the process.
    """
    if importlib.util.find_spec("tensorflow") is None:
        extras = {"tensorflow": "tpu" if wants_tpu else "cpu", "jax": "jax-tpu" if wants_tpu else "jax"}
        others = {"tensorflow": "[cpu], [gpu], [tpu]", "jax": "[jax], [jax-gpu], [jax-tpu]"}
        raise ConfigError(
            f"TensorFlow is not installed. Run: pip install '.[{extras[backend]}]' (or {others[backend]})"
        )
    if backend == "jax":
        _check_jax(wants_tpu, environ)
    libtpu = _numbers("libtpu")
    if version_of("tensorflow-tpu") and libtpu and libtpu >= FIRST_BROKEN_LIBTPU:
        received = ".".join(map(str, libtpu))
        raise ConfigError(
            f"importing tensorflow-tpu aborts with libtpu {received}. Run: pip install 'libtpu>=0.0.14,<0.0.32'"
        )


def _check_jax(wants_tpu: bool, environ: Mapping[str, str]) -> None:
    extra = "jax-tpu" if wants_tpu else "jax"
    if not all(map(importlib.util.find_spec, ("jax", "jaxlib"))):
        raise ConfigError(f"JAX is not installed. Run: pip install '.[{extra}]' (or [jax], [jax-gpu], [jax-tpu])")
    if version_of("tensorflow-tpu"):
        raise ConfigError(
            "tensorflow-tpu would take the chips from JAX, and needs another libtpu; with --backend=jax TensorFlow "
            f"only reads data. Run: pip uninstall -y tensorflow-tpu libtpu, then pip install '.[{extra}]'"
        )
    if wants_tpu and version_of("libtpu") is None and not environ.get("TPU_LIBRARY_PATH"):
        raise ConfigError("JAX reaches a TPU through libtpu, which is not installed. Run: pip install '.[jax-tpu]'")


def quieten_libraries(*, for_machines: bool = False) -> None:
    """Keeps notes of libraries for their own developers off the console; call it before TensorFlow is imported.

    Args:
        for_machines: the console is read as JSON, which TensorFlow does not write: its errors are kept off too. What
            ends a run comes as an exception besides.
    """
    # C++ INFO and WARNING lines (CPU features, missing CUDA) say nothing a user of this program can act on.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if for_machines else "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # google-auth 1.x, which cloud-tpu-client pins, uses interfaces that Python deprecates.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module="google")


# --- checks ---


def python(case: Case) -> Iterator[Finding]:
    """Python against `python_requires`."""
    from packaging.specifiers import SpecifierSet

    wanted, _ = _declared()
    if SpecifierSet(wanted).contains(platform.python_version()):
        yield passed("Python", f"{platform.python_version()} ({wanted})")
    else:
        yield failed(
            "Python",
            f"this is {platform.python_version()}, and TensorFlow has wheels for {wanted} only",
            f"Make the environment with a Python {wanted}",
        )


def tensorflow_build(case: Case) -> Iterator[Finding]:
    """One build of TensorFlow, in range, that suits what --tpu asks for, with a libtpu on which it can be imported."""
    name, extra = "TensorFlow build", case.extra
    there = {build: version for build in _BUILDS if (version := version_of(build))}
    try:
        check_packages(wants_tpu=case.config.tpu is not None, backend=case.config.backend, environ=case.environ)
    except ConfigError as error:
        cause, _, remedy = str(error).partition(". Run: ")
        yield failed(name, cause, remedy)
        if not there:
            return
    found = ", ".join(f"{build} {version}" for build, version in there.items())
    anew = f"pip uninstall -y {' '.join(there)}, then pip install '.[{extra}]'"
    if len(there) > 1:
        what = f"{len(there)} builds are installed over one another, and chance decides which is imported: {found}"
        yield failed(name, what, anew)
        return
    if not there:
        yield warned(name, "TensorFlow is there, and pip knows of no build that it supports", "pip install an extra")
        return
    [build] = there
    if case.wants_own_chips and not case.is_jax and build != "tensorflow-tpu":
        yield failed(name, f"{found} has no TPU support, and this machine's own chips are asked for", anew)
        return
    libtpu = f", libtpu {version_of('libtpu') or 'of the machine'}" if build == "tensorflow-tpu" else ""
    yield from in_range(_BUILDS[build], f"{found}{libtpu}", name)


def jax_versions(case: Case) -> Iterator[Finding]:
    """jax, jaxlib and libtpu against each other: what the extra for this hardware pins is what the trainer knows."""
    if not case.is_jax:
        yield skipped("JAX versions", "the run computes with TensorFlow")
        return
    names = ("jax", "jaxlib", *(["libtpu"] if case.wants_own_chips else []))
    there = [f"{name} {version}" for name in names if (version := version_of(name))]
    yield from in_range(case.extra, ", ".join(there), "JAX versions", only=names)


def requirements(case: Case) -> Iterator[Finding]:
    """Keras, cloud-tpu-client and whatever else is required always, against its range."""
    versions = [f"{name} {version_of(name)}" for name in ("keras", "cloud-tpu-client", "tensorflow-datasets")]
    yield from in_range("", ", ".join(versions), "requirements")


# --- versions ---


def _declared() -> tuple[str, list[str]]:
    """`python_requires`, and requirements as PEP 508 has them, extras as markers."""
    if not _SETUP_CFG.exists():
        found = importlib.metadata.metadata(_OURS)
        return found["Requires-Python"], list(importlib.metadata.requires(_OURS) or [])
    cfg = configparser.ConfigParser(interpolation=None)
    cfg.read(_SETUP_CFG)
    lines = [*_lines(cfg["options"]["install_requires"])]
    for extra, text in cfg["options.extras_require"].items():
        for line in _lines(text):
            name, _, marker = line.partition(";")
            lines.append(f"{name}; extra == '{extra}'" + (f" and ({marker.strip()})" if marker else ""))
    return cfg["options"]["python_requires"], lines


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def in_range(extra: str, what: str, name: str, only: Container[str] | None = None) -> Iterator[Finding]:
    """A failure for each requirement that is missing or out of its range.

    Args:
        extra: whose requirements; "" for those of all.
        what: to say where none is.
        name: of the finding.
        only: the packages to look at; None for all.
    """
    from packaging.requirements import Requirement

    wrong = False
    for requirement in map(Requirement, _declared()[1]):
        marker = requirement.marker
        is_of_extras = marker is not None and "extra" in str(marker)
        if is_of_extras != bool(extra) or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        if only is not None and requirement.name not in only:
            continue
        version = version_of(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        # A libtpu that the machine has outside of pip's sight is the machine's business.
        if version is None and requirement.name == "libtpu":
            continue
        wrong = True
        found = f"{requirement.name} {version}" if version else f"{requirement.name} is not installed"
        wanted = f"{requirement.name}{requirement.specifier}"
        yield failed(name, f"{found}; needed: {wanted}", f"pip install '{wanted}'")
    if not wrong:
        yield passed(name, what)


def version_of(package: str) -> str | None:
    """The installed version of a package, by its metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(package: str) -> tuple[int, ...] | None:
    text = version_of(package)
    return tuple(int(part) for part in text.split(".") if part.isdigit()) if text else None
