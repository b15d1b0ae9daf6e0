"""Records that training leaves out, without moving any other.

A bad record cannot simply be dropped: every position behind it would shift, and with it batches, epochs and what a
checkpoint says. TensorFlow cannot step over one either: after an error its reader goes on with the next *file*.
So a shard with bad records is replaced by a repaired copy, which holds exactly as many records as dataset_info.json
counts. Each bad one's place is taken by a good one of the same shard: with G good and B bad ones, the k-th bad one by
good one k*G//B. Which that is depends on nothing but the shard and the list, so all hosts and all restarts agree, and
reading needs to know nothing of it. A shard in which nothing is good cannot be repaired.

quarantine.json, beside dataset_info.json, lists the bad records: {"shards": {file: {"bytes": size of the file,
"records": {number: reason}}}}. `python -m data.audit DIR --write_quarantine` writes it. Without it, `find` reads the
shards once and checks their sums, which finds damaged bytes but no wrong content.
"""

import concurrent.futures
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from etils import epath

from data import catalog, errors, framing, manifest, scan
from data.findings import HARMLESS, Finding

FILE = "quarantine.json"
_FORMAT = 1
_READ_BUFFER_BYTES = 4 << 20
_READ_BATCH = 256
_SHOWN = 3
# In an identity that is none, for want of checksums.
NO_MANIFEST = "without a manifest"
_SHOWN_DIGITS = 16


class BadRecord(NamedTuple):
    """A record that is left out.

    path: of its shard.
    record: its number in the shard, from 0.
    reason: kind of the finding.
    """

    path: str
    record: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, record {self.record} [{self.reason}]"


class Prepared(NamedTuple):
    """A split that is ready to be trained on.

    copies: path of a shard -> path to read in its place.
    skipped: what these leave out.
    checksum: of the split's records, by its manifest; "" without one.
    """

    copies: dict[str, str]
    skipped: list[BadRecord]
    checksum: str

    def identity(self) -> str:
        """What decides which record a run reads at a place, beside its order: the same text, the same records."""
        left_out = hashlib.sha256("\n".join(map(str, self.skipped)).encode()).hexdigest()
        skipped = f"{len(self.skipped)} left out ({left_out[:_SHOWN_DIGITS]})" if self.skipped else "none left out"
        return f"records {self.checksum[:_SHOWN_DIGITS] or NO_MANIFEST}, {skipped}"


def write(directory: str, reports: list[scan.ShardReport]) -> tuple[str, set[Finding]]:
    """Writes the list of all bad records that an audit found; one without entries where there are none.

    Records that a shard lacks at its end count as bad: numbers from what it holds to what dataset_info.json counts.
    Duplicates are not listed: they can be read, and another record twice in their place would be no better.

    Returns:
      Its path, and the findings that it deals with.

    Raises:
      DataError: a shard without a good record, or with too many bad ones to list.
    """
    shards: dict[str, dict] = {}
    handled: set[Finding] = set()
    for report in reports:
        bad, findings = _bad_of(report)
        if not report.is_complete or (bad and len(bad) >= report.shard.records):
            raise errors.DataError(
                f"{report.shard.path} has too many bad records to leave out: {len(bad):,} or more of "
                f"{report.shard.records:,}, the first: {report.findings[0]}. Rebuild the dataset."
            )
        if bad:
            records = {str(number): kind for number, kind in sorted(bad.items())}
            shards[report.shard.file] = {"bytes": report.bytes, "records": records}
            handled |= findings
    path = epath.Path(directory) / FILE
    manifest.write_json(path, {"format": _FORMAT, "shards": shards})
    return os.fspath(path), handled


