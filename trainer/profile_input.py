"""Measures each stage of the input pipeline against what the train step can take.

The pipeline is built up to and including each stage in turn, and each is timed like training pulls from it: in the
graph, without a look of Python at every batch. Stages and model take turns for several rounds, because a shared machine
is faster in one minute than in the next. A turn begins with a new iterator, goes unmeasured through one shuffle window
so that no buffer is full in advance, and is measured over whole windows: within one, batches come in bursts. Each turn
reads in another order, so that it does not find the files in memory that the turn before has read.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from data import catalog, image_header, order, parse, pipeline, records, stages, synthetic
from data.augment import crops
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.profile_report import Circumstances, Rate

ROUNDS = 5
# A round is not begun when this much time is gone, but for the first ones, without which there is no spread.
BUDGET_SECS = 60.0
LEAST_ROUNDS = 2
# A turn measures whole windows for at least the one, and is cut off after the other.
TURN_LEAST_SECS, TURN_MOST_SECS = 0.5, 4.0
# A call pulls what takes about so long: long enough for Python to cost nothing, short enough to be cut off.
_CALL_SECS = 0.1
_JPEG_MAGIC = b"\xff\xd8\xff"


class Trained(Protocol):
    """What is needed of the compiled model, see `replicated.Replicated`."""

    devices: Cluster

    def run_train_loop(self, iterator: Iterator, steps: int) -> Any:
        """Trains `steps` steps; of what it returns only `input_wait_secs` is of interest here."""


@dataclasses.dataclass(frozen=True)
class Images:
    """How images are stored, as far as the first records tell.

    formats: "jpeg", "png" or "other"; () where no feature is an encoded image.
    shorter_side: mean in pixels, None where headers do not tell.
    """

    formats: tuple[str, ...]
    shorter_side: float | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """Rates of the pipeline up to and including each stage, of the model, and how images turned out to be stored."""

    stages: tuple[Rate, ...]
    model: Rate
    images: Images


def measure(timed: Sequence[stages.Stage], trained: Trained, *, steps_per_loop: int, seed: int) -> Measured:
    """Times stages and model by turns.

    Args:
      timed: the pipeline up to each of its stages; the last but one makes (x, y) of one replica, the last all of it.
      trained: the compiled model. It is trained on one and the same batch, and is of no use afterwards.
      steps_per_loop: most steps in one call of the model.
      seed: of the order of the first turn; each turn has another.
    """
    timers = [StageTimer(stage, trained.devices, seed) for stage in timed]
    model = ModelTimer(trained, next(iter(timed[-2].batches(seed))), steps_per_loop)
    rates = interleave([*timers, model])
    images = [
        stored_images(timer.first) for stage, timer in zip(timed, timers, strict=True) if stage.name == stages.PARSE
    ]
    return Measured(
        tuple(timer.rate(found) for timer, found in zip(timers, rates[:-1], strict=True)),
        model.rate(rates[-1]),
        images[0] if images else Images((), None),
    )


def circumstances(
    dataset: pipeline.Dataset | synthetic.Dataset, config: Config, images: Images, *, device_kind: str, devices: str
) -> Circumstances:
    """What the advice depends on; `device_kind` and `devices` as in `cluster.Cluster`."""
    shards, streams, size, remote, side = 0, 0, 0.0, False, config.image_size
    if isinstance(dataset, pipeline.Dataset):
        split = dataset.split(config.train_split)
        planned = pipeline.plan_order(
            dataset,
            config.train_split,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle_mib=config.shuffle_mib,
        )
        shards, streams, size = len(split.filled), planned.num_streams, split.record_bytes * split.num_examples
        remote = catalog.is_remote(dataset.directory) and config.cache == "none"
        if side and parse.crops_photographs(parse.select_fields(dataset.info, side)):
            side = math.ceil(side / crops.SIDE)
    return Circumstances(
        dataset=dataset.name,
        num_shards=shards,
        num_streams=streams,
        most_streams=order.MAX_STREAMS,
        dataset_bytes=size,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        remote=remote,
        image_size=config.image_size,
        wanted_side=side,
        image_formats=images.formats,
        image_side=images.shorter_side,
        cores=records.cores(),
        device_kind=device_kind,
        devices=devices,
    )


class StageTimer:
    """Times one stage, a turn a call."""

    def __init__(self, stage: stages.Stage, devices: Cluster, seed: int):
        self.first: Any = None  # an element, to look at
        self._stage, self._devices, self._seed = stage, devices, seed
        self._examples_per_element = 0
        self._bytes_per_example: list[float] = []
        self._loop = tf.function(self._make_loop, autograph=False)

    def _pull(self, iterator: Iterator, count: int) -> None:
        if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            self._loop(iterator, tf.constant(count))
            return
        for _ in range(count):
            for array in self._arrays(next(iterator)):
                getattr(array, "block_until_ready", lambda: None)()  # of JAX; NumPy's is there

    def _make_loop(self, iterator: Iterator, count: tf.Tensor) -> tf.Tensor:
        def body(done: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([done]):
                element = next(iterator)
            with tf.control_dependencies(self._arrays(element)):
                return done + 1

        return tf.while_loop(lambda done: done < count, body, [tf.constant(0)], parallel_iterations=1)

    def _arrays(self, element: Any) -> list[Any]:
        return [t for v in tf.nest.flatten(element) for t in self._devices.local(v)]

    def __call__(self, turn: int) -> float:
        """Examples/s in one turn."""
        iterator = iter(self._stage.batches(self._seed + turn))
        began = time.perf_counter()
        self._look_at(next(iterator))
        elements, secs = self._windows(iterator, time.perf_counter() - began, least_secs=0.0)
        elements, secs = self._windows(iterator, secs / elements, least_secs=TURN_LEAST_SECS)
        return elements * self._examples_per_element / secs

    def _look_at(self, element: Any) -> None:
        leaves = [self._devices.local(value) for value in tf.nest.flatten(element)]
        self.first = element
        self._examples_per_element = sum(int(tensor.shape[0]) for tensor in leaves[0])
        self._bytes_per_example.append(sum(_num_bytes(t) for ts in leaves for t in ts) / self._examples_per_element)

    def _windows(self, iterator: Iterator, secs_each: float, *, least_secs: float) -> tuple[int, float]:
        """Pulls whole windows for `least_secs`, cut off at TURN_MOST_SECS; returns elements and seconds.

        secs_each: what an element takes, as far as is known before.
        """
        elements, began = 0, time.perf_counter()
        while True:
            windows = max(1, int((least_secs - secs_each * elements) / (secs_each * self._stage.window)))
            end = elements + windows * self._stage.window
            while elements < end:
                count = min(end - elements, max(1, int(_CALL_SECS / secs_each)))
                self._pull(iterator, count)
                elements += count
                secs = time.perf_counter() - began
                if secs > TURN_MOST_SECS:
                    return elements, secs
            if secs >= least_secs:
                return elements, secs
            secs_each = secs / elements

    def rate(self, rounds: Sequence[float]) -> Rate:
        """What was found, from the examples/s of each turn."""
        sizes = self._bytes_per_example
        return Rate(self._stage.name, tuple(rounds), sum(sizes) / len(sizes))


class ModelTimer:
    """Times the train step on one batch that is there already; the model is trained on it, and of no use afterwards.

    Args:
        trained: the compiled model.
        batch: (x, y) of one replica, which every replica gets.
        steps_per_loop: most steps in one call.
    """

    def __init__(self, trained: Trained, batch: Any, steps_per_loop: int):
        constant = tf.data.Dataset.from_tensors(batch).repeat()
        distributed = trained.devices.distribute(lambda context: constant.prefetch(2))
        self._trained, self._iterator = trained, iter(distributed)
        leaves = tf.nest.flatten(batch)
        examples = int(leaves[0].shape[0])
        self._global_batch_size = examples * trained.devices.num_replicas
        self._bytes_per_example = sum(_num_bytes(array) for array in leaves) / examples
        self._run(1)  # compiles
        self._steps = max(1, min(steps_per_loop, int(TURN_LEAST_SECS / self._run(1))))

    def _run(self, steps: int) -> float:
        """Seconds of a loop, without what little it waited for the constant batch."""
        began = time.perf_counter()
        waited = self._trained.run_train_loop(self._iterator, steps).input_wait_secs
        return max(time.perf_counter() - began - waited, 1e-9)

    def __call__(self, turn: int) -> float:
        """Examples/s in one turn: loops until it has lasted long enough."""
        steps, secs = 0, 0.0
        while secs < TURN_LEAST_SECS:
            secs += self._run(self._steps)
            steps += self._steps
        return steps * self._global_batch_size / secs

    def rate(self, rounds: Sequence[float]) -> Rate:
        """What was found, from the examples/s of each turn."""
        return Rate("model", tuple(rounds), self._bytes_per_example)


def interleave(timers: Sequence[Callable[[int], float]], *, budget_secs: float = BUDGET_SECS) -> list[list[float]]:
    """Lets each timer have its turn in every round; returns for each the examples/s of each round."""
    rates: list[list[float]] = [[] for _ in timers]
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - began > budget_secs:
            break
        for index, timer in enumerate(timers):
            rates[index].append(timer(number * len(timers) + index))
    return rates


def stored_images(element: Any) -> Images:
    """What the strings of parsed, undecoded records tell of the images in them."""
    formats, sides = set(), []
    for tensor in tf.nest.flatten(element):
        if tensor.dtype != tf.string:
            continue
        for value in tensor.numpy().ravel():
            header = image_header.read(value[: image_header.PREFIX_BYTES])
            if header is None:
                continue
            jpeg = value.startswith(_JPEG_MAGIC)
            formats.add("jpeg" if jpeg else "other" if header == image_header.UNKNOWN else "png")
            if header.height and header.width:
                sides.append(min(header.height, header.width))
    return Images(tuple(sorted(formats)), sum(sides) / len(sides) if sides else None)


def _num_bytes(array: Any) -> int:
    """Of the contents; for strings without what a string itself takes."""
    if array.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(array)))
    return int(np.asarray(array).nbytes)
