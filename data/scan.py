"""Reads every record of a dataset once, and measures and checks it on the way.

TensorFlow reads, checks the sums and parses, in C++ and in parallel; only where it finds a shard damaged, framing.py
takes over for the rest of it. One thread a shard: all of the work is outside Python's lock.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from etils import epath

from data import catalog, checks, errors, framing
from data.findings import MAX_FINDINGS, Finding

_READ_BUFFER_BYTES = 4 << 20
_BATCH_BYTES = 4 << 20
_MAX_BATCH = 1_024
_PREFETCH = 2


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split.

    records: number of them that dataset_info.json states.
    """

    split: str
    path: str
    records: int

    @property
    def file(self) -> str:
        """Its name without directories."""
        return os.path.basename(self.path)


@dataclasses.dataclass
class ShardReport:
    """What reading one shard told.

    bytes: size of the file.
    records: that it holds, damaged ones included.
    numbers, offsets: [sound records] int64, of each record.
    fingerprints: [sound records] int64, of their content.
    keys, labels: [sound records] int64 (checks.NO_VALUE where a record does not parse), or None.
    images: [images] height, width, channels.
    findings: in file order.
    is_complete: False where reading ended early, because of MAX_FINDINGS.
    """

    shard: Shard
    bytes: int = 0
    records: int = 0
    numbers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0], np.int64))
    offsets: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0], np.int64))
    fingerprints: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0], np.int64))
    keys: np.ndarray | None = None
    labels: np.ndarray | None = None
    images: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros([0, 3], np.int64))
    findings: list[Finding] = dataclasses.field(default_factory=list)
    is_complete: bool = True

    def add(self, kind: str, message: str, record: int | None = None, offset: int | None = None) -> None:
        """Adds a finding."""
        self.findings.append(Finding(self.shard.split, self.shard.file, record, offset, kind, message))


def shards_of(info: Any, splits: Iterable[str] = ()) -> list[Shard]:
    """The shards of a dataset that hold records, of all its splits or of those named.

    Args:
      info: tfds.core.DatasetInfo.
      splits: names.

    Raises:
      DataError: no such split, or no shards.
    """
    names = list(splits) or list(info.splits)
    for name in names:
        if name not in info.splits:
            guess = catalog.nearest(name, list(info.splits))
            raise errors.DataError(f"{info.full_name} has no split {name!r}{guess}. It has: {', '.join(info.splits)}.")
    shards = []
    for name in names:
        split = info.splits[name]
        pairs = zip(split.filepaths, split.shard_lengths, strict=True)
        shards += [Shard(name, os.fspath(path), int(records)) for path, records in pairs if records]
    if not shards:
        raise errors.DataError(f"{info.full_name} holds no records: splits {names or 'none'}. Rebuild it.")
    return shards


def scan(
    shards: list[Shard], check: checks.RecordChecks, *, threads: int, progress: Callable[[int], Any] = lambda _: None
) -> list[ShardReport]:
    """Reads all records of all shards.

    Args:
      shards: from `shards_of`.
      check: what to check.
      threads: shards read at a time.
      progress: is told the number of bytes read since it was told last; from several threads.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda shard: scan_shard(shard, check, progress), shards))


def scan_shard(
    shard: Shard, check: checks.RecordChecks, progress: Callable[[int], Any] = lambda _: None
) -> ShardReport:
    """Reads all records of one shard."""
    report = ShardReport(shard)
    path = epath.Path(shard.path)
    if not path.exists():
        report.add("missing_file", "the shard is missing")
        return report
    report.bytes = path.stat().length
    if not report.bytes:
        report.add("empty_file", f"the file is empty; dataset_info.json counts {shard.records:,} records in it")
        return report
    batches: list[tuple[np.ndarray, np.ndarray, checks.Batch]] = []
    told = 0
    for piece in _pieces(shard, report.bytes):
        if isinstance(piece, framing.Frame):
            report.records += 1
            report.add(piece.fault, piece.message, piece.number, piece.offset)
            continue
        numbers, offsets, records = piece
        batch = check(records)
        batches.append((numbers, offsets, batch))
        report.records += len(numbers)
        for row, kind, message in batch.problems:
            report.add(kind, message, int(numbers[row]), int(offsets[row]))
        progress(int(offsets[-1]) - told)
        told = int(offsets[-1])
        if len(report.findings) > MAX_FINDINGS:
            report.is_complete = False
            break
    progress(report.bytes - told)
    _join(report, batches)
    if report.is_complete and report.records != shard.records:
        there, counted = f"{report.records:,} records", f"{shard.records:,}"
        report.add("count_mismatch", f"the shard holds {there}, dataset_info.json counts {counted}")
    return report


def _join(report: ShardReport, batches: list[tuple[np.ndarray, np.ndarray, checks.Batch]]) -> None:
    if not batches:
        return
    report.numbers = np.concatenate([numbers for numbers, _, _ in batches])
    report.offsets = np.concatenate([offsets for _, offsets, _ in batches])
    report.fingerprints = np.concatenate([batch.fingerprints for _, _, batch in batches])
    labels = [batch.labels for _, _, batch in batches if batch.labels is not None]
    keys = [batch.keys for _, _, batch in batches if batch.keys is not None]
    report.labels = np.concatenate(labels) if labels else None
    report.keys = np.concatenate(keys) if keys else None
    known = [header for _, _, batch in batches for header in batch.images if None not in header]
    report.images = np.array(known, np.int64).reshape(-1, 3)


def _pieces(shard: Shard, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, tf.Tensor] | framing.Frame]:
    """Batches of sound records, as (numbers [N] int64, offsets [N] int64, records [N] string), and damaged frames."""
    batch_size = int(np.clip(_BATCH_BYTES * shard.records // size, 1, _MAX_BATCH))
    offset = number = 0
    try:
        dataset = tf.data.TFRecordDataset(shard.path, buffer_size=_READ_BUFFER_BYTES)
        for records in dataset.batch(batch_size).prefetch(_PREFETCH):
            sizes = tf.strings.length(records).numpy().astype(np.int64) + framing.OVERHEAD_BYTES  # [N], with framing
            ends = offset + np.cumsum(sizes)
            yield np.arange(number, number + len(sizes)), ends - sizes, records
            offset, number = int(ends[-1]), number + len(sizes)
    except tf.errors.DataLossError:
        pass  # the batch is lost with its first bad record; below it is read again, and all behind it
    if offset == size:
        return
    data = framing.load(shard.path)
    sound: list[framing.Frame] = []
    for frame in framing.frames(data, offset, number):
        if sound and (frame.fault or len(sound) == batch_size):
            yield _piece(data, sound)
            sound = []
        if frame.fault:
            yield frame
        else:
            sound.append(frame)
    if sound:
        yield _piece(data, sound)


def _piece(data: np.ndarray, sound: list[framing.Frame]) -> tuple[np.ndarray, np.ndarray, tf.Tensor]:
    numbers = np.array([frame.number for frame in sound], np.int64)
    offsets = np.array([frame.offset for frame in sound], np.int64)
    return numbers, offsets, tf.constant([framing.payload(data, frame) for frame in sound])
