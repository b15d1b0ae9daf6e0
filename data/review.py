"""The audit of a whole dataset, and of one error in training: what scan.py finds, and what only all shards tell."""

import collections
import concurrent.futures
import dataclasses
import os
import re
import time
from typing import Any

import numpy as np
import tqdm
from etils import epath

from data import catalog, checks, framing, scan
from data.findings import MAX_FINDINGS, Finding

# What TensorFlow's reader says; the offset is that of the record or of its data.
_DAMAGED = re.compile(r"(?:corrupted|truncated) record at (\d+)")
# Which other errors come from the content of a record, or from the number of records.
_CONTENT = re.compile(
    r"Could not parse example|Parse(Single)?Example|Decode|records that dataset_info|contained|Invalid (PNG|JPEG)"
)
# A TPU waits while an error is explained, so no more is read for it than this.
_MAX_EXPLAIN_BYTES = 8 << 30


@dataclasses.dataclass(frozen=True)
class Report:
    """What an audit told.

    name: of the dataset.
    directory: where it is.
    reports: one per shard.
    notes: what is no fault, but good to know.
    seconds: that it took.
    """

    name: str
    directory: str
    reports: list[scan.ShardReport]
    notes: list[str]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        """All of them, shard after shard."""
        return [finding for report in self.reports for finding in report.findings]

    @property
    def bytes(self) -> int:
        """Size of all shards together."""
        return sum(report.bytes for report in self.reports)


def audit(
    info: Any,
    splits: list[str],
    *,
    threads: int,
    decode: bool = False,
    key_feature: str | None = None,
    ignore: frozenset[str] = frozenset(),
    show_progress: bool = False,
) -> Report:
    """Reads and checks all records of a dataset.

    Args:
      info: tfds.core.DatasetInfo.
      splits: names; none means all.
      threads: shards read at a time.
      decode: decode every image, instead of reading its header only.
      key_feature: name of a feature that no two records may share.
      ignore: kinds not to report.
      show_progress: a bar on stderr.

    Raises:
      DataError: an unknown split or key feature; no shards.
    """
    started = time.monotonic()
    shards = scan.shards_of(info, splits)
    check = checks.RecordChecks(info, decode=decode, key_feature=key_feature)
    paths = [epath.Path(shard.path) for shard in shards]
    total = sum(path.stat().length for path in paths if path.exists()) if show_progress else None
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="audit", disable=not show_progress) as bar:
        reports = scan.scan(shards, check, threads=threads, progress=bar.update)
    notes = _judge_unlabelled(reports)
    _add_duplicates(reports, "duplicate_record", "content", [report.fingerprints for report in reports])
    keys = [report.keys for report in reports if report.keys is not None]
    if keys:
        _add_duplicates([report for report in reports if report.keys is not None], "duplicate_key", "key", keys)
    for report in reports:
        report.findings = [finding for finding in report.findings if finding.kind not in ignore]
    return Report(info.full_name, os.fspath(info.data_dir), reports, notes, time.monotonic() - started)


def explain(info: Any, split: str, error: Exception) -> str | None:
    """Which record an error of TensorFlow's in reading comes from.

    Args:
      info: tfds.core.DatasetInfo.
      split: that was read.
      error: what TensorFlow raised.

    Returns:
      Message with file, record number and byte offset and what to do; None where the error is not about records.
    """
    # TensorFlow quotes a record that does not parse, and fails to make its own error where that is not UTF-8.
    text = str(error.object, errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    damaged = _DAMAGED.search(text)
    if not damaged and not _CONTENT.search(text):
        return None
    shards = scan.shards_of(info, [split])
    size = sum(path.stat().length for path in (epath.Path(shard.path) for shard in shards) if path.exists())
    command = f"python -m data.audit {info.data_dir} --splits={split}"
    if damaged and not catalog.is_remote(os.fspath(info.data_dir)):
        finding = _damaged_at(shards, int(damaged[1]))
    elif size <= _MAX_EXPLAIN_BYTES:
        finding = _first_finding(info, shards)
    else:
        return f"A bad record in split {split!r} of {info.data_dir}. Find it: {command} --decode. TensorFlow: {text}"
    if finding is None:
        return None
    return (
        f"Bad data in {os.fspath(info.data_dir)}: {finding}. Rebuild this file, or find all bad records and leave them "
        f"out: {command} --write_quarantine, then train with --corrupt_records=skip --max_corrupt_records=N"
    )


def _damaged_at(shards: list[scan.Shard], offset: int) -> Finding | None:
    """The damaged record that TensorFlow found at `offset` of a file which it does not name."""
    for shard in shards:
        if not os.path.exists(shard.path):
            continue
        data = framing.load(shard.path)
        for begin in (offset, offset - framing.HEADER_BYTES):  # TensorFlow names that of the data where it is at fault
            number = framing.record_at(data, begin)
            frame = next(framing.frames(data, begin, number)) if number is not None else None
            if frame is not None and frame.fault:
                return Finding(shard.split, shard.file, frame.number, frame.offset, frame.fault, frame.message)
    return None


def _first_finding(info: Any, shards: list[scan.Shard]) -> Finding | None:
    check = checks.RecordChecks(info, decode=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = pool.map(lambda shard: scan.scan_shard(shard, check), shards)
        found = next((report.findings[0] for report in reports if report.findings), None)
        pool.shutdown(cancel_futures=True)
    return found


def _judge_unlabelled(reports: list[scan.ShardReport]) -> list[str]:
    """Adds findings for labels of -1, unless a whole split has no other; returns notes on such splits."""
    notes = []
    by_split = collections.defaultdict(list)
    for report in reports:
        if report.labels is not None:
            by_split[report.shard.split].append(report)
    for split, of_split in by_split.items():
        labels = np.concatenate([report.labels for report in of_split])
        if (labels == checks.UNLABELLED).all():
            notes.append(f"split {split} has no labels: all are {checks.UNLABELLED}. Do not train or evaluate on it.")
            continue
        for report in of_split:
            rows = np.flatnonzero(report.labels == checks.UNLABELLED)
            report.is_complete &= len(rows) <= MAX_FINDINGS
            for row in rows[:MAX_FINDINGS]:
                message = f"the label is {checks.UNLABELLED}, which stands for none"
                report.add("label_range", message, int(report.numbers[row]), int(report.offsets[row]))
    return notes


def _add_duplicates(reports: list[scan.ShardReport], kind: str, what: str, fingerprints: list[np.ndarray]) -> None:
    """Adds a finding for each record whose fingerprint an earlier one has, MAX_FINDINGS a shard at most."""
    shard = np.repeat(np.arange(len(reports)), [len(prints) for prints in fingerprints])  # [records]
    row = np.concatenate([np.arange(len(prints)) for prints in fingerprints])
    prints = np.concatenate(fingerprints)
    _, first, inverse = np.unique(prints, return_index=True, return_inverse=True)
    original = first[inverse]  # [records], the first one with the same fingerprint
    later = np.flatnonzero((original != np.arange(len(prints))) & (prints != checks.NO_VALUE))
    for index in range(len(reports)):
        report = reports[index]
        for copy in later[shard[later] == index][:MAX_FINDINGS]:
            earlier = reports[shard[original[copy]]]
            place = f"record {earlier.numbers[row[original[copy]]]} of {earlier.shard.file}"
            number, offset = int(report.numbers[row[copy]]), int(report.offsets[row[copy]])
            report.add(kind, f"the same {what} as {place}", number, offset)
