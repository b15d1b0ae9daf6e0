"""How fast records are written: TFDS's own builder against data.build's processes, on the same rows.

    python -m scripts.bench_build [--rounds=3] [--rows=200000] [--columns=10] [--workers=1,2]

Prints rows a second and the CPU seconds of the main process, which is what limits how many workers it can feed. Time to
import TensorFlow is not counted for TFDS, and counted once for workers, which import it in a process of their own.
"""

import argparse
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
import tensorflow_datasets as tfds

from data import build, build_flags, shard_writer
from data.datasets.sources import source, table
from scripts.benches import results, turns

SERIAL = "TFDS, one thread"


class Serial(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The rows of a table, written by TFDS."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None

    def __init__(self, rows: table.Table, data_dir: str):
        self.name = "serial"
        self._rows = rows
        super().__init__(data_dir=data_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(dict(self._rows.features)))

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator:
        for task in (task for piece in self._rows.pieces() for task in self._rows.open(piece)):
            for _, key, example in self._rows.examples(task):
                yield key, example


def measure(name: str, num_rows: int, function: Callable[[], object]) -> turns.Answer:
    """Runs it once and prints a line; rows a second."""
    begin, cpu = time.perf_counter(), time.process_time()
    function()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{name:24} {num_rows / wall:10,.0f} rows/s   {wall:6.1f} s   main process {cpu:6.1f} CPU s", flush=True)
    return {"ms": 1e3 * wall}


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=3, rows=2_000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=10, help="of float32")
    parser.add_argument("--workers", default="1,2", help="numbers of processes")
    options = parser.parse_args()
    report = results.Report("build", options.json)
    tfds.disable_progress_bar()
    tf.train.Example()  # all of TensorFlow is loaded before the clock runs
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        columns = {f"c{index}": rng.random(options.rows, np.float32) for index in range(options.columns)}
        path = os.path.join(directory, "rows.parquet")
        pq.write_table(pa.table(columns | {"label": ["a", "b"] * (options.rows // 2)}), path, row_group_size=50_000)
        taken = turns.alternate(_ways(path, directory, options), options.rounds)
    for name in taken[0]:
        if name != SERIAL:
            ratios = turns.ratios(taken, name, SERIAL)
            report.add(f"{options.rows:,} rows of {options.columns} columns", f"{name} / {SERIAL}", ratios)
    return report.exit_code()


def _ways(path: str, directory: str, options: argparse.Namespace) -> dict[str, Callable[[], turns.Answer]]:
    """Each writes into a directory of its own at every turn."""
    numbers = itertools.count()

    def serial() -> None:
        rows = table.Table(path, source.Options())
        config = shard_writer.DownloadConfig()
        Serial(rows, os.path.join(directory, str(next(numbers)))).download_and_prepare(download_config=config)

    def parallel(workers: int) -> None:
        settings = build_flags.Settings(workers=workers, name="rows")
        build.build(path, os.path.join(directory, str(next(numbers))), settings)

    ways: dict[str, Callable[[], object]] = {SERIAL: serial}
    for count in map(int, options.workers.split(",")):
        ways[f"data.build, {count} worker{'s' if count > 1 else ''}"] = functools.partial(parallel, count)
    return {name: functools.partial(measure, name, options.rows, way) for name, way in ways.items()}


if __name__ == "__main__":
    sys.exit(main())
