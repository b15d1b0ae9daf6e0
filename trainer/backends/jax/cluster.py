"""From a `hardware.Target` to a mesh of JAX' devices; the only constructor of meshes."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.backends.jax import batches
from trainer.backends.jax.internals import REPLICAS, whole_errors
from trainer.cluster import Cluster, MakeBatches
from trainer.errors import ConfigError
from trainer.hardware import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshCluster(Cluster):
    """Devices in a mesh of one axis; one process a host."""

    mesh: Mesh

    def agree(self, values: Sequence[int]) -> list[int]:
        if self.num_workers == 1:
            return list(values)
        words = np.asarray(values, np.int64).view(np.int32)  # JAX has no 64 bits
        gathered = np.asarray(_gather(batches.place(self.mesh, [words[None]] * len(self.mesh.local_devices))))
        first_of_process = [index for index, device in enumerate(self.mesh.devices) if _is_first(device, self.mesh)]
        return [int(total) for total in gathered[first_of_process].view(np.int64).sum(axis=0)]

    def scope(self) -> contextlib.AbstractContextManager:
        return whole_errors()

    def distribute(self, make: MakeBatches) -> Iterable[Any]:
        context = tf.distribute.InputContext(
            num_input_pipelines=self.num_hosts,
            input_pipeline_id=self.worker_index,
            num_replicas_in_sync=self.num_replicas,
        )
        return batches.Placed(self.mesh, make(context))

    def local(self, value: Any) -> list[Any]:
        return [shard.data for shard in value.addressable_shards] if isinstance(value, jax.Array) else [value]


def connect(target: Target, *, connect_timeout_secs: float) -> MeshCluster:
    """The devices of this machine."""
    if target.replicas and target.replicas > 1:
        _set_num_cpus(target.replicas)
    return _of_this_machine(jax.local_devices(), f"{jax.local_device_count()} device(s) of this machine")


def rehearse(num_replicas: int) -> tuple[MeshCluster, MeshCluster]:
    """See `trainer.cluster.rehearse`.

    Raises:
      ConfigError: JAX is in use already.
    """
    jax.config.update("jax_platforms", "cpu")
    _set_num_cpus(num_replicas)
    devices = jax.local_devices()
    return (
        _of_this_machine(devices[:1], "CPU: 1 replica on this machine"),
        _of_this_machine(devices, f"CPU: {num_replicas} virtual replicas on this machine (--replicas)"),
    )


def _of_this_machine(devices: Sequence[jax.Device], description: str) -> MeshCluster:
    kind = {"tpu": "tpu", "gpu": "gpu"}.get(devices[0].platform, "cpu")
    mesh = Mesh(np.array(devices), (REPLICAS,))
    return MeshCluster(mesh=mesh, kind=kind, num_replicas=len(devices), description=description)


def _set_num_cpus(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ConfigError(f"Cannot set up --replicas: JAX is in use already ({error})") from error


def _gather(words: jax.Array) -> jax.Array:
    return jax.jit(jnp.asarray, out_shardings=NamedSharding(words.sharding.mesh, PartitionSpec()))(words)


def _is_first(device: jax.Device, mesh: Mesh) -> bool:
    return device == next(d for d in mesh.devices if d.process_index == device.process_index)
