"""Texts: .txt (a file is a document), .jsonl and .parquet (a line or row is one), as tokens for a language model.

With --label each document is an example of its own instead, with a class. Files or folders called train, validation or
test are splits; else a hash of each document's text chooses its split, before documents are packed.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from data import catalog, errors, tokenizer
from data.datasets.sources import columns, source, tokens

# What no other kind of source reads.
OWN_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".json.gz")
SUFFIXES = (*OWN_SUFFIXES, ".parquet")
DEFAULT_TEXT = "text"
# Bytes of text in a task: what is packed together. The last bins of each are not full, one in a thousand or so.
_TASK_BYTES = 4 << 20
_BATCH_ROWS = 1024

# A text and its class, "" where there is none.
Document: TypeAlias = "tuple[str, str]"
# The split that the files tell of, and the files.
_Piece: TypeAlias = "tuple[str | None, tuple[str, ...]]"


@dataclasses.dataclass(frozen=True)
class Options(source.Options):
    """What the command line may say of texts.

    tokenizer: "bytes" or the path of a SentencePiece model.
    sequence_length: tokens of a record.
    text: field or column of the texts.
    """

    tokenizer: str | None = None
    sequence_length: int | None = None
    text: str = DEFAULT_TEXT


class Text(source.Source):
    """A file, or a directory with files of one kind, in it or in its folders."""

    KIND = "text"
    OPTIONS = frozenset({"tokenizer", "sequence_length", "text", "label"})
    OPTIONS_TYPE = Options
    unique_keys = False
    num_examples = None

    def __init__(self, path: str, options: Options):
        """Finds the files; with a label, reads them once for the names of the classes.

        Raises:
          DataError: no tokenizer, one that does not fit, no files, or documents that do not read.
        """
        if options.tokenizer is None or options.sequence_length is None or options.sequence_length < 1:
            raise errors.DataError(
                f"{path} holds texts: say what their tokens are and how many make a record, --tokenizer=bytes (or "
                f"FILE.model) --sequence_length=256. Received: tokenizer {options.tokenizer}, sequence_length "
                f"{options.sequence_length}."
            )
        self.path = path
        self._text, self._label = options.text, options.label
        self._tokenizer = tokenizer.load(options.tokenizer)
        tokens.check(self._tokenizer, options.tokenizer, packs=self._label is None)
        self._layout = tokens.Layout(options.sequence_length, self._tokenizer.vocabulary)
        self.files = self._tokenizer.files
        self._sizes, self._splits = _files(path)
        kinds = {_suffix(file) for file in self._sizes}
        if len(kinds) > 1 or (kinds == {".txt"} and (self._label or self._text != DEFAULT_TEXT)):
            raise errors.DataError(
                f"Texts come from files of one kind, and .txt has no fields. Received: {', '.join(sorted(kinds))}, "
                f"text {self._text}, label {self._label}."
            )
        if all(self._splits.values()):
            self.own_splits = tuple(sorted({split for split in self._splits.values() if split}))
        else:
            self._splits = dict.fromkeys(self._splits)
        listing = [(os.path.relpath(file, path), size) for file, size in self._sizes.items()]
        models = [(name, len(content)) for name, content in self.files.items()]
        self.fingerprint = source.fingerprint([*listing, *models])
        self._describe()

    def _describe(self) -> None:
        if self._label is None:
            self.features = self._layout.packed_features()
            self.supervised_keys = tokens.PACKED_KEYS
            return
        names = {name for file in self._sizes for _, name in self._documents(file)}
        self.features = self._layout.classified_features(columns.in_order(names))
        self.supervised_keys = tokens.CLASSIFIED_KEYS

    def pieces(self) -> Iterable[_Piece]:
        """Files; small ones of one split together."""
        of_split: dict[str | None, list[str]] = {}
        for file, split in self._splits.items():
            of_split.setdefault(split, []).append(file)
        for split, files in of_split.items():
            chosen: list[str] = []
            for file in files:
                chosen.append(file)
                if sum(self._sizes[each] for each in chosen) >= _TASK_BYTES:
                    yield split, tuple(chosen)
                    chosen = []
            if chosen:
                yield split, tuple(chosen)

    def open(self, piece: _Piece) -> Iterator[tuple[str | None, list[Document]]]:
        """(split, documents)."""
        split, files = piece
        task: list[Document] = []
        size = 0
        for document in itertools.chain.from_iterable(map(self._documents, files)):
            task.append(document)
            size += len(document[0])
            if size >= _TASK_BYTES:
                yield split, task
                task, size = [], 0
        if task:
            yield split, task

    def examples(self, task: tuple[str | None, list[Document]]) -> Iterator[source.Example]:
        """One for each document, as `records` does of documents with a class."""
        split, documents = task
        for text, name in documents:
            ids = self._tokenizer.encode(text)
            if self._label is None:
                yield split, _key(text), {tokens.TOKENS: ids}
            elif len(ids):
                yield split, _key(name, text), self._layout.classified(ids, name)
            else:
                raise errors.DataError(f"{self.path} has a text of class {name!r} without any token. Leave it out.")

    def records(
        self, task: tuple[str | None, list[Document]], split_of: Callable[[str], str]
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Documents packed, those of each split together; of documents with a class one each."""
        if self._label is not None:
            yield from super().records(task, split_of)
            return
        if self._tokenizer.end is None:
            raise ValueError("checked when the source was made")
        by_split: dict[str, list[np.ndarray]] = {}
        for split, key, document in self.examples(task):
            by_split.setdefault(split or split_of(key), []).append(document[tokens.TOKENS])
        for split, documents in by_split.items():
            for record in self._layout.packed(documents, self._tokenizer.end):
                yield split, hashlib.md5(record[tokens.TOKENS].tobytes()).hexdigest(), record

    def remark(self, directory: str) -> str:
        """How full the records are: of the first shard of a split, in which a hash has put any of them."""
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(directory)
        split = next(iter(builder.info.splits))
        count = builder.info.splits[split].shard_lengths[0]
        rows = builder.as_dataset(split=f"{split}[:{count}]")
        filled = tokens.fill(tfds.as_numpy(rows))
        return f"Of {count} records of {split}, {100 * filled:.1f} % of the positions hold a token."

    def _documents(self, file: str) -> Iterator[Document]:
        suffix = _suffix(file)
        try:
            if suffix == ".txt":
                yield epath.Path(file).read_bytes().decode(), ""
            elif suffix == ".parquet":
                yield from self._rows(file)
            else:
                yield from self._lines(file)
        except UnicodeDecodeError as error:
            raise errors.DataError(f"{file} is not UTF-8: {error}. Convert it.") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise errors.DataError(f"{file} does not read as gzip: {error}. Fetch it again.") from error

    def _lines(self, file: str) -> Iterator[Document]:
        packed = file.endswith(".gz")
        with epath.Path(file).open("rb") as raw, gzip.open(raw) if packed else contextlib.nullcontext(raw) as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError as error:
                    raise errors.DataError(f"Line {number} of {file} is no JSON: {error}. Mend it.") from error
                yield self._document(fields if isinstance(fields, dict) else {}, f"Line {number} of {file}")

    def _rows(self, file: str) -> Iterator[Document]:
        names = [self._text, *([self._label] if self._label else [])]
        try:
            with pa.OSFile(file) if not catalog.is_remote(file) else epath.Path(file).open("rb") as stream:
                table = pq.ParquetFile(stream)
                names = [name for name in names if name in table.schema_arrow.names]
                row = 0
                for batch in table.iter_batches(_BATCH_ROWS, columns=names):
                    for fields in batch.to_pylist():
                        row += 1
                        yield self._document(fields, f"Row {row} of {file}")
        except pa.ArrowInvalid as error:
            raise errors.DataError(f"{file} does not read as Parquet: {error}. Mend it.") from error

    def _document(self, fields: dict[str, Any], where: str) -> Document:
        for name, kinds, option in ((self._text, (str,), "text"), (self._label, (str, int), "label")):
            if name is not None and not (name in fields and isinstance(fields[name], kinds)):
                guess = "" if name in fields else catalog.nearest(name, list(fields))
                found = repr(fields[name]) if name in fields else ", ".join(fields) or "no fields"
                raise errors.DataError(
                    f"{where} has no {option} in a field {name!r}{guess}. Mend it, or name another: --{option}=FIELD. "
                    f"Received: {found}."
                )
        document = fields[self._text], str(fields[self._label]) if self._label else ""
        try:
            "".join(document).encode()  # JSON may hold what is no character: half of a pair such as \\ud83d
        except UnicodeEncodeError as error:
            raise errors.DataError(f"{where} holds what UTF-8 cannot: {error}. Mend it.") from error
        return document


def _files(path: str) -> tuple[dict[str, int], dict[str, str | None]]:
    """Size in bytes of each file, and the split that its name or its folder's tells of."""
    place = epath.Path(path)
    there = [*place.glob("*"), *place.glob("*/*")] if place.is_dir() else [place]
    found = sorted(os.fspath(file) for file in there if file.name.endswith(SUFFIXES))
    if not found:
        raise errors.DataError(f"{path} holds no texts: no file there ends with {', '.join(SUFFIXES)}.")
    if not place.is_dir():
        return {path: place.stat().length}, {path: None}
    splits = {}
    for file in found:
        folder, *rest = os.path.relpath(file, path).split(os.sep)
        splits[file] = source.own_split(folder) if rest else source.own_split(os.path.basename(file))
    return {file: epath.Path(file).stat().length for file in found}, splits


def _suffix(file: str) -> str:
    """ ".txt", ".parquet" or ".jsonl", be it compressed or not."""
    return next((suffix for suffix in (".txt", ".parquet") if file.endswith(suffix)), ".jsonl")


def _key(*texts: str) -> str:
    return hashlib.md5("\0".join(texts).encode()).hexdigest()