def find(directory: str, shards: list[scan.Shard], *, threads: int) -> list[BadRecord]:
    """The bad records of some shards: those that quarantine.json lists or, where there is no such file, those whose
    bytes do not fit their sums, which takes one reading of all shards.

    Raises:
      DataError: quarantine.json is damaged or speaks of other files than these.
    """
    listed = _read(directory)
    if listed is not None:
        return [record for shard in shards for record in _listed_of(shard, listed, directory)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return [record for records in pool.map(_damaged_of, shards) for record in records]


def refuse(directory: str, shards: list[scan.Shard]) -> None:
    """Raises DataError where quarantine.json lists records of these shards: what to do where none may be skipped."""
    listed = _read(directory) or {}
    bad = [record for shard in shards for record in _listed_of(shard, listed, directory)]
    if bad:
        raise errors.DataError(
            f"{directory}/{FILE} lists {len(bad):,} bad records, the first is {bad[0]}. Mend the dataset and delete "
            f"the list, or leave these records out: --corrupt_records=skip --max_corrupt_records={len(bad)} (for "
            "training; a split that is evaluated must be sound)"
        )


def prepare(info: Any, split: str, *, skip: bool, max_records: int, cache_dir: str, threads: int) -> Prepared:
    """What a run does about bad records before it reads the first one.

    Args:
      info: tfds.core.DatasetInfo.
      split: of one that is evaluated `skip` is False always, for evaluation counts every example exactly once.
      skip: leave bad records out; otherwise known ones are an error, and unknown ones stop the run when they are read.
      max_records, cache_dir: see `repair`.
      threads: shards read at a time, where there is no quarantine list.

    Raises:
      DataError: see `manifest.verify`, `find`, `refuse` and `repair`.
    """
    directory = os.fspath(info.data_dir)
    shards = scan.shards_of(info, [split])
    if not skip:
        refuse(directory, shards)
    bad = find(directory, shards, threads=threads) if skip else []
    described = manifest.verify(info, [split], known={os.path.basename(record.path) for record in bad})
    return Prepared(
        repair(shards, bad, max_records=max_records, cache_dir=cache_dir, directory=directory),
        bad,
        described.splits[split].checksum if described else "",
    )


def repair(
    shards: list[scan.Shard], bad: list[BadRecord], *, max_records: int, cache_dir: str, directory: str
) -> dict[str, str]:
    """Makes repaired copies of the shards with bad records.

    Args:
      shards: of one or more splits.
      bad: from `find`.
      max_records: how many bad records may be left out.
      cache_dir: where copies are put, and found again by the next start; every host may have its own.
      directory: of the dataset, for messages.

    Returns:
      Path of each shard with bad records -> path of its copy.

    Raises:
      DataError: more than `max_records`, or a shard with no good record.
    """
    if len(bad) > max_records:
        some = "; ".join(map(str, bad[:_SHOWN])) + ("; …" if len(bad) > _SHOWN else "")
        raise errors.DataError(
            f"{len(bad):,} bad records in {directory}, more than max_corrupt_records={max_records}: {some}. See all: "
            f"python -m data.audit {directory}. Rebuild the dataset, or raise --max_corrupt_records."
        )
    copies = {}
    for shard in shards:
        numbers = sorted(record.record for record in bad if record.path == shard.path)
        if numbers:
            copies[shard.path] = _repair_shard(shard, numbers, epath.Path(cache_dir))
    return copies


def _bad_of(report: scan.ShardReport) -> tuple[dict[int, str], set[Finding]]:
    """Number of each bad record -> kind, and the findings that this answers."""
    bad: dict[int, str] = {}
    findings = set()
    for finding in report.findings:
        if finding.kind in HARMLESS:
            continue
        if finding.record is not None:
            bad.setdefault(finding.record, finding.kind)
        findings.add(finding)
    for number in range(report.records, report.shard.records):
        bad[number] = "missing_record"
    for number in range(report.shard.records, report.records):
        bad[number] = "surplus_record"
    return bad, findings


def _read(directory: str) -> dict | None:
    path = epath.Path(directory) / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, this program knows {_FORMAT}")
        return {
            file: {"bytes": int(entry["bytes"]), "records": {int(n): str(r) for n, r in entry["records"].items()}}
            for file, entry in content["shards"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DataError(
            f"{path} is no quarantine list: {error}. Write it anew: python -m data.audit {directory} --write_quarantine"
        ) from error


def _listed_of(shard: scan.Shard, listed: Mapping[str, dict], directory: str) -> list[BadRecord]:
    if shard.file not in listed:
        return []
    entry = listed[shard.file]
    path = epath.Path(shard.path)
    size = path.stat().length if path.exists() else 0
    if size != entry["bytes"]:
        raise errors.DataError(
            f"{directory}/{FILE} is out of date: {shard.path} holds {size:,} bytes, the list was made of "
            f"{entry['bytes']:,}. Write it anew: python -m data.audit {directory} --write_quarantine"
        )
    return [BadRecord(shard.path, number, reason) for number, reason in entry["records"].items()]


def _damaged_of(shard: scan.Shard) -> list[BadRecord]:
    """The records of a shard whose bytes do not fit their sums, and those that it lacks or has too many."""
    path = epath.Path(shard.path)
    if not path.exists() or not path.stat().length:
        raise errors.DataError(f"{shard.path} is missing or empty: nothing is left to read. Rebuild the dataset.")
    if _reads_whole(shard):
        return []
    bad, count = [], 0
    for frame in framing.frames(framing.load(shard.path)):
        count += 1
        if frame.fault:
            bad.append(BadRecord(shard.path, frame.number, frame.fault))
    bad += [BadRecord(shard.path, number, "missing_record") for number in range(count, shard.records)]
    bad += [BadRecord(shard.path, number, "surplus_record") for number in range(shard.records, count)]
    return bad


def _reads_whole(shard: scan.Shard) -> bool:
    """True where TensorFlow's reader, several times as fast as framing.py, finds the counted number of records."""
    count = 0
    try:
        for records in tf.data.TFRecordDataset(shard.path, buffer_size=_READ_BUFFER_BYTES).batch(_READ_BATCH):
            count += len(records)
    except tf.errors.DataLossError:
        return False
    return count == shard.records


def _repair_shard(shard: scan.Shard, numbers: list[int], cache: epath.Path) -> str:
    data = framing.load(shard.path)
    facts = f"{hashlib.sha256(data.data).hexdigest()} {shard.records} {numbers}"  # a changed shard gets a new copy
    copy = cache / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}-{shard.file}"
    if copy.exists():
        return os.fspath(copy)
    bad = set(numbers)
    good = [frame for frame in framing.frames(data) if frame.number not in bad and not frame.fault]
    if not good:
        raise errors.DataError(f"{shard.path} holds no good record to put in the place of bad ones. Rebuild it.")
    kept = {frame.number: frame for frame in good}
    places = [number for number in range(shard.records) if number not in kept]
    fill = {number: good[k * len(good) // len(places)] for k, number in enumerate(places)}
    if not catalog.is_remote(os.fspath(cache)):  # objects need no directory
        cache.mkdir(parents=True, exist_ok=True)
    unfinished = cache / f"{copy.name}.{uuid.uuid4().hex}.incomplete"  # hosts may share the directory
    with unfinished.open("wb") as file:
        for number in range(shard.records):
            frame = kept[number] if number in kept else fill[number]
            file.write(data[frame.offset : frame.offset + frame.size + framing.OVERHEAD_BYTES].tobytes())
    unfinished.replace(copy)
    return os.fspath(copy)
