"""What every kind of source offers to those who write it down, and how a key chooses its split.

A source is cut twice, so that one machine and a Beam pipeline can share one code and write the same records:

    pieces() ──▶ open(piece) ──▶ examples(task) ──▶ (split, key, example)
    names, cheap   tasks, read      encoded in parallel

On one machine the main process opens pieces one after the other and worker processes turn tasks into records; in a Beam
pipeline the workers do both.
"""

import abc
import dataclasses
import hashlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from data import errors

# Split of the source's own (None: the key's hash decides), key, feature -> value.
Example: TypeAlias = "tuple[str | None, str, dict[str, Any]]"

# Names by which files and folders tell of their split, and what it is called here: the trainer's defaults find it then.
OWN_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

_SPLIT_NAME = re.compile(r"[a-zA-Z]\w*")
_HASH_BYTES = 8
# Fractions are typed in decimal: 0.7 + 0.2 + 0.1 is not exactly 1 in binary.
_SUM_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Splits:
    """Fractions of the examples by split, in order: an example's place in [0, 1) is a hash of its key alone.

    So it never moves while the fractions stay, whatever is added, removed or reordered around it.
    """

    fractions: tuple[tuple[str, float], ...] = (("train", 0.8), ("validation", 0.1), ("test", 0.1))

    @classmethod
    def parse(cls, text: str) -> "Splits":
        """From "train=0.8,validation=0.1,test=0.1".

        Raises:
          DataError: not of this form, names twice, or fractions that do not add up to 1.
        """
        remedy = f"Write it like --splits=train=0.8,validation=0.1,test=0.1. Received: --splits={text}."
        try:
            fractions = tuple((part.split("=")[0].strip(), float(part.split("=")[1])) for part in text.split(","))
        except (IndexError, ValueError) as error:
            raise errors.DataError(f"Splits are NAME=FRACTION, joined by commas. {remedy}") from error
        names = [name for name, _ in fractions]
        for name in names:
            if not _SPLIT_NAME.fullmatch(name) or name == "all" or names.count(name) > 1:
                raise errors.DataError(f"{name!r} is no name for a split, or stands twice ('all' is TFDS's). {remedy}")
        total = sum(fraction for _, fraction in fractions)
        if min(fraction for _, fraction in fractions) <= 0 or not abs(total - 1) < _SUM_TOLERANCE:
            raise errors.DataError(f"Fractions must be above 0 and add up to 1, these to {total:g}. {remedy}")
        return cls(fractions)

    @property
    def names(self) -> tuple[str, ...]:
        """The splits, in order."""
        return tuple(name for name, _ in self.fractions)

    def of(self, key: str) -> str:
        """The split of the example with this key."""
        # A salt of its own: TFDS orders a split's records by the MD5 of split name and key.
        digest = hashlib.md5(b"data.build split\0" + key.encode()).digest()
        place = int.from_bytes(digest[:_HASH_BYTES], "big") / 2 ** (8 * _HASH_BYTES)
        end = 0.0
        for name, fraction in self.fractions:
            end += fraction
            if place < end:
                return name
        return self.fractions[-1][0]  # rounding: the ends add up to a little less than 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line may say of a source; each kind takes some of them (`Source.OPTIONS`).

    label: the column or array to predict.
    label_kind: "class" or "number"; needed where integers could be either.
    key: the column or array that names an example; else its content does.
    categorical: columns to read as names, though they look like numbers.
    exclude: columns or arrays to leave out.
    missing: "error" or "drop": what to do with a row that lacks a value.
    channels: of images, 1 or 3.
    """

    label: str | None = None
    label_kind: str | None = None
    key: str | None = None
    categorical: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    missing: str = "error"
    channels: int = 3


class Source(abc.ABC):
    """A raw source, looked through once: its features are known. Instances travel to worker processes.

    path: where it is.
    features: name -> tfds.features.FeatureConnector.
    supervised_keys: (input or tuple of inputs, label).
    own_splits: names of the splits it comes with; empty where the hash of the key decides.
    num_examples: how many it has, before any are left out; None where only reading all of it would tell.
    unique_keys: False where keys are hashes of content, so that equal examples share one.
    fingerprint: another one when files are added, removed or change size.
    notes: what a user should know of how it was read, a sentence each.
    files: name -> content of what is kept beside the records.
    """

    KIND: str
    OPTIONS: frozenset[str]
    OPTIONS_TYPE: type[Options] = Options

    path: str
    features: Mapping[str, Any]
    supervised_keys: tuple[Any, str]
    own_splits: tuple[str, ...] = ()
    num_examples: int | None
    unique_keys: bool = True
    fingerprint: str
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = types.MappingProxyType({})

    @abc.abstractmethod
    def pieces(self) -> Iterable[Any]:
        """Small, picklable names of the source's parts."""

    @abc.abstractmethod
    def open(self, piece: Any) -> Iterator[Any]:
        """The tasks in a piece: picklable, each of some megabytes at most."""

    @abc.abstractmethod
    def examples(self, task: Any) -> Iterator[Example]:
        """The examples in a task.

        Raises:
          DataError: data that is damaged; says where.
        """

    def records(self, task: Any, split_of: Callable[[str], str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(split, key, what is stored) of a task: each example for itself, unless a source makes records of several.

        Args:
          task: from `open`.
          split_of: chooses the split of a key, where the source has none of its own.
        """
        for split, key, example in self.examples(task):
            yield split or split_of(key), key, example

    def remark(self, directory: str) -> str:
        """What a user should know of the records now in `directory`, a sentence, or nothing."""
        return ""


def inputs_and_label(inputs: Sequence[str], label: str) -> tuple[Any, str]:
    """supervised_keys: a single input stands for itself, several become a dict of inputs by name."""
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), label


def own_split(name: str) -> str | None:
    """The split that a file or folder name tells of: "val", "train-00001-of-00002.parquet"; else None."""
    first = re.split(r"[-_.]", name)[0].lower()
    return OWN_SPLITS[first] if first in OWN_SPLITS else None


def fingerprint(files: Iterable[tuple[str, int]]) -> str:
    """Hash of names and sizes in bytes: not of times, which a copy changes, and not of content, which takes a read."""
    listing = "".join(f"{name}\0{size}\n" for name, size in sorted(files))
    return hashlib.md5(listing.encode()).hexdigest()
