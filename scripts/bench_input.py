"""How fast the input pipeline is, against its limit and against the usual ways.

    python -m scripts.bench_input [--parts=abcm] [--rounds=5] [--clock=cpu] [--dir=DIR]

Makes its own files, and compares everything on them in one run. Alternatives take turns and a ratio is the median over
the turns, because a shared machine is faster in one minute than in the next; every turn begins with new iterators and
unmeasured batches.

a  records: 60,000 images of 28x28 uint8 in 16 shards, batches of 1,024.
b  photographs: 224x224 crops of JPEGs, cut from the two that scikit-learn ships.
c  memory: resident set of a process over 20 epochs of records, with two values of shuffle_mib.
m  mixing: how evenly the classes of a dataset sorted by class are spread over its batches.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import absl.logging
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from data import order, pipeline, records
from data.augment import crops
from scripts.benches import results
from scripts.benches.input_files import CLASSES, IMAGES, PHOTOS, write_images, write_photos
from scripts.benches.results import Report

BATCH = 1_024
PHOTO_BATCH = 64
CROP = 224
SHUFFLE_MIB = 64.0
MIB = 1 << 20
AUTO = tf.data.AUTOTUNE
# What the article on which many pipelines are modelled shuffles: decoded examples.
USUAL_SHUFFLE = 10_000
MEMORY_MIB = (16.0, 272.0)  # shuffle_mib of the two processes of part c
MEMORY_EPOCHS = 20
MEMORY_IMAGES = 400_000
MIXING_EXAMPLES = 1 << 16
MIXING_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Way:
    """A pipeline to be timed: makes a dataset whose elements hold `examples` each."""

    make: Callable[[], tf.data.Dataset]
    examples: int


@dataclasses.dataclass(frozen=True)
class Turns:
    """How ways are compared: how many times, and by which clock (seconds)."""

    rounds: int
    clock: Callable[[], float]


def share_of_cores() -> float:
    """Seconds that this process would have taken with all cores to itself and always busy."""
    return time.process_time() / records.cores()


# --- a: records -------------------------------------------------------------------------------------------------------


def ours(directory: pathlib.Path, shuffle_mib: float = SHUFFLE_MIB) -> tf.data.Dataset:
    """The pipeline of this repository."""
    dataset = pipeline.open_dataset(str(directory))
    return pipeline.train_batches(
        dataset, global_batch_size=BATCH, per_replica_batch_size=BATCH, seed=0, shuffle_mib=shuffle_mib
    )


def limit(paths: list[str], streams: int, tuned: bool) -> tf.data.Dataset:
    """Streams that read and batch; no shuffle, no parse."""
    parts = [
        tf.data.TFRecordDataset(paths[stream::streams], buffer_size=4 << 20)
        .repeat()
        .batch(BATCH // streams, drop_remainder=True)
        .prefetch(2)
        for stream in range(streams)
    ]
    options = tf.data.Options()
    options.autotune.enabled = tuned
    return tf.data.Dataset.zip(tuple(parts)).with_options(options)


SPECS = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}


def one_by_one(paths: list[str]) -> tf.data.Dataset:
    """Parse and cast each record, shuffle decoded examples, batch."""

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.parse_single_example(record, SPECS)
        image = tf.reshape(tf.io.decode_raw(values["image"], tf.uint8), [28, 28, 1])
        return tf.cast(image, tf.float32) / 255, values["label"]

    files = tf.data.Dataset.from_tensor_slices(paths)
    read = files.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=AUTO)
    examples = read.map(parse, num_parallel_calls=AUTO).shuffle(USUAL_SHUFFLE).repeat()
    return examples.batch(BATCH, drop_remainder=True).prefetch(AUTO)


def whole_batches(paths: list[str]) -> tf.data.Dataset:
    """Interleave, shuffle serialized records, batch, parse the whole batch."""

    def parse(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.parse_example(batch, SPECS)
        image = tf.reshape(tf.io.decode_raw(values["image"], tf.uint8), [BATCH, 28, 28, 1])
        return image, tf.cast(values["label"], tf.int32)

    files = tf.data.Dataset.from_tensor_slices(paths)
    read = files.interleave(tf.data.TFRecordDataset, cycle_length=16, block_length=16, num_parallel_calls=AUTO)
    batches = read.shuffle(USUAL_SHUFFLE).repeat().batch(BATCH, drop_remainder=True)
    return batches.map(parse, num_parallel_calls=AUTO).prefetch(AUTO)


def by_tfds(directory: pathlib.Path, read_config: tfds.ReadConfig | None) -> tf.data.Dataset:
    """What TFDS's own guide says: load, shuffle, batch, prefetch."""
    builder = tfds.builder_from_directory(directory / "1.0.0")
    examples = builder.as_dataset(split="train", as_supervised=True, read_config=read_config)
    return examples.shuffle(USUAL_SHUFFLE).repeat().batch(BATCH, drop_remainder=True).prefetch(AUTO)


