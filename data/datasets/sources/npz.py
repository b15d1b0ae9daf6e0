"""NumPy archives: arrays x and y, or x_train, y_train, x_test, y_test, or others, one row an example."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from data import catalog, errors
from data.datasets.sources import columns, source

SUFFIX = ".npz"
DEFAULT_LABEL = "y"
_TASK_BYTES = 16 << 20
_TASK_ROWS = 8192
_IMAGE_RANK = 3  # [N, H, W]: grey images, stored as [H, W, 1]

# Split, and the arrays of some rows by name.
_Task: TypeAlias = "tuple[str | None, dict[str, np.ndarray]]"


class Npz(source.Source):
    """Arrays are stored raw (as bytes of one length), real numbers as float32, whole ones as int32 where all fit.

    Examples are named by the array `key`, else by a hash of their content.
    """

    KIND = "NumPy archive"
    OPTIONS = frozenset({"label", "label_kind", "key", "exclude"})

    def __init__(self, path: str, options: source.Options):
        """Reads the arrays once.

        Raises:
          DataError: no archive, arrays that are missing, differ in length, or hold what cannot be stored.
        """
        self.path = path
        self.fingerprint = source.fingerprint([(epath.Path(path).name, epath.Path(path).stat().length)])
        self._label = options.label or DEFAULT_LABEL
        self._key = options.key
        self.unique_keys = options.key is not None
        self._exclude = options.exclude
        by_split = self._load()
        self.own_splits = tuple(sorted(split for split in by_split if split is not None))
        _check_alike(path, by_split)
        self.num_examples = sum(len(arrays[self._label]) for arrays in by_split.values())
        self.features: dict[str, Any] = {}
        self._images: list[str] = []
        for name in next(iter(by_split.values())):
            arrays = [named[name] for named in by_split.values()]
            if name == self._label:
                self.features[name] = _label_feature(name, arrays, options.label_kind)
            elif name != self._key:
                self.features[name] = self._input_feature(name, arrays)
        inputs = [name for name in self.features if name != self._label]
        if not inputs:
            raise errors.DataError(f"{path} has no input array beside the label {self._label!r}. Add one.")
        self.supervised_keys = source.inputs_and_label(inputs, self._label)

    def pieces(self) -> Iterable[str]:
        """The file: its arrays are compressed whole."""
        return [self.path]

    def open(self, piece: str) -> Iterator[_Task]:
        """Some rows of all arrays."""
        for split, arrays in self._load().items():
            size = len(arrays[self._label])
            row_bytes = sum(array[:1].nbytes for array in arrays.values())
            rows = max(1, min(_TASK_ROWS, _TASK_BYTES // max(1, row_bytes)))
            for start in range(0, size, rows):
                yield split, {name: array[start : start + rows] for name, array in arrays.items()}

    def examples(self, task: _Task) -> Iterator[source.Example]:
        """One for each row."""
        split, arrays = task
        names = list(self.features)
        for row in range(len(arrays[self._label])):
            key = (
                str(arrays[self._key][row]) if self._key else _content_key({name: arrays[name][row] for name in names})
            )
            yield split, key, {name: self._value(name, arrays[name][row]) for name in names}

    def _value(self, name: str, value: Any) -> Any:
        if name in self._images:
            return value[..., np.newaxis]  # [H, W, 1] uint8
        if isinstance(self.features[name], tfds.features.ClassLabel):
            return str(value)
        return value.astype(self.features[name].np_dtype)

    def _load(self) -> dict[str | None, dict[str, np.ndarray]]:
        """Arrays by split (None where the file has no splits) and name without the split."""
        try:
            with epath.Path(self.path).open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (ValueError, BadZipFile, EOFError, AttributeError) as error:
            raise errors.DataError(f"{self.path} does not read as a NumPy archive of plain arrays: {error}") from error
        suffixes = "|".join(source.OWN_SPLITS)
        parts = {name: re.fullmatch(rf"(\w+)_({suffixes})", name) for name in arrays}
        has_splits = bool(arrays) and all(parts.values())
        found: dict[str | None, dict[str, np.ndarray]] = {} if has_splits else {None: arrays}
        for name, match in parts.items():
            if has_splits and match is not None:
                found.setdefault(source.OWN_SPLITS[match[2]], {})[match[1]] = arrays[name]
        there = list(next(iter(found.values())))
        for name in (self._label, *([self._key] if self._key else []), *self._exclude):
            if name not in there:
                raise errors.DataError(
                    f"{self.path} has no array {name!r}{catalog.nearest(name, there)}. It has: "
                    f"{', '.join(there) or 'none'}. Name the label by --label=ARRAY."
                )
        return {
            split: {name: array for name, array in named.items() if name not in self._exclude}
            for split, named in found.items()
        }

    def _input_feature(self, name: str, arrays: list[np.ndarray]) -> Any:
        first = arrays[0]
        if first.dtype.kind not in "biuf":
            raise errors.DataError(
                f"Array {name!r} of {self.path} is of type {first.dtype}, no number. Leave it out: --exclude={name}."
            )
        for array in arrays:
            _check_finite(self.path, name, array)
        shape = first.shape[1:]
        if len(first.shape) == _IMAGE_RANK and first.dtype == np.uint8:
            self._images.append(name)
            shape = (*shape, 1)
        dtype = _stored_dtype(arrays)
        if not shape:
            return tfds.features.Scalar(dtype)
        # Bytes of one length: a whole batch decodes in one operation.
        return tfds.features.Tensor(shape=shape, dtype=dtype, encoding=tfds.features.Encoding.BYTES)


def _check_alike(path: str, by_split: dict[str | None, dict[str, np.ndarray]]) -> None:
    """All splits have the same arrays of the same shapes, and all arrays of a split the same length."""
    first = next(iter(by_split.values()))
    for split, arrays in by_split.items():
        lengths = {name: array.shape[:1] for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or () in lengths.values() or (0,) in lengths.values():
            raise errors.DataError(
                f"The arrays of {path}{f' for {split}' if split else ''} must share the first dimension, examples. "
                f"Received: {', '.join(f'{name} {array.shape}' for name, array in arrays.items()) or 'no arrays'}."
            )
        shapes = {name: (array.shape[1:], array.dtype) for name, array in arrays.items()}
        if shapes != {name: (array.shape[1:], array.dtype) for name, array in first.items()}:
            raise errors.DataError(
                f"The splits of {path} differ in arrays, shapes or types: {', '.join(map(str, by_split))}. Mend one."
            )


def _check_finite(path: str, name: str, array: np.ndarray) -> None:
    if array.dtype.kind != "f":
        return
    rows = np.flatnonzero(~np.isfinite(array.astype(np.float32)).reshape(len(array), -1).all(axis=1))
    if len(rows):
        raise errors.DataError(
            f"Array {name!r} of {path} has NaN or infinity in {len(rows)} of {len(array)} rows, first in {rows[0]}. "
            "Mend them or leave the rows out."
        )


def _stored_dtype(arrays: list[np.ndarray]) -> Any:
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        return np.uint8
    if dtype.kind == "f":
        return np.float32
    if dtype.itemsize < np.dtype(np.int32).itemsize:
        return dtype.type
    bounds = np.iinfo(np.int32)
    fits = all(array.size == 0 or (array.min() >= bounds.min and array.max() <= bounds.max) for array in arrays)
    return np.int32 if fits else np.float32


def _label_feature(name: str, arrays: list[np.ndarray], kind: str | None) -> Any:
    first = arrays[0]
    if first.ndim != 1 or first.dtype.kind not in "biufU":
        raise errors.DataError(
            f"The label {name!r} must be one number or name for each example. Received: shape {first.shape}, "
            f"type {first.dtype}. Turn one-hot rows into class numbers: argmax(axis=1)."
        )
    if kind is None and first.dtype.kind in "iu":
        raise errors.DataError(
            f"The label {name!r} holds whole numbers, such as {first[0]}: "
            "classes or quantities? Say which: --label_kind=class or --label_kind=number."
        )
    if kind == "class" or (kind is None and first.dtype.kind in "bU"):
        return tfds.features.ClassLabel(names=columns.in_order({str(value) for a in arrays for value in np.unique(a)}))
    if first.dtype.kind == "U":
        raise errors.DataError(f"The label {name!r} is text, no number. Leave --label_kind=number out.")
    for array in arrays:
        _check_finite("the file", name, array)
    return tfds.features.Scalar(_stored_dtype(arrays))


def _content_key(row: dict[str, Any]) -> str:
    """A hash of names, shapes and values; not of types, which change as values grow."""
    digest = hashlib.md5()
    for name in sorted(row):
        value = np.asarray(row[name])
        content = str(value).encode() if value.dtype.kind == "U" else value.astype(np.float64).tobytes()
        digest.update(f"{name}\0{value.shape}\0".encode() + content)
    return digest.hexdigest()
