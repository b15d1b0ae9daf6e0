"""Writes a source's records as shards, in parallel, in the order and the cuts that TFDS's own writer gives them.

TFDS encodes, serializes and writes in one thread, and for rows of a table six sevenths of the work are in encoding and
serializing (scripts/bench_build.py). Here worker processes do both halves of it, and the main process next to nothing:

1. Each task's records are serialized, sorted by the hash of their key and written to one file, a run.
2. All hashes together give each shard its records: by TFDS's order and boundaries. A shard's records lie side by side
   in each run, so its worker reads one stretch of each run and merges them. CRCs are copied, not computed again.

The bytes are the same as those of TFDS's writer, whatever the number of workers (a test holds this).
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core import example_serializer, naming
from tensorflow_datasets.core.utils import shard_utils
from tqdm import tqdm

from data import errors, processes
from data.datasets.sources import source as sources

MIB = 1 << 20
DEFAULT_SHARD_MIB = 128
# Small splits get this many, where each has some records: training reads 8 files at a time (records.MAX_STREAMS).
_USUAL_SHARDS = 8
_RECORDS_IN_SMALL_SHARD = 16
# Bytes that TFRecord adds to each record: its length, the length's CRC before it and its own CRC after it.
FRAME_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Shards(shard_utils.ShardConfig):
    """How many shards a split gets: a power of two, as TPU slices have hosts, so that all hosts have equally many.

    TFDS 4.9.10 takes min_shard_size and max_shard_size and ignores them: its rule is a class method.

    num_shards: this many, or None to reckon them.
    shard_mib: size in MiB that no shard should exceed; most have between half of it and all.
    """

    shard_mib: float = DEFAULT_SHARD_MIB

    def get_number_shards(self, total_size: int, num_examples: int, uses_precise_sharding: bool = True) -> int:
        """The number of files for records of `total_size` bytes (without frames)."""
        del uses_precise_sharding  # the target is no limit
        if self.num_shards:
            return self.num_shards
        by_size = -(-(total_size + num_examples * FRAME_BYTES) // (self.shard_mib * MIB))
        wanted = int(max(by_size, min(_USUAL_SHARDS, num_examples // _RECORDS_IN_SMALL_SHARD), 1))
        return min(1 << (wanted - 1).bit_length(), 1 << (num_examples.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class Run:
    """One file of framed records, in order of split, then hash.

    splits: [n] uint8, places of the splits in `Encoder.splits`.
    high, low: [n] uint64, the two halves of the MD5 of split and key.
    sizes: [n] int64, bytes of each record with its frame.
    """

    path: str
    splits: np.ndarray
    high: np.ndarray
    low: np.ndarray
    sizes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Encoder:
    """From a task to a run. Travels to the workers once.

    source: whose tasks they are.
    fractions: what chooses a split where the source has none.
    directory: where runs are written.
    """

    source: sources.Source
    fractions: sources.Splits
    directory: str

    @property
    def splits(self) -> tuple[str, ...]:
        """All splits there may be."""
        return self.source.own_splits or self.fractions.names

    def keyed(self, task: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(split, key, example) of a task."""
        yield from self.source.records(task, self.fractions.of)

    def records(self, task: Any) -> Iterator[tuple[str, str, bytes]]:
        """(split, key, serialized record) of a task."""
        features = tfds.features.FeaturesDict(dict(self.source.features))
        serializer = example_serializer.ExampleSerializer(features.get_serialized_info())
        for split, key, example in self.keyed(task):
            proto = serializer.get_tf_example(features.encode_example(example))
            # TFDS leaves the order of the features in a record to protobuf, where it changes from process to process.
            yield split, key, proto.SerializeToString(deterministic=True)

    def spill(self, number: int, task: Any) -> Run:
        """Writes one run."""
        rows = [(self.splits.index(split), key_hash(split, key), record) for split, key, record in self.records(task)]
        rows.sort(key=lambda row: row[:2])
        path = os.path.join(self.directory, f"run-{number:06d}")
        with tf.io.TFRecordWriter(path) as writer:
            for _, _, record in rows:
                writer.write(record)
        hashes = np.frombuffer(b"".join(digest for _, digest, _ in rows), ">u8").reshape(-1, 2).astype(np.uint64)
        return Run(
            path,
            np.array([split for split, _, _ in rows], np.uint8),
            hashes[:, 0],
            hashes[:, 1],
            np.array([len(record) + FRAME_BYTES for _, _, record in rows], np.int64),
        )


def key_hash(split: str, key: str) -> bytes:
    """What TFDS orders the records of a split by (tensorflow_datasets.core.hashing); 16 bytes, big-endian."""
    return hashlib.md5(split.encode() + key.replace("\\", "/").encode()).digest()


def write(
    encoder: Encoder, templates: Mapping[str, naming.ShardedFileTemplate], shards: Shards, workers: int
) -> list[tfds.core.SplitInfo]:
    """Writes all records of a source.

    Args:
      encoder: the source, and where its runs may lie meanwhile: on a local disk with room for all records.
      templates: paths of the shards, by split.
      shards: how many there shall be.
      workers: processes.

    Returns:
      The splits, with the number of records in each shard.

    Raises:
      DataError: a source that is damaged, two examples of one key, or a split without examples.
    """
    with processes.Workers(workers, __name__, _start, encoder) as pool:
        total = encoder.source.num_examples
        with tqdm(total=total, desc="Reading", unit=" examples", disable=None) as bar:
            runs = []
            for run in pool.map(_spill, enumerate(_tasks(encoder.source))):
                runs.append(run)
                bar.update(len(run.sizes))
        merges: list[tuple] = []
        infos = []
        for place, split in enumerate(encoder.splits):
            info, calls = _plan_split(encoder, runs, place, templates[split], shards)
            infos.append(info)
            merges += calls
        with tqdm(total=len(merges), desc="Writing", unit=" shards", disable=None) as bar:
            for _ in pool.map(_merge, iter(merges)):
                bar.update()
    return infos


