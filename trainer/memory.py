"""Memory of this process: how the C library deals it out to threads, and what Python looks for garbage in."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Mapping

_LIMIT = "MALLOC_ARENA_MAX"  # glibc's variable for the same
_M_ARENA_MAX = -8  # malloc.h of glibc


def share_arenas(environ: Mapping[str, str] = os.environ) -> None:
    """Lets the threads of this process share one arena a core; call it before there are threads.

    glibc lets a process have eight a core. Threads that tf.data and TensorFlow's readers and writers of checkpoints
    begin and end again meet ever other ones, and each keeps the buffer of 8 MiB that one of them took: memory grows
    with every evaluation and every checkpoint, on two cores by some 130 MiB, on many cores by gigabytes. No more
    threads than there are cores allocate at once. Does nothing where the user has set the limit, or without glibc.
    """
    if _LIMIT not in environ:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Looks for no garbage while libraries are imported, and afterwards in nothing that they have brought.

    TensorFlow and Keras bring objects by the hundred thousand, which all stay. As their number grows, Python goes
    through all of them time and again for garbage, which takes a quarter of the imports' time.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
