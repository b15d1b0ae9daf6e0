"""What other machines and copies of shards take off the machine that trains.

    python -m scripts.bench_service [--rounds=3]

Starts a data service of two processes on this machine, and reads the files of bench_input by turns here and
through it. On one machine the service cannot make anything faster: what counts is the processor time of this process,
which is what a TPU host saves. Then by turns from files and from memory (--cache=memory).
"""

import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

from data import cache, pipeline, service
from scripts.benches import input_files, results, turns

ROOT = pathlib.Path(__file__).resolve().parent.parent

PORTS = (5150, 5160)
# Batches before the clock starts: more than all buffers hold, or these would be measured.
WARM_UP = 24


HERE = "read here"


def measure(make: Callable[[], tf.data.Dataset], batches: int, batch: int) -> turns.Answer:
    """Examples a second, and microseconds of this process' processor time an example."""
    iterator = iter(make())
    for _ in range(WARM_UP):
        next(iterator)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(iterator)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"rate": batches * batch / wall, "cpu_us": cpu / (batches * batch) * 1e6}


def compare(
    report: results.Report,
    directory: pathlib.Path,
    addresses: tuple[str, ...],
    rounds: int,
    *,
    batch: int,
    batches: int,
    size: int | None,
) -> None:
    """Reads one dataset in all ways; reports what they take of this process against reading here."""
    dataset = pipeline.open_dataset(str(directory))

    def read(**how) -> tf.data.Dataset:
        sizes = {"global_batch_size": batch, "per_replica_batch_size": batch, "image_size": size}
        return pipeline.train_batches(dataset, seed=0, shuffle_mib=64.0, **sizes, **how)

    copies = cache.to_memory([path for path, _ in dataset.split("train").filled])
    ways = {
        HERE: read,
        "data service": lambda: service.read(addresses, lambda k, parts: read(part=(k, parts))),
        "cache=memory": lambda: read(copies=copies),
    }
    measured = {name: functools.partial(measure, make, batches, batch) for name, make in ways.items()}
    taken = turns.alternate(measured, rounds)
    for name in ways:
        rate, cpu = (statistics.median(turn[name][key] for turn in taken) for key in ("rate", "cpu_us"))
        print(f"  {directory.name}, {name:14} {rate:9,.0f} examples/s {cpu:7.1f} us of CPU/example")
        if name != HERE:
            ratios = [turn[name]["cpu_us"] / turn[HERE]["cpu_us"] for turn in taken]
            report.add(directory.name, f"processor time, {name} / {HERE}", ratios)


def main() -> int:
    """Makes files, starts the service, measures; returns the exit code."""
    options = results.parser(__doc__, rounds=3).parse_args()
    report = results.Report("service", options.json)
    with tempfile.TemporaryDirectory() as directory:
        images, photos = pathlib.Path(directory) / "images", pathlib.Path(directory) / "photos"
        input_files.write_images(images, input_files.IMAGES)
        input_files.write_photos(photos)
        command = [sys.executable, "-m", "data.service", "--host=127.0.0.1"]
        machines = [
            subprocess.Popen([*command, f"--port={port}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for port in PORTS
        ]
        try:
            for machine in machines:
                if machine.stdout is None or not machine.stdout.readline():
                    sys.exit("the data service did not start")
            addresses = service.parse(",".join(f"127.0.0.1:{port}" for port in PORTS))
            service.check(addresses)
            compare(report, photos, addresses, options.rounds, batch=64, batches=20, size=224)
            compare(report, images, addresses, options.rounds, batch=1024, batches=300, size=None)
        finally:
            for machine in machines:
                machine.kill()
                machine.communicate()
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
