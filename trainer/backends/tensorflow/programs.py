"""Where TensorFlow keeps the programs that XLA compiles for it."""

import os

_FLAGS = "TF_XLA_FLAGS"


def keep(directory: str) -> None:
    """From now on; before the first program is compiled, when TensorFlow reads its flags."""
    os.environ[_FLAGS] = f"{os.environ.get(_FLAGS, '')} --tf_xla_persistent_cache_directory={directory}".strip()
