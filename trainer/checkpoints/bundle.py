"""Host arrays to and from TensorFlow's tensor bundle (local paths and gs://), bit for bit and without copies.

`PREFIX.index` and `PREFIX.data-00000-of-00001`, as `tf.train.load_checkpoint` reads them too. Every operation names
this process' own CPU: with a remote worker connected the default device may be that worker, whose disk is another.

Errors of TensorFlow and of the file system pass through as they are; `DamagedError` is what only this module can find.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Arrays read in one operation: on gs:// each costs several requests, and all that it reads is in memory at once.
_BATCH_BYTES = 8 << 20
# What is compared at a time: as large as possible without the comparison's own arrays counting.
_CHUNK_BYTES = 1 << 20
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class DamagedError(Exception):
    """Stored bytes are not those that were written; the message says which and how."""


class Form(NamedTuple):
    """What is known of an array before it is read: TensorFlow's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * tf.as_dtype(self.dtype).size


def form(array: np.ndarray) -> Form:
    """The form of an array."""
    return Form(tf.as_dtype(array.dtype).name, tuple(array.shape))


def checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes in C order."""
    return zlib.crc32(_bytes_of(array).data)


def write(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a bundle; its directory must exist. Values may be of any dtype and shape that TensorFlow has.

    Raises:
        ValueError: a name is empty, on which TensorFlow would abort the process.
        tf.errors.OpError: what the file system said.
    """
    names = sorted(arrays)
    if "" in names:
        raise ValueError(f"an array needs a name. Received: {names}")
    with tf.device(local_device()):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[_tensor(arrays[name]) for name in names],
        )


def read(prefix: str, forms: Mapping[str, Form]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array), holding no more than one array or 8 MiB at a time; arrays are read-only.

    Raises:
        DamagedError: an array is of another shape.
        tf.errors.OpError: DataLossError, OutOfRangeError, NotFoundError or InvalidArgumentError where files are
            damaged or missing, others where they could not be read.
    """
    for names in _batches(forms):
        with tf.device(local_device()):
            tensors = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                dtypes=[tf.as_dtype(forms[name].dtype) for name in names],
            )
        while tensors:
            name, array = names.pop(), np.asarray(tensors.pop())
            if tuple(array.shape) != forms[name].shape:
                raise DamagedError(f"{name} has shape {array.shape} where {forms[name].shape} was written")
            yield name, array
            del array  # before the next batch is read


def verify(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Reads a bundle back and compares every byte with `arrays`.

    Raises:
        DamagedError: a byte differs.
        tf.errors.OpError: as `read`.
    """
    for name, stored in read(prefix, {name: form(array) for name, array in arrays.items()}):
        if not _same_bytes(stored, arrays[name]):
            raise DamagedError(f"{name} reads back other bytes than were written")
        del stored  # before the next is read


def local_device() -> str:
    """This process' CPU by its full name, whatever cluster is connected: tensors out of NumPy's memory are there."""
    return tf.experimental.dlpack.from_dlpack(np.zeros((), np.uint8).__dlpack__()).device


def _batches(forms: Mapping[str, Form]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_bytes = 0
    for name in sorted(forms):
        if batch and num_bytes + forms[name].num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += forms[name].num_bytes
    if batch:
        yield batch


class _Writable:
    """The memory of a read-only array, as NumPy's array interface; NumPy exports read-only arrays to nobody.

    Nothing writes there: the bundle is written from it.
    """

    def __init__(self, array: np.ndarray):
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self._owner = array


def _tensor(array: np.ndarray) -> tf.Tensor:
    """A tensor over the memory of `array`. `tf.constant` would copy it twice."""
    array = np.asarray(array, order="C")
    dtype = tf.as_dtype(array.dtype)
    if not array.size or dtype.size != array.itemsize:
        return tf.constant(array)
    if array.dtype.isbuiltin == 1:
        return _share(array)
    try:
        # NumPy exports no bfloat16: its bits travel as integers.
        return tf.bitcast(_share(array.view(_UNSIGNED[array.itemsize])), dtype)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        return tf.constant(array)  # float8 and int4: they cannot be bitcast, and are rare


def _share(array: np.ndarray) -> tf.Tensor:
    writable: Any = array if array.flags.writeable else np.asarray(_Writable(array))
    return tf.experimental.dlpack.from_dlpack(writable.__dlpack__())


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """[num_bytes] uint8 over the same memory, where `array` is contiguous."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    first, second = _bytes_of(a), _bytes_of(b)
    if first.size != second.size:
        return False
    starts = range(0, first.size, _CHUNK_BYTES)
    return all(np.array_equal(first[at : at + _CHUNK_BYTES], second[at : at + _CHUNK_BYTES]) for at in starts)
