"""manifest.json beside dataset_info.json: what every shard holds, so that a run can tell within a second what changed.

dataset_info.json counts records only. The manifest adds for each shard its bytes and a checksum, and for each split the
labels and the mean size of its images; it also says what the audit that wrote it has found. `verify` compares it with
the directory by one look at the sizes of the files, and reads none of them.

The checksum of a shard is the SHA-256 of its records' 64-bit fingerprints (FarmHash, tf.strings.to_hash_bucket_fast),
in file order. It changes with any byte of any record and with their order; equal checksums mean equal records. The
audit has the fingerprints at hand, while TensorFlow's reader hands out no bytes of the file: a SHA-256 of these would
read each file twice and add a third to two thirds to the processor time (scripts/bench_audit.py). TensorFlow offers
no CRC-32C to Python, and in NumPy it takes longer than the whole audit.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Collection
from typing import Any

import numpy as np
from etils import epath

from data import catalog, checks, errors, framing, scan
from data.findings import HARMLESS, Finding

FILE = "manifest.json"
_FORMAT = 1
_FEATURES_FILE = "features.json"
# Requests for sizes at a time: one to Cloud Storage takes tens of milliseconds.
_PARALLEL_REQUESTS = 32


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One file. bytes: its size. checksum: of its records, see above; hexadecimal."""

    file: str
    records: int
    bytes: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class SplitEntry:
    """One split.

    labels: how many records have each class, by its number; None without a class label.
    images: mean "height", "width" (pixels) and "channels" of its images; None without images.
    findings: kind -> how many the audit found, less what its quarantine list names.
    """

    shards: tuple[ShardEntry, ...]
    records: int
    bytes: int
    labels: dict[str, int] | None
    images: dict[str, float] | None
    findings: dict[str, int]

    @property
    def checksum(self) -> str:
        """Of all records of the split in their order; hexadecimal."""
        return hashlib.sha256(" ".join(shard.checksum for shard in self.shards).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A dataset as it was when it was read.

    dataset: as TFDS names it, e.g. "digits/1.0.0".
    schema: SHA-256 of features.json, hexadecimal.
    features: name -> what features.json says, for people.
    splits: by name.
    """

    dataset: str
    schema: str
    features: dict[str, str]
    splits: dict[str, SplitEntry]
    format: int = _FORMAT


def build(info: Any, reports: list[scan.ShardReport], quarantined: Collection[Finding] = ()) -> Manifest:
    """Sums up what reading all shards told.

    Args:
      info: tfds.core.DatasetInfo.
      reports: from `scan.scan`.
      quarantined: findings that training leaves out, so that they need not stop it.
    """
    names = list(dict.fromkeys(report.shard.split for report in reports))
    return Manifest(
        dataset=info.full_name,
        schema=_schema(info.data_dir),
        features={key: repr(feature) for key, feature in info.features.items()},
        splits={
            name: _split_entry(info, [report for report in reports if report.shard.split == name], quarantined)
            for name in names
        },
    )


def write(directory: str, manifest: Manifest) -> str:
    """Writes it into the dataset's directory, whole or not at all; returns the path."""
    path = epath.Path(directory) / FILE
    write_json(path, dataclasses.asdict(manifest))
    return os.fspath(path)


def write_json(path: epath.Path, content: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    unfinished = path.parent / f"{path.name}.{uuid.uuid4().hex}.incomplete"
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


def read(directory: str) -> Manifest | None:
    """The manifest of a dataset's directory; None where none was written.

    Raises:
      DataError: it is damaged or from another version of this program.
    """
    path = epath.Path(directory) / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, this program knows {_FORMAT}")
        for name, split in content["splits"].items():
            shards = tuple(ShardEntry(**shard) for shard in split.pop("shards"))
            content["splits"][name] = SplitEntry(shards=shards, **split)
        return Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DataError(
            f"{path} is no manifest: {error}. Write it anew: python -m data.audit {directory} --write_manifest"
        ) from error


def verify(info: Any, splits: Collection[str] = (), *, known: Collection[str] = ()) -> Manifest | None:
    """Checks before training that the files are those the manifest describes; reads none of them.

    Without a manifest, the bytes that dataset_info.json states must be there.

    Args:
      info: tfds.core.DatasetInfo.
      splits: names of those to check; none means all.
      known: names of damaged files which the caller has dealt with.

    Returns:
      The manifest, or None where none was written.

    Raises:
      DataError: a shard that is missing, empty, of another size or with another count of records, changed features, or
        faults that the audit found.
    """
    directory = os.fspath(info.data_dir)
    shards = [shard for shard in scan.shards_of(info, splits) if shard.file not in known]
    sizes = _sizes(directory, [shard.path for shard in shards])
    empty = [path for path, size in sizes.items() if not size]
    if empty:
        raise errors.DataError(
            f"{len(empty)} of {len(sizes)} shards are empty files, the first is {empty[0]}. Rebuild the dataset."
        )
    manifest = read(directory)
    if manifest is None:
        _verify_totals(info, shards, sizes, known)
        return None
    rewrite = f"Restore the files, or if the change was meant: python -m data.audit {directory} --write_manifest"
    if manifest.schema != _schema(directory):
        raise errors.DataError(f"features.json of {directory} is not the one that its manifest describes. {rewrite}")
    entries = {entry.file: entry for split in manifest.splits.values() for entry in split.shards}
    for shard in shards:
        if shard.file not in entries:
            raise errors.DataError(f"{shard.path} is not in the manifest of {directory}. {rewrite}")
        _verify_shard(shard, sizes[shard.path], entries[shard.file], rewrite)
    for name in dict.fromkeys(shard.split for shard in shards):
        faults = {kind: count for kind, count in manifest.splits[name].findings.items() if kind not in HARMLESS}
        if faults:
            listed = ", ".join(f"{count:,} {kind}" for kind, count in faults.items())
            raise errors.DataError(
                f"The audit of split {name!r} in {directory} found faults: {listed}. See them: python -m data.audit "
                f"{directory} --splits={name}; then mend them, or leave these records out: --write_quarantine."
            )
    return manifest


def _verify_shard(shard: scan.Shard, size: int, entry: ShardEntry, remedy: str) -> None:
    if entry.bytes != size:
        raise errors.DataError(f"{shard.path} holds {size:,} bytes, the manifest says {entry.bytes:,}. {remedy}")
    if entry.records != shard.records:
        raise errors.DataError(
            f"{shard.path} holds {entry.records:,} records by the manifest, {shard.records:,} by dataset_info.json. "
            f"{remedy}"
        )


def _verify_totals(info: Any, shards: list[scan.Shard], sizes: dict[str, int], known: Collection[str]) -> None:
    """TFDS states the bytes of all records of a split, without framing: fewer in the files means a truncated one."""
    for name in {shard.split for shard in shards}:
        split = info.splits[name]
        stated, framed = int(split.num_bytes), int(split.num_bytes) + framing.OVERHEAD_BYTES * split.num_examples
        there = sum(sizes[shard.path] for shard in shards if shard.split == name)
        # Some versions of TFDS have stated the bytes with framing; 0 means that nobody counted.
        if not known and there < framed and there != stated and stated:
            raise errors.DataError(
                f"The shards of split {name!r} in {info.data_dir} hold {there:,} bytes, dataset_info.json tells of "
                f"{framed:,}: at least one is truncated. Find it: python -m data.audit {info.data_dir} --splits={name}"
            )


def _sizes(directory: str, paths: list[str]) -> dict[str, int]:
    """Bytes of each file. One listing tells what is missing, however many files there are."""
    there = {path.name for path in epath.Path(directory).iterdir()}
    missing = [path for path in paths if os.path.basename(path) not in there]
    if missing:
        raise errors.DataError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}. Rebuild the dataset."
        )
    if not catalog.is_remote(directory):
        return {path: os.path.getsize(path) for path in paths}
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return dict(zip(paths, pool.map(lambda path: epath.Path(path).stat().length, paths), strict=True))


