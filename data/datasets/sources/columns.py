"""What a column of a table holds: found out in one pass over its values, then turned into a feature."""

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow_datasets as tfds

from data import errors

# A text column with more values than this is no category.
MAX_CATEGORIES = 100_000
_INTEGER = r"^[+-]?\d{1,18}$"  # 18 digits always fit int64
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_INT32 = np.iinfo(np.int32)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass
class Column:
    """What has been seen of a column.

    name: of the column.
    untyped: it comes from CSV, where all is text: what can be read as a number is one.
    categorical: values are names, even if they look like numbers.
    kind: "number", "category" or "boolean"; None before the first value.
    evidence: where the first value stands, and what it is.
    missing: rows without a value: null, empty text, NaN, infinite or beyond float32.
    first_missing: where the first of them stands.
    whole: all numbers are integers; `low` and `high` bound them.
    names: the values of a category.
    """

    name: str
    untyped: bool
    categorical: bool
    kind: str | None = None
    evidence: str = ""
    missing: int = 0
    first_missing: str = ""
    whole: bool = True
    low: float = np.inf
    high: float = -np.inf
    names: set[str] = dataclasses.field(default_factory=set)

    def look(self, values: pa.Array, path: str, row: int) -> None:
        """Takes note of more values; the first of them stands in row `row` (from 1, without a header) of `path`.

        Raises:
          DataError: a type that is neither number nor text, numbers among text, or too many different names.
        """
        values = _plain(self.name, values)
        there = present(values)
        if absent := len(values) - pc.sum(there, min_count=0).as_py():
            self.missing += absent
            self.first_missing = self.first_missing or f"row {row + pc.index(there, False).as_py()} of {path}"
            if absent == len(values):
                return
        if self.untyped and not self.categorical:
            self._look_at_untyped(values, there, path, row)
        else:
            typed = "boolean" if pa.types.is_boolean(values.type) else "number"
            self.kind = "category" if self.categorical or pa.types.is_string(values.type) else typed
        values = values.filter(there)
        if self.kind == "number":
            bounds = pc.min_max(numbers(values)).as_py()
            self.whole = self.whole and _are_whole(values)
            self.low, self.high = min(self.low, bounds["min"]), max(self.high, bounds["max"])
            if max(-self.low, self.high) > _FLOAT32_MAX:
                raise errors.DataError(
                    f"Column {self.name!r} has a number beyond float32, {max(-self.low, self.high):g}, in row {row} of "
                    f"{path} or later. Mend it, or leave the column out (--exclude={self.name})."
                )
        elif self.kind == "category":
            self.names.update(pc.unique(values.cast(pa.string())).to_pylist())
            if len(self.names) > MAX_CATEGORIES:
                raise errors.DataError(
                    f"Column {self.name!r} has more than {MAX_CATEGORIES} different values, which is no category. "
                    f"Leave it out (--exclude={self.name}) or name the rows by it (--key={self.name})."
                )

    def _look_at_untyped(self, texts: pa.Array, there: pa.Array, path: str, row: int) -> None:
        """Decides by the first value whether the column is of numbers; all others have to be the same."""
        numeric = pc.match_substring_regex(pc.utf8_trim_whitespace(texts), _NUMBER)
        if self.kind is None:
            first = pc.index(there, True).as_py()
            self.kind = "number" if numeric[first].as_py() else "category"
            self.evidence = f"{texts[first].as_py()!r} in row {row + first} of {path}"
        other = pc.and_(there, pc.invert(numeric) if self.kind == "number" else numeric)
        if pc.any(other).as_py():
            index = pc.index(other, True).as_py()
            found = "text" if self.kind == "number" else "the number"
            raise errors.DataError(
                f"Column {self.name!r} mixes numbers and text: {found} {texts[index].as_py()!r} in row {row + index} "
                f"of {path}, after {self.evidence}. Mend the row, or read all of the column as names: "
                f"--categorical={self.name} (of a label: --label_kind=class)."
            )

    def feature(self) -> Any:
        """The TFDS feature it is stored as: float32, int32 where all fits, uint8 for false and true, or names.

        Raises:
          DataError: it has no value at all.
        """
        if self.kind is None:
            raise errors.DataError(
                f"Column {self.name!r} has no value in any row. Leave it out: --exclude={self.name}."
            )
        if self.kind == "boolean":
            return tfds.features.Scalar(np.uint8)
        if self.kind == "category":
            return tfds.features.ClassLabel(names=in_order(self.names))
        fits = self.whole and self.low >= _INT32.min and self.high <= _INT32.max
        return tfds.features.Scalar(np.int32 if fits else np.float32)


def in_order(names: set[str]) -> list[str]:
    """The names of classes, whose places are their ids; whole numbers by value, so that 0..n-1 keep theirs."""
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def present(values: pa.Array) -> pa.Array:
    """[n] bool: which values are there, as `Column.missing` tells."""
    values = _plain("", values)
    if pa.types.is_string(values.type):
        there = pc.not_equal(values, "")
    elif pa.types.is_floating(values.type):
        there = pc.less_equal(pc.abs(values), _FLOAT32_MAX)  # false for NaN
    else:
        there = pc.is_valid(values)
    return pc.fill_null(there, False)


def numbers(values: pa.Array) -> pa.Array:
    """Values of a number column as int64 where all are whole, else float64; text is read."""
    values = _plain("", values)
    if pa.types.is_string(values.type):
        values = pc.utf8_trim_whitespace(values)
        return values.cast(pa.int64() if _are_whole(values) else pa.float64())
    return values


def names(values: pa.Array) -> pa.Array:
    """Values of a category as text."""
    return _plain("", values).cast(pa.string())


def canonical(value: Any) -> str:
    """A value as text that does not change when its column turns from int to float, as it does when 2.5 is added."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, str | int) else repr(value)


def _are_whole(values: pa.Array) -> bool:
    if pa.types.is_string(values.type):
        return bool(pc.all(pc.match_substring_regex(pc.utf8_trim_whitespace(values), _INTEGER)).as_py())
    return bool(pa.types.is_integer(values.type))


def _plain(name: str, values: pa.Array) -> pa.Array:
    """Without dictionaries and rare types: bool, int64, float64 or string."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    if pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return values
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return values.cast(pa.string())
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return values.cast(pa.int64())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or kind == pa.uint64():
        return values.cast(pa.float64(), safe=False)
    raise errors.DataError(
        f"Column {name!r} is of type {kind}, neither number nor text. Leave it out: --exclude={name}, or convert it."
    )