def _tasks(source: sources.Source) -> Iterator[Any]:
    return (task for piece in source.pieces() for task in source.open(piece))


def _plan_split(
    encoder: Encoder, runs: list[Run], place: int, template: naming.ShardedFileTemplate, shards: Shards
) -> tuple[tfds.core.SplitInfo, list[tuple]]:
    """Which records of which runs make up each shard of a split: what is returned of it, and the calls of `_merge`."""
    parts = [slice(*np.searchsorted(run.splits, [place, place + 1])) for run in runs]
    columns = {
        "run": [np.full(part.stop - part.start, index, np.int32) for index, part in enumerate(parts)],
        "offset": [(np.cumsum(run.sizes) - run.sizes)[part] for run, part in zip(runs, parts, strict=True)],
        "size": [run.sizes[part] for run, part in zip(runs, parts, strict=True)],
    }
    high = np.concatenate([run.high[part] for run, part in zip(runs, parts, strict=True)])
    low = np.concatenate([run.low[part] for run, part in zip(runs, parts, strict=True)])
    order = np.lexsort((low, high))
    if encoder.source.unique_keys:
        _check_unique(encoder, encoder.splits[place], high[order], low[order])
    rows = {name: np.concatenate(values)[order] for name, values in columns.items()}
    num_bytes = int(rows["size"].sum()) - FRAME_BYTES * len(order)
    ends = _boundaries(encoder, encoder.splits[place], len(order), num_bytes, shards)
    begins = [0, *ends[:-1]]
    paths = [run.path for run in runs]
    calls = [
        (os.fspath(path), paths, *(values[begin:end] for values in rows.values()))
        for path, begin, end in zip(template.sharded_filepaths(len(ends)), begins, ends, strict=True)
    ]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    info = tfds.core.SplitInfo(
        name=encoder.splits[place], shard_lengths=lengths, num_bytes=num_bytes, filename_template=template
    )
    return info, calls


def _boundaries(encoder: Encoder, split: str, num_examples: int, num_bytes: int, shards: Shards) -> Sequence[int]:
    if not num_examples:
        raise errors.DataError(
            f"Split {split!r} gets none of the examples of {encoder.source.path}. "
            "Give it a larger fraction (--splits=...), or leave it out."
        )
    num_shards = shards.get_number_shards(num_bytes, num_examples)
    if num_shards > num_examples:
        raise errors.DataError(
            f"Split {split!r} has {num_examples} examples, too few for {num_shards} shards. "
            f"Ask for fewer: --num_shards={num_examples} at most."
        )
    return shard_utils.get_shard_boundaries(num_examples, num_shards)


def _check_unique(encoder: Encoder, split: str, high: np.ndarray, low: np.ndarray) -> None:
    """Raises DataError where two examples share a key; only then are keys read once more, to name it."""
    same = np.flatnonzero((high[1:] == high[:-1]) & (low[1:] == low[:-1]))
    if not len(same):
        return
    wanted = b"".join(int(half[same[0]]).to_bytes(8, "big") for half in (high, low))
    keys = (key for task in _tasks(encoder.source) for of, key, _ in encoder.keyed(task) if of == split)
    key = next(key for key in keys if key_hash(split, key) == wanted)
    raise errors.DataError(
        f"{len(same) + 1} or more examples of {encoder.source.path} share a key, one is {key!r}. "
        "Name a key that is different for each, or none: then content tells them apart."
    )


_encoder: Encoder | None = None  # of this process


def _start(encoder: Encoder) -> None:
    """Makes this process ready to encode."""
    global _encoder
    _encoder = encoder


def _spill(number: int, task: Any) -> Run:
    if _encoder is None:
        raise RuntimeError("the worker was not started with an encoder")
    return _encoder.spill(number, task)


def _merge(path: str, paths: list[str], run: np.ndarray, offset: np.ndarray, size: np.ndarray) -> None:
    """Writes one shard: record i is the `size[i]` bytes at `offset[i]` of file `paths[run[i]]`."""
    stretches = {}
    for index in np.unique(run):
        rows = run == index
        begin, end = offset[rows].min(), (offset + size)[rows].max()
        with open(paths[index], "rb") as file:
            file.seek(begin)
            stretches[index] = (begin, memoryview(file.read(end - begin)))
    with epath.Path(path).open("wb") as shard:
        for index, at, length in zip(run, offset, size, strict=True):
            begin, stretch = stretches[index]
            shard.write(stretch[at - begin : at - begin + length].tobytes())  # gs:// takes no memoryview


@dataclasses.dataclass
class DownloadConfig(tfds.download.DownloadConfig):
    """TFDS's configuration of a build, with our rule for the number of shards (see `Shards`)."""

    shards: Shards = Shards()

    def get_shard_config(self) -> Shards:
        """What TFDS's writers ask for."""
        return self.shards
