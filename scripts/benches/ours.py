"""The loop of this project, as the benches hold it to others."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras

from scripts.benches.turns import Run
from trainer import cluster, hardware, replicated


@functools.cache
def connected(replicas: int | None) -> cluster.Cluster:
    """The devices of this process, and of others where TF_CONFIG names them; they can be set up once."""
    workers = {name: value for name, value in os.environ.items() if name == "TF_CONFIG"}
    target = hardware.resolve(tpu=None, replicas=replicas, environ=workers)
    return cluster.connect(target, connect_timeout_secs=60)


def loop(
    model: Callable[[], keras.Model],
    devices: cluster.Cluster,
    batch_spec: tuple,
    batches: Callable[[], Any],
    *,
    xla: bool = False,
) -> tuple[replicated.Replicated, Run]:
    """A compiled model on the devices, and what trains it.

    Args:
        model: makes it.
        devices: from `connected`.
        batch_spec: `(x, y)` of `keras.KerasTensor`, of one replica's share.
        batches: makes the `tf.data.Dataset` of shares of this process, for ever.
        xla: as `Replicated` has it.
    """
    with devices.scope():
        made = model()
    trained = replicated.Replicated(made, devices, batch_spec, xla=xla)

    def batches_again() -> Iterator:
        return iter(devices.distribute(lambda _: batches()))

    iterator = batches_again()

    def run(steps: int) -> float:
        trained.reset_metrics()
        return trained.run_train_loop(iterator, steps, batches_again).logs["loss"]

    return trained, run