def rate(way: Way, batches: int, warm_up: int, clock: Callable[[], float]) -> float:
    """Examples per second of a new iterator, after `warm_up` batches."""
    iterator = iter(way.make())
    for _ in range(warm_up):
        next(iterator)
    begin = clock()
    for _ in range(batches):
        next(iterator)
    return batches * way.examples / (clock() - begin)


def in_turns(ways: dict[str, tuple[Way, int]], turns: Turns, warm_up: int) -> dict[str, list[float]]:
    """Rates of all ways, one after the other and again; with each way the batches that are timed."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns.rounds):
        for name, (way, batches) in ways.items():
            rates[name].append(rate(way, batches, warm_up, turns.clock))
    for name, values in rates.items():
        print(f"  {name:44s} {statistics.median(values):12,.0f} examples/s")
    return rates


def compare(report: Report, what: str, rates: dict[str, list[float]], bounds: Mapping[str, float | None]) -> None:
    """Reports the ratio of "ours" over each other way of the same turn, with the least it may be."""
    for over, bound in bounds.items():
        ratios = [a / b for a, b in zip(rates["ours"], rates[over], strict=True)]
        note = f"{statistics.median(rates['ours']):,.0f} / {statistics.median(rates[over]):,.0f} examples/s"
        report.add(what, f"ours / {over}", ratios, at_least=bound, note=note)


def part_a(report: Report, directory: pathlib.Path, turns: Turns) -> None:
    """Small records: what handling them costs."""
    images = directory / "images"
    write_images(images, IMAGES)
    paths = sorted(str(path) for path in (images / "1.0.0").glob("*.tfrecord-*"))
    uncached = tfds.ReadConfig(try_autocache=False)
    ways = {
        "ours": (Way(lambda: ours(images), BATCH), 300),
        "limit (4 streams)": (Way(lambda: limit(paths, 4, True), BATCH), 300),
        "limit (16 streams)": (Way(lambda: limit(paths, 16, True), BATCH), 300),
        "limit (4 streams, autotune off as ours)": (Way(lambda: limit(paths, 4, False), BATCH), 300),
        "one by one": (Way(lambda: one_by_one(paths), BATCH), 30),
        "interleave, whole batches": (Way(lambda: whole_batches(paths), BATCH), 150),
        "tfds": (Way(lambda: by_tfds(images, uncached), BATCH), 30),
        "tfds, all in its memory cache": (Way(lambda: by_tfds(images, None), BATCH), 100),
    }
    rates = in_turns(ways, turns, warm_up=60)  # an epoch, so that TFDS's cache is full
    bounds = {
        "limit (4 streams)": 0.6,
        "limit (16 streams)": 0.6,
        "limit (4 streams, autotune off as ours)": None,
        "one by one": 15,
        "interleave, whole batches": 1.5,
        "tfds": 5,
        "tfds, all in its memory cache": None,
    }
    compare(report, "small records", rates, bounds)


# --- b: photographs ---------------------------------------------------------------------------------------------------


def part_b(report: Report, directory: pathlib.Path, turns: Turns) -> None:
    """Photographs: nothing but decoding and cropping may cost."""
    photos = directory / "photos"
    write_photos(photos)
    dataset = pipeline.open_dataset(str(photos))
    paths = list(dataset.split("train").paths)
    parsed = tf.data.TFRecordDataset(paths).batch(PHOTOS).map(lambda batch: tf.io.parse_example(batch, SPECS))
    encoded = next(iter(parsed))["image"]  # [PHOTOS] string, in memory

    def make_ours() -> tf.data.Dataset:
        return pipeline.train_batches(
            dataset,
            global_batch_size=PHOTO_BATCH,
            per_replica_batch_size=PHOTO_BATCH,
            seed=0,
            shuffle_mib=SHUFFLE_MIB,
            image_size=CROP,
        )

    def only_crop() -> tf.data.Dataset:
        places = tf.random.Generator.from_seed(0).uniform([PHOTOS, 2])
        images = tf.data.Dataset.from_tensor_slices((encoded, places)).repeat()

        def crop(encoded: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
            return crops.crop_encoded(encoded, place, crops.square, CROP, 3, is_jpeg=True)

        return images.map(crop, num_parallel_calls=AUTO)

    def whole() -> tf.data.Dataset:
        def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            values = tf.io.parse_single_example(record, SPECS)
            image = tf.io.decode_jpeg(values["image"], channels=3)
            return tf.cast(tf.image.resize(image, [CROP, CROP]), tf.uint8), values["label"]

        read = tf.data.Dataset.from_tensor_slices(paths).interleave(
            tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=AUTO
        )
        images = read.shuffle(PHOTOS).repeat().map(decode, num_parallel_calls=AUTO)
        return images.batch(PHOTO_BATCH, drop_remainder=True).prefetch(AUTO)

    ways = {
        "ours": (Way(make_ours, PHOTO_BATCH), 20),
        "decode and crop only": (Way(only_crop, 1), 20 * PHOTO_BATCH),
        "decode whole, then resize": (Way(whole, PHOTO_BATCH), 20),
    }
    rates = in_turns(ways, turns, warm_up=4)
    compare(report, "photographs", rates, {"decode and crop only": 0.9, "decode whole, then resize": 1.3})


# --- c: memory --------------------------------------------------------------------------------------------------------


def resident_mib() -> float:
    """Resident set of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / MIB


