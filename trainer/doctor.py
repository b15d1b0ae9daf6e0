"""Checks of the machine and its packages, before anything heavy is imported."""

import importlib.metadata
import importlib.util
import os
import warnings

from trainer.errors import ConfigError

# tensorflow-tpu aborts the process on import with this libtpu or a later one (seen for 0.0.32 to 0.0.52).
FIRST_BROKEN_LIBTPU = (0, 0, 32)


def check_packages(*, wants_tpu: bool) -> None:
    """Looks at installed packages only by their metadata.

    Raises:
        ConfigError: no TensorFlow, or a libtpu on which importing TensorFlow would abort the process.
    """
    if importlib.util.find_spec("tensorflow") is None:
        extra = "tpu" if wants_tpu else "cpu"
        raise ConfigError(f"TensorFlow is not installed. Run: pip install '.[{extra}]' (or [cpu], [gpu], [tpu])")
    libtpu = _version("libtpu")
    if _version("tensorflow-tpu") and libtpu and libtpu >= FIRST_BROKEN_LIBTPU:
        received = ".".join(map(str, libtpu))
        raise ConfigError(
            f"importing tensorflow-tpu aborts with libtpu {received}. Run: pip install 'libtpu>=0.0.14,<0.0.32'"
        )


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def quieten_libraries(*, for_machines: bool = False) -> None:
    """Keeps notes of libraries for their own developers off the console; call it before TensorFlow is imported.

    Args:
        for_machines: the console is read as JSON, which TensorFlow does not write: its errors are kept off too. What
            ends a run comes as an exception besides.
    """
    # C++ INFO and WARNING lines (CPU features, missing CUDA) say nothing a user of this program can act on.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if for_machines else "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # google-auth 1.x, which cloud-tpu-client pins, uses interfaces that Python deprecates.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module="google")
