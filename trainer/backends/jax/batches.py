"""Batches from tf.data onto the devices, ahead of the step that needs them."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.backends.jax.internals import REPLICAS

# Batches on the devices beside that of the step that runs.
_AHEAD = 2
# How long a thread whose queue is full does not see that nobody wants its batches any more.
_LOOK_SECS = 1.0


def place(mesh: Mesh, shares: Sequence[Any]) -> Any:
    """One global batch of the shares of this process' replicas, each on its device.

    On one CPU alone it stays NumPy: it is there already, and a step takes it sooner than JAX makes an array of it.
    """
    if mesh.size == 1 and mesh.local_devices[0].platform == "cpu":
        return shares[0]
    sharding, devices = NamedSharding(mesh, PartitionSpec(REPLICAS)), list(mesh.local_devices)

    def placed(*parts: Any) -> jax.Array:
        shape = (parts[0].shape[0] * mesh.size, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(list(parts), devices))

    return keras.tree.map_structure(placed, *shares)


class Placed:
    """Batches of a dataset of shares; any number of iterators over it."""

    def __init__(self, mesh: Mesh, dataset: Any):
        self._mesh, self._dataset = mesh, dataset

    def __iter__(self) -> "PlacedIterator":
        return PlacedIterator(self._mesh, self._dataset.as_numpy_iterator())


class PlacedIterator:
    """Reads and places on a thread, so that the next batch is there when a step ends.

    The thread ends with the data, or when nobody holds the iterator any more.
    """

    def __init__(self, mesh: Mesh, shares: Iterator[Any]):
        self._queue: queue.Queue = queue.Queue(_AHEAD)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        arguments = (self._queue, self._stopped, mesh, shares)
        thread = threading.Thread(target=_fill, args=arguments, name="batches", daemon=True)
        thread.start()
        weakref.finalize(self, _stop, self._queue, self._stopped, thread)

    def __iter__(self) -> "PlacedIterator":
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        batch = self._queue.get()
        if isinstance(batch, BaseException):
            self._error = batch
            raise batch
        return batch

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is on the devices, so that asking for it does not wait."""
        return not self._queue.empty()


def _stop(batches: queue.Queue, stopped: threading.Event, thread: threading.Thread) -> None:
    """Lets the thread end, and waits for it: at the end of the process it must not be in the middle of JAX."""
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:
            batches.get_nowait()
    thread.join(_LOOK_SECS)


def _fill(batches: queue.Queue, stopped: threading.Event, mesh: Mesh, shares: Iterator[Any]) -> None:
    def put(item: Any) -> None:
        while not stopped.is_set():
            try:
                batches.put(item, timeout=_LOOK_SECS)
                return
            except queue.Full:
                continue

    try:
        while not stopped.is_set():
            put(place(mesh, [next(shares) for _ in range(len(mesh.local_devices))]))
    except BaseException as error:  # whatever the pipeline raises is raised where the batch is asked for
        put(error)
