"""From a `hardware.Target` to a mesh of JAX' devices; the only constructor of meshes."""

import contextlib
import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import diagnose, proxy, tpu_slice
from trainer.backends.jax import batches, coordinator, muster, visible
from trainer.backends.jax.internals import REPLICAS, whole_errors
from trainer.cluster import Cluster, MakeBatches
from trainer.errors import ConfigError, RetryError
from trainer.hardware import Target
from trainer.watchdog import Watchdog
from trainer.workers import Workers

_STDOUT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCluster(Cluster):
    """Devices in a mesh of one axis; one process a host."""

    mesh: Mesh
    peers: muster.Peers | None = None  # the other processes
    service: coordinator.Service | None = None  # of the chief of several

    def agree(self, values: Sequence[int]) -> list[int]:
        if self.num_workers == 1:
            return list(values)
        words = np.asarray(values, np.int64).view(np.int32)  # JAX has no 64 bits
        gathered = np.asarray(
            _gather(batches.place(self.mesh, [words[None]] * len(self.mesh.local_devices)), self.mesh)
        )
        first_of_process = [index for index, device in enumerate(self.mesh.devices) if _is_first(device, self.mesh)]
        return [int(total) for total in gathered[first_of_process].view(np.int64).sum(axis=0)]

    def scope(self) -> contextlib.AbstractContextManager:
        return whole_errors()

    def distribute(self, make: MakeBatches) -> Iterable[typing.Any]:
        context = tf.distribute.InputContext(
            num_input_pipelines=self.num_hosts,
            input_pipeline_id=self.worker_index,
            num_replicas_in_sync=self.num_replicas,
        )
        return batches.Placed(self.mesh, make(context))

    def local(self, value: typing.Any) -> list[typing.Any]:
        return [shard.data for shard in value.addressable_shards] if isinstance(value, jax.Array) else [value]

    @contextlib.contextmanager
    def watched(self, on_loss: Callable[[str], None]) -> Iterator[None]:
        if self.peers is None:
            yield
            return
        self.peers.watch(on_loss)
        try:
            yield
        except BaseException:
            self.peers.part(failed=True)
            raise
        if not self.peers.part(failed=False):
            raise RetryError(f"{self.peers.lost}. The same command does what is left to do")
        jax.distributed.shutdown()
        self.peers.close()
        if self.service is not None:
            self.service.end()


def locate(target: Target, *, timeout_secs: float) -> Target:
    """`target` with the other hosts of the slice that this one's chips are part of; see `tpu_slice.locate`."""
    return tpu_slice.locate(target, timeout_secs=timeout_secs)


def connect(target: Target, *, connect_timeout_secs: float) -> MeshCluster:
    """Connects what `locate` found. Call once, in the main thread, before JAX is in use.

    Args:
      target: from `locate`.
      connect_timeout_secs: how long to wait for other processes, and then for the devices, in seconds.

    Raises:
      ConfigError: another try would fail too: no such devices, too many asked for, JAX already in use.
      RetryError: another try can help: a peer or a TPU that is missing.
    """
    visible.choose(target)
    peers, service = _meet(target.workers, connect_timeout_secs) if target.workers is not None else (None, None)
    watchdog = Watchdog(connect_timeout_secs)
    watchdog.waiting_for = "JAX' devices; of a TPU slice all hosts have to run this program, each once"
    with diagnose.explained(f"Cannot use the TPU ({target.source})" if target.tpu else "Cannot use the devices"):
        devices = watchdog.run(jax.devices)
    visible.check(target, jax.local_devices())
    _check_order(target.workers)
    made = _of(devices)
    if peers is not None and made.kind == "cpu":
        _keep_stdout_to_python()
    description = _described(made, target) + visible.memory_note(made.kind)
    evaluated = target.evaluation == "elsewhere"
    if evaluated:
        description += "; an evaluator evaluates beside them"
    return dataclasses.replace(made, peers=peers, service=service, description=description, has_evaluator=evaluated)


def rehearse(num_replicas: int) -> tuple[MeshCluster, MeshCluster]:
    """See `trainer.cluster.rehearse`.

    Raises:
      ConfigError: JAX is in use already.
    """
    visible.use_cpus(num_replicas)
    devices = jax.local_devices()
    one, several = _of(devices[:1]), _of(devices)
    return (
        dataclasses.replace(one, description="CPU: 1 replica on this machine"),
        dataclasses.replace(several, description=f"CPU: {num_replicas} virtual replicas on this machine (--replicas)"),
    )


def _check_order(workers: Workers | None) -> None:
    """Who is the chief was decided before JAX was asked, which has its own order of the hosts of a TPU slice."""
    given, source = (0, 1), "nothing names others"
    if workers is not None:
        given, source = (workers.index, len(workers.addresses)), f"{workers.source} says {workers.index}"
    found = (jax.process_index(), jax.process_count())
    if found != given:
        raise ConfigError(
            f"To JAX this is process {found[0]} of {found[1]}, and {source} of {given[1]}. Start one process on each "
            "host of the slice, in the order of its hosts"
        )


def _of(devices: Sequence[jax.Device]) -> MeshCluster:
    """A mesh of `devices`, those of a process beside each other."""
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return MeshCluster(
        mesh=Mesh(np.array(ordered), (REPLICAS,)),
        kind=typing.cast(typing.Literal["tpu", "gpu", "cpu"], devices[0].platform),
        num_replicas=len(devices),
        num_workers=jax.process_count(),
        worker_index=jax.process_index(),
        num_hosts=jax.process_count(),
        description="",
    )


def _described(made: MeshCluster, target: Target) -> str:
    kind, workers = made.kind.upper(), target.workers
    where = f"JAX, {target.source}: " if target.tpu is not None else "JAX: "
    if workers is not None:
        here = f"this is {workers.index} at {workers.addresses[workers.index]}"
        return f"{kind}: {where}{made.num_replicas} replicas on {made.num_workers} workers of {workers.source}, {here}"
    virtual = "virtual " if made.kind == "cpu" and made.num_replicas > 1 else ""
    return f"{kind}: {where}{made.num_replicas} {virtual}replica(s) on this machine"


def _meet(workers: Workers, timeout_secs: float) -> tuple[muster.Peers, coordinator.Service | None]:
    """Finds the other processes, and makes JAX find them."""
    addresses, service = workers.addresses, None
    if workers.index == 0:
        service = coordinator.Service(len(addresses))
        with service.ended_by_failure():
            peers = muster.receive(addresses, timeout_secs=timeout_secs, serve=service.port)
    else:
        peers = muster.report(addresses, workers.index, timeout_secs=timeout_secs)
    proxy.bypass([peers.coordinator.rpartition(":")[0]])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator.join(peers.coordinator, workers.index, len(addresses))
    return peers, service


def _keep_stdout_to_python() -> None:
    """Gives `sys.stdout` a descriptor of its own: gloo writes to the usual one, in C++, whom it has met."""
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(os.dup(_STDOUT), "w", buffering=1, encoding=encoding, errors=errors)  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    os.close(nowhere)


def _gather(words: jax.Array, mesh: Mesh) -> jax.Array:
    return jax.jit(jnp.asarray, out_shardings=NamedSharding(mesh, PartitionSpec()))(words)


def _is_first(device: jax.Device, mesh: Mesh) -> bool:
    return device == next(d for d in mesh.devices if d.process_index == device.process_index)
