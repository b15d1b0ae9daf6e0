"""How fast records are written: TFDS's own builder against data.build's processes, on the same rows.

    python scripts/bench_build.py [--rows=200000] [--columns=10] [--workers=1,2]

Prints rows a second and the CPU seconds of the main process, which is what limits how many workers it can feed. Time to
import TensorFlow is not counted for TFDS, and counted once for workers, which import it in a process of their own.
"""

import argparse
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


def measure(name: str, num_rows: int, function: Callable[[], object]) -> None:
    """Runs it once and prints a line."""
    begin, cpu = time.perf_counter(), time.process_time()
    function()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{name:24} {num_rows / wall:10,.0f} rows/s   {wall:6.1f} s   main process {cpu:6.1f} CPU s", flush=True)


def main(argv: list[str]) -> None:
    """Prints one line for each way of writing."""
    parser = argparse.ArgumentParser(description="How fast records are written.")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=10, help="of float32")
    parser.add_argument("--workers", default="1,2", help="numbers of processes")
    options = parser.parse_args(argv[1:])
    tfds.disable_progress_bar()
    tf.train.Example()  # all of TensorFlow is loaded before the clock runs
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        columns = {f"c{index}": rng.random(options.rows, np.float32) for index in range(options.columns)}
        path = os.path.join(directory, "rows.parquet")
        pq.write_table(pa.table(columns | {"label": ["a", "b"] * (options.rows // 2)}), path, row_group_size=50_000)
        rows = table.Table(path, source.Options())
        config = shard_writer.DownloadConfig()
        serial = Serial(rows, directory)
        measure("TFDS, one thread", options.rows, lambda: serial.download_and_prepare(download_config=config))
        for count in options.workers.split(","):
            settings = build_flags.Settings(workers=int(count), name=f"rows_{count}")
            measure(f"data.build, {count} workers", options.rows, lambda s=settings: build.build(path, directory, s))


if __name__ == "__main__":
    main(sys.argv)
