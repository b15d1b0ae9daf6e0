"""The audit against only reading the same records, `cat` and other checksums, on the same files in one process.

    python -m scripts.bench_audit [--rounds=5] [--mb=200]

Prints MB/s, and MB per second of processor time, which a busy machine changes less; the ratio is of the latter. The
alternatives take turns, round by round.
"""

import functools
import hashlib
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from data import checks, framing, scan
from scripts.benches import results, turns

SHARDS = 4
SIZES = {"28x28 pixels": 784, "100 KB": 100_000}  # bytes of one feature
MB = 1e6
# Processor time of the audit over that of reading: it parses, checks values and takes fingerprints besides.
BOUND = 2.5


def _write(directory: pathlib.Path, size: int, total: int) -> list[scan.Shard]:
    """Shards of records of random bytes, `total` together."""
    rng = np.random.default_rng(0)
    count = max(1, total // size // SHARDS)
    shards = []
    for number in range(SHARDS):
        path = str(directory / f"{size}-{number}")
        noise = rng.bytes(size + count)
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(count):
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[noise[row : row + size]]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[row % 10]))
                features = tf.train.Features(feature={"image": image, "label": label})
                writer.write(tf.train.Example(features=features).SerializeToString())
        shards.append(scan.Shard("train", path, count))
    return shards


def _runs(shards: list[scan.Shard], size: int, threads: int) -> dict[str, Callable[[], object]]:
    image = tfds.features.Tensor(shape=(size,), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES)
    features = tfds.features.FeaturesDict({"image": image, "label": tfds.features.ClassLabel(num_classes=10)})
    check = checks.RecordChecks(types.SimpleNamespace(features=features, supervised_keys=("image", "label")))
    paths = [shard.path for shard in shards]

    def read() -> None:
        for path in paths:
            for _ in tf.data.TFRecordDataset(path, buffer_size=4 << 20).batch(max(1, (4 << 20) // size)).prefetch(2):
                pass

    return {
        "cat": lambda: subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True),
        "TFRecordDataset": read,
        "audit, 1 thread": lambda: scan.scan(shards, check, threads=1),
        f"audit, {threads} threads": lambda: scan.scan(shards, check, threads=threads),
        "framing.py": lambda: [frame for path in paths[:1] for frame in framing.frames(framing.load(path))],
        "SHA-256 of the file": lambda: [hashlib.sha256(framing.load(path).data).digest() for path in paths],
    }


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=5, mb=4)
    parser.add_argument("--mb", type=int, default=200)
    options = parser.parse_args()
    report = results.Report("audit", options.json)
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as directory:
            shards = _write(pathlib.Path(directory), size, int(options.mb * MB))
            _compare(report, name, shards, size, options.rounds)
    return report.exit_code()


def _compare(report: results.Report, name: str, shards: list[scan.Shard], size: int, rounds: int) -> None:
    runs = _runs(shards, size, threads=os.cpu_count() or 1)
    megabytes = sum(os.path.getsize(shard.path) for shard in shards) / MB
    print(f"records of {name}, {megabytes:.0f} MB")
    ways = {run: functools.partial(_timed, call) for run, call in runs.items()}
    turns.alternate(ways, 1)  # fills caches
    taken = turns.alternate(ways, rounds)
    for run in runs:
        read = megabytes / SHARDS if run == "framing.py" else megabytes
        wall, processor = (statistics.median(read / turn[run][which] for turn in taken) for which in (0, 1))
        print(f"  {run:20s} {wall:7.0f} MB/s, {processor:7.0f} a core")
    ratios = [turn["audit, 1 thread"][1] / turn["TFRecordDataset"][1] for turn in taken]
    report.add(f"records of {name}", "processor time, audit / only reading", ratios, at_most=BOUND)


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    begun, used = time.perf_counter(), _processor_secs()
    call()
    return time.perf_counter() - begun, _processor_secs() - used


def _processor_secs() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    sys.exit(main())
