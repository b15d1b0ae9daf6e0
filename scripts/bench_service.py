"""python scripts/bench_service.py: what other machines and copies of shards take off the machine that trains.

Starts a data service of two processes on this machine, and reads the files of scripts/bench_input.py by turns here and
through it. On one machine the service cannot make anything faster: what counts is the processor time of this process,
which is what a TPU host saves. Then by turns from files and from memory (--cache=memory).
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench_input  # noqa: E402
import tensorflow as tf  # noqa: E402

from data import cache, pipeline, service  # noqa: E402

PORTS = (5150, 5160)
TURNS = 3
# Batches before the clock starts: more than all buffers hold, or these would be measured.
WARM_UP = 24


def measure(dataset: tf.data.Dataset, batches: int, batch: int) -> tuple[float, float]:
    """(examples a second, microseconds of this process' processor time an example)."""
    iterator = iter(dataset)
    for _ in range(WARM_UP):
        next(iterator)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(iterator)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return batches * batch / wall, cpu / (batches * batch) * 1e6


def by_turns(ways: dict[str, Callable[[], tf.data.Dataset]], batches: int, batch: int) -> None:
    """Prints medians of all ways."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, make in ways.items():
            found[name].append(measure(make(), batches, batch))
    for name, figures in found.items():
        rates, costs = zip(*figures, strict=True)
        print(
            f"{name:28} {statistics.median(rates):9,.0f} examples/s {statistics.median(costs):7.1f} us of CPU/example"
        )


def compare(directory: pathlib.Path, addresses: tuple[str, ...], *, batch: int, batches: int, size: int | None) -> None:
    """Reads one dataset in all ways."""
    dataset = pipeline.open_dataset(str(directory))

    def read(**how) -> tf.data.Dataset:
        sizes = {"global_batch_size": batch, "per_replica_batch_size": batch, "image_size": size}
        return pipeline.train_batches(dataset, seed=0, shuffle_mib=64.0, **sizes, **how)

    copies = cache.to_memory([path for path, _ in dataset.split("train").filled])
    ways = {
        f"{directory.name}, here": read,
        f"{directory.name}, data service": lambda: service.read(addresses, lambda k, parts: read(part=(k, parts))),
        f"{directory.name}, cache=memory": lambda: read(copies=copies),
    }
    by_turns(ways, batches, batch)


def main() -> None:
    """Makes files, starts the service, measures."""
    with tempfile.TemporaryDirectory() as directory:
        images, photos = pathlib.Path(directory) / "images", pathlib.Path(directory) / "photos"
        bench_input.write_images(images, bench_input.IMAGES)
        bench_input.write_photos(photos)
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
            compare(photos, addresses, batch=64, batches=20, size=224)
            compare(images, addresses, batch=1024, batches=300, size=None)
        finally:
            for machine in machines:
                machine.kill()
                machine.communicate()


if __name__ == "__main__":
    main()
