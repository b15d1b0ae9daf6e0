"""CSV and Parquet: one row is one example, one column the label, the others the inputs."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from etils import epath

from data import catalog, errors
from data.datasets.sources import columns, source

SUFFIXES = (".csv", ".parquet")
DEFAULT_LABEL = "label"
# Rows in a task. TFDS serializes some 10,000 rows a second: a second of work, a megabyte of memory.
_TASK_ROWS = 8192
# A row must fit into a block.
_CSV_BLOCK_BYTES = 16 << 20
_MISSING_TEXTS = ["", "#N/A", "N/A", "NA", "NaN", "nan", "NULL", "null", "None"]

# File, and row group of a Parquet file.
_Piece: TypeAlias = "tuple[str, int | None]"


class Table(source.Source):
    """A file, or a directory of files with the same columns; train.csv and test.csv in one are splits.

    Numbers become float32, or int32 where all of a column are whole and fit; text becomes the id of its name in the
    sorted vocabulary of the whole source; true and false become 1 and 0. The key column is no input.
    """

    KIND = "table"
    OPTIONS = frozenset({"label", "label_kind", "key", "categorical", "exclude", "missing"})

    def __init__(self, path: str, options: source.Options):
        """Reads the table once, for types, vocabularies and missing values.

        Raises:
          DataError: columns that are not there, differ between files, mix numbers and text, or lack values.
        """
        self.path = path
        self._files, sizes = _files(path)
        self.fingerprint = source.fingerprint(sizes)
        self._splits = {file: source.own_split(os.path.basename(file)) for file in self._files}
        if all(self._splits.values()):
            self.own_splits = tuple(sorted({split for split in self._splits.values() if split}))
        else:
            self._splits = dict.fromkeys(self._files)
        self._key = options.key
        self.unique_keys = options.key is not None
        self._label = options.label or DEFAULT_LABEL
        self._names = self._choose_columns(options)
        self._drop = options.missing == "drop"
        found = self._look(options)
        self._kinds = {name: column.kind for name, column in found.items()}
        self.features = {name: column.feature() for name, column in found.items()}
        self.supervised_keys = source.inputs_and_label(
            [name for name in self._names if name != self._label], self._label
        )

    def pieces(self) -> Iterable[_Piece]:
        """Files; of Parquet, row groups."""
        for file in self._files:
            if file.endswith(".parquet"):
                with _open(file) as stream:
                    groups = pq.ParquetFile(stream).num_row_groups
                yield from ((file, group) for group in range(groups))
            else:
                yield file, None

    def open(self, piece: _Piece) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        """(split, rows)."""
        file, _ = piece
        for batch in _batches(piece, self._all_names()):
            yield self._splits[file], batch

    def examples(self, task: tuple[str | None, pa.RecordBatch]) -> Iterator[source.Example]:
        """One for each row, but those dropped for a missing value."""
        split, batch = task
        if self._drop:
            there = [columns.present(batch[name]) for name in self._all_names()]
            for mask in there[1:]:
                there[0] = pc.and_(there[0], mask)
            batch = batch.filter(there[0])
        values = {name: self._values(name, batch[name]) for name in self._names}
        keys = columns.names(batch[self._key]).to_pylist() if self._key else _content_keys(values)
        for key, *row in zip(keys, *values.values(), strict=True):
            yield split, key, dict(zip(values, row, strict=True))

    def _values(self, name: str, values: pa.Array) -> list[Any]:
        if self._kinds[name] == "number":
            return columns.numbers(values).to_pylist()
        if self._kinds[name] == "boolean":
            return values.cast(pa.uint8()).to_pylist()
        return columns.names(values).to_pylist()

    def _all_names(self) -> list[str]:
        return [*self._names, self._key] if self._key else self._names

    def _choose_columns(self, options: source.Options) -> list[str]:
        """The columns to store, in the order of the first file, once all named ones are known to be there."""
        there = _column_names(self._files[0])
        for file in self._files[1:]:
            if set(_column_names(file)) != set(there):
                odd = sorted(set(_column_names(file)) ^ set(there))
                raise errors.DataError(f"{file} and {self._files[0]} differ in columns: {', '.join(odd)}. Mend one.")
        named = {"label": [self._label], "key": [options.key] if options.key else []}
        named |= {"categorical": list(options.categorical), "exclude": list(options.exclude)}
        for option, names in named.items():
            for name in names:
                if name not in there:
                    raise errors.DataError(
                        f"{self.path} has no column {name!r}{catalog.nearest(name, there)}. "
                        f"It has: {', '.join(there)}. Name another: --{option}=COLUMN."
                    )
        if self._label in (*options.exclude, options.key):
            raise errors.DataError(f"The label, {self._label!r}, can be neither left out nor the key. Name another.")
        names = [name for name in there if name not in options.exclude and name != options.key]
        if len(names) < 2:
            raise errors.DataError(f"{self.path} has no input column beside the label {self._label!r}. Give it one.")
        return names

    def _look(self, options: source.Options) -> dict[str, columns.Column]:
        """One pass over all rows."""
        untyped = self._files[0].endswith(".csv")
        as_names = {*options.categorical, *([self._label] if options.label_kind == "class" else [])}
        found = {name: columns.Column(name, untyped, name in as_names) for name in self._names}
        rows = lacking = 0
        for piece in self.pieces() if untyped else ((file, None) for file in self._files):
            row = 1
            for batch in _batches(piece, self._all_names()):
                for name, column in found.items():
                    column.look(batch[name], piece[0], row)
                there = pa.array([True] * len(batch))
                for name in self._all_names():
                    there = pc.and_(there, columns.present(batch[name]))
                lacking += len(batch) - pc.sum(there).as_py()
                row += len(batch)
            rows += row - 1
        if not rows:
            raise errors.DataError(f"{self.path} has no rows: {len(self._files)} files with nothing but a header.")
        self.num_examples = rows
        self._check_missing(found, rows, lacking)
        _check_label(found[self._label], options.label_kind)
        return found

    def _check_missing(self, found: dict[str, columns.Column], rows: int, lacking: int) -> None:
        if not lacking:
            return
        if self._drop and lacking < rows:
            self.notes = (f"{lacking} of {rows} rows are left out, because they lack a value (--missing=drop).",)
            return
        lacks = [f"{column.name} ({column.missing}, first in {column.first_missing})" for column in found.values()
                 if column.missing]  # fmt: skip
        raise errors.DataError(
            f"{lacking} of {rows} rows lack a value (empty, NaN or infinite): "
            f"{', '.join(lacks) or f'the key {self._key}'}. Fill them in, leave the rows out (--missing=drop) or "
            "leave the column out (--exclude=COLUMN)."
        )


def _check_label(column: columns.Column, kind: str | None) -> None:
    if kind == "number" and column.kind == "category":
        raise errors.DataError(f"The label {column.name!r} is text, no number. Leave --label_kind=number out.")
    if kind is None and column.kind == "boolean":
        column.categorical, column.kind, column.names = True, "category", {"false", "true"}
    if kind is None and column.kind == "number" and column.whole:
        raise errors.DataError(
            f"The label {column.name!r} holds whole numbers, {column.low:g} to {column.high:g}: classes or quantities? "
            "Say which: --label_kind=class or --label_kind=number."
        )


def _files(path: str) -> tuple[list[str], list[tuple[str, int]]]:
    """The files of a table in order of their names, and (name, bytes) of each."""
    place = epath.Path(path)
    if not place.is_dir():
        return [path], [(place.name, place.stat().length)]
    found = sorted((file for file in place.iterdir() if file.name.endswith(SUFFIXES)), key=lambda file: file.name)
    if len({file.suffix for file in found}) > 1:
        raise errors.DataError(f"{path} holds both CSV and Parquet files. Keep one kind, or name a single file.")
    return [os.fspath(file) for file in found], [(file.name, file.stat().length) for file in found]


def _open(path: str) -> pa.NativeFile:
    if not catalog.is_remote(path):
        return pa.OSFile(path)
    from data import objects

    # Not by Arrow's own client for gs://, which takes credentials and proxies of its own.
    return pa.PythonFile(objects.open_seekable(path), mode="r")


def _column_names(file: str) -> list[str]:
    if file.endswith(".csv"):
        names = _csv(file, []).schema.names
    else:
        try:
            with _open(file) as stream:
                names = pq.read_schema(stream).names
        except pa.ArrowInvalid as error:
            raise errors.DataError(f"{file} does not read as Parquet: {error}. Mend it.") from error
    twice = sorted({name for name in names if names.count(name) > 1 or not name})
    if twice:
        raise errors.DataError(f"{file} has columns without a name of their own: {twice}. Rename them.")
    return list(names)


def _csv(file: str, names: list[str]) -> pa.csv.CSVStreamingReader:
    """Reads all columns named as text: types guessed from the first block would fail in a later one."""
    try:
        return pa.csv.open_csv(
            _open(file),
            # One thread: errors then name the row.
            read_options=pa.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False),
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=names,
                null_values=_MISSING_TEXTS,
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        raise errors.DataError(f"{file} does not read as CSV: {error}. Mend it.") from error


def _batches(piece: _Piece, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Rows of some columns, at most `_TASK_ROWS` at a time."""
    file, group = piece
    try:
        if file.endswith(".csv"):
            for block in _csv(file, names):
                yield from (block.slice(start, _TASK_ROWS) for start in range(0, len(block), _TASK_ROWS))
        else:
            with _open(file) as stream:
                groups = None if group is None else [group]
                yield from pq.ParquetFile(stream).iter_batches(_TASK_ROWS, row_groups=groups, columns=names)
    except pa.ArrowInvalid as error:
        raise errors.DataError(f"{file} cannot be read: {error}. Mend it.") from error


def _content_keys(values: dict[str, list[Any]]) -> Iterator[str]:
    """A hash of each row's content; of its text, not of ids, which change when the vocabulary grows."""
    names = sorted(values)
    for row in zip(*(values[name] for name in names), strict=True):
        text = "\0".join(f"{name}\0{columns.canonical(value)}" for name, value in zip(names, row, strict=True))
        yield hashlib.md5(text.encode()).hexdigest()