def _schema(directory: str) -> str:
    return hashlib.sha256((epath.Path(directory) / _FEATURES_FILE).read_bytes()).hexdigest()


def _split_entry(info: Any, reports: list[scan.ShardReport], quarantined: Collection[Finding]) -> SplitEntry:
    shards = tuple(
        ShardEntry(report.shard.file, report.records, report.bytes, _checksum(report.fingerprints))
        for report in reports
    )
    labels = [report.labels for report in reports if report.labels is not None]
    findings = [finding for report in reports for finding in report.findings if finding not in quarantined]
    return SplitEntry(
        shards=shards,
        records=sum(shard.records for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        labels=_histogram(np.concatenate(labels)) if labels else None,
        images=_mean_size(info, np.concatenate([report.images for report in reports])),
        findings=dict(collections.Counter(finding.kind for finding in findings)),
    )


def _mean_size(info: Any, images: np.ndarray) -> dict[str, float] | None:
    """Of encoded images, [images, 3], or of tensors that are images, which all have one size."""
    if not len(images):
        shapes = [checks.image_shape(feature) for feature in info.features.values()]
        images = np.array([shape for shape in shapes if shape is not None][:1])
    if not len(images):
        return None
    return dict(zip(("height", "width", "channels"), images.mean(axis=0).round(2).tolist(), strict=True))


def _histogram(labels: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(labels[labels != checks.NO_VALUE], return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def _checksum(fingerprints: np.ndarray) -> str:
    return hashlib.sha256(fingerprints.astype("<i8").tobytes()).hexdigest()