def read_epochs(images: pathlib.Path, shuffle_mib: float) -> None:
    """Prints the largest resident set of each epoch, MiB, as JSON: a process of its own."""
    iterator = iter(ours(images, shuffle_mib))
    largest = []
    for _ in range(MEMORY_EPOCHS):
        largest.append(0.0)
        for _ in range(MEMORY_IMAGES // BATCH):
            next(iterator)
            largest[-1] = max(largest[-1], resident_mib())
    print(json.dumps(largest))


def part_c(report: Report, directory: pathlib.Path, turns: Turns) -> None:
    """Memory: what one more MiB of shuffle_mib takes, and whether it grows."""
    del turns
    images = directory / "many_images"
    write_images(images, MEMORY_IMAGES)
    sets = {}
    for mib in MEMORY_MIB:
        command = [sys.executable, "-m", "scripts.bench_input", f"--read_epochs={mib}", f"--dir={directory}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        sets[mib] = json.loads(done.stdout.splitlines()[-1])
        print(f"  shuffle_mib={mib:g}: {' '.join(f'{value:.0f}' for value in sets[mib])} MiB resident, by epoch")
    small, large = MEMORY_MIB
    base = max(sets[small]) - small
    what = f"memory of {MEMORY_EPOCHS} epochs"
    expected = f"largest / base of {base:.0f} MiB + shuffle_mib"
    report.add(what, expected, [max(sets[large]) / (base + large)], at_most=1.1)
    # The first epochs fill the allocator's arenas.
    late, early = max(sets[large][15:]), max(sets[large][5:10])
    report.add(what, "epochs 16 to 20 / 6 to 10", [late / early], at_most=1.03)


# --- m: mixing --------------------------------------------------------------------------------------------------------


def mixing(shards: int, window: float) -> tuple[float, float]:
    """How well batches mix data sorted by class, over an epoch.

    Args:
      shards: files of equal size.
      window: memory for shuffling, as a fraction of the dataset.

    Returns:
      Classes in a batch, mean; and the variance of a class's count in a batch, as a multiple of what batches drawn
      at random from the whole dataset would have.
    """
    record_bytes = 1_000
    size = MIXING_EXAMPLES * (record_bytes + order.RECORD_OVERHEAD_BYTES) / MIB
    planned = order.plan(
        (MIXING_EXAMPLES // shards,) * shards,
        record_bytes,
        seed=0,
        global_batch_size=MIXING_BATCH,
        shuffle_mib=size * window,
    )
    ids = planned.record_ids(0, MIXING_EXAMPLES // MIXING_BATCH).numpy()  # [steps, B, 2]
    labels = (ids[..., 0] * (MIXING_EXAMPLES // shards) + ids[..., 1]) * CLASSES // MIXING_EXAMPLES
    counts = (labels[..., np.newaxis] == np.arange(CLASSES)).sum(axis=1)  # [steps, classes]
    at_random = MIXING_BATCH / CLASSES * (1 - 1 / CLASSES)
    return (counts > 0).sum(axis=1).mean(), ((counts - MIXING_BATCH / CLASSES) ** 2).mean() / at_random


def part_m(report: Report, directory: pathlib.Path, turns: Turns) -> None:
    """Mixing of data sorted by class: classes in a batch, and the variance of their counts over that of chance."""
    del report, directory, turns
    windows = (0.01, 0.1, 1.0, 3.0)
    print(f"  batches of {MIXING_BATCH} from {CLASSES} classes; by shuffle_mib as a fraction of the dataset's size:")
    print("  shards " + "".join(f"{window:>20.0%}" for window in windows))
    for shards in (1, 4, 16, 64, 256):
        cells = [f"{classes:.1f} classes, x{excess:.1f}" for classes, excess in (mixing(shards, w) for w in windows)]
        print(f"  {shards:6d} " + "".join(f"{cell:>20}" for cell in cells))


def main() -> int:
    """Runs the parts asked for; 0 where all bounds hold."""
    parts = {"a": part_a, "b": part_b, "c": part_c, "m": part_m}
    parser = results.parser(__doc__, rounds=5, parts="ab")
    parser.add_argument("--parts", default="abcm", help="which parts, e.g. ac")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, for machines that do other work, where wall time measures that",
    )
    parser.add_argument(
        "--dir", type=pathlib.Path, help="where the files are made, and found again; default: a temporary one"
    )
    parser.add_argument("--read_epochs", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    absl.logging.set_verbosity(absl.logging.ERROR)  # TFDS warns of its own deprecations
    if options.read_epochs is not None:
        read_epochs(options.dir / "many_images", options.read_epochs)
        return 0
    turns = Turns(options.rounds, time.perf_counter if options.clock == "wall" else share_of_cores)
    report = Report("input", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.dir or pathlib.Path(temporary)
        for part in options.parts:
            print(f"{part}  {parts[part].__doc__}")
            parts[part](report, directory, turns)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
