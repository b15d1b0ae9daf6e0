"""From a `hardware.Target` to a connected, initialised strategy; the only constructor of strategies.

Hardware that was asked for and is not there ends in ConfigError or RetryError (trainer/errors.py), never in a fallback.
What may block on the way to a TPU runs in a daemon thread under one deadline. TensorFlow may never leave such a thread,
so after an error of `connect` the process has to end with `os._exit`. On missing workers TensorFlow itself gives up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from trainer import diagnose, proxy, tpu_node
from trainer.cluster import Cluster, MakeBatches
from trainer.errors import ConfigError, RetryError
from trainer.hardware import GRPC, LOCAL, Target, local_chips
from trainer.watchdog import Watchdog
from trainer.workers import Workers

if typing.TYPE_CHECKING:
    import tensorflow as tf

_HTTP2_SETTINGS = 4
# What opens an HTTP/2 connection, gRPC's too: preface and an empty SETTINGS frame (RFC 9113, 3.4 and 4.1).
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _HTTP2_SETTINGS, 0, 0, 0, 0, 0])

_NO_REPLICAS = "Cannot set up --replicas"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyCluster(Cluster):
    """Devices under a strategy of tf.distribute."""

    strategy: tf.distribute.Strategy

    def agree(self, values: Sequence[int]) -> list[int]:
        if self.num_workers == 1:
            return list(values)
        import tensorflow as tf

        summed = self._sum(tf.constant(values, tf.int64)).numpy()  # [values], over all replicas
        return [int(value) * self.num_workers // self.num_replicas for value in summed]

    @functools.cached_property
    def _sum(self) -> Callable[[tf.Tensor], tf.Tensor]:
        import tensorflow as tf

        def sum_of_replica(values: tf.Tensor) -> tf.Tensor:
            on_device = tf.identity(values)  # what is to be reduced has to lie on a device of the replica
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, on_device)

        def sum_over_replicas(values: tf.Tensor) -> tf.Tensor:
            return self.strategy.experimental_local_results(self.strategy.run(sum_of_replica, args=(values,)))[0]

        return tf.function(sum_over_replicas, autograph=False)

    def scope(self) -> contextlib.AbstractContextManager:
        return self.strategy.scope()

    def distribute(self, make: MakeBatches) -> Iterable[typing.Any]:
        return self.strategy.distribute_datasets_from_function(make)

    def local(self, value: typing.Any) -> list[typing.Any]:
        return list(self.strategy.experimental_local_results(value))


def locate(target: Target, *, timeout_secs: float) -> Target:
    """`target` as it is: one process drives a whole slice, and `connect` looks up where its hosts are."""
    return target


def connect(target: Target, *, connect_timeout_secs: float) -> Cluster:
    """Connects and initialises what `resolve` found. Call once, in the main thread, before TensorFlow is in use.

    Args:
      target: from `resolve`.
      connect_timeout_secs: deadline in seconds for all that may block: metadata server, Cloud TPU API, TCP, gRPC,
        initialisation of the TPU system, peers that have not started.

    Raises:
      ConfigError: another try would fail too: unknown node, no TPU there, TensorFlow without TPU support, too many
        replicas asked for, TensorFlow already in use.
      RetryError: another try can help: node not READY, refused or silent address, missing peer, deadline passed.
    """
    import tensorflow as tf

    if target.tpu is not None:
        watchdog = Watchdog(connect_timeout_secs)
        connected = watchdog.run(lambda: _connect_tpu(tf, target, watchdog))
    elif target.workers is not None:
        connected = _connect_workers(tf, target.workers, target.replicas, connect_timeout_secs)
    else:
        connected = _connect_this_machine(tf, target.replicas)
    if target.evaluation != "elsewhere":
        return connected
    description = f"{connected.description}; an evaluator evaluates beside them"
    return dataclasses.replace(connected, description=description, has_evaluator=True)


def rehearse(num_replicas: int) -> tuple[Cluster, Cluster]:
    """One replica, and `num_replicas` virtual ones, both on this machine's CPU, whatever else it has; call it first.

    The one runs as a run on a single replica does, under the default strategy; that there are more virtual devices
    beside it changes nothing.

    Raises:
      ConfigError: TensorFlow is in use already.
    """
    import tensorflow as tf

    with diagnose.explained(_NO_REPLICAS):
        for accelerator in ("GPU", "TPU"):
            tf.config.set_visible_devices([], accelerator)
    return _single_cpu(tf), _virtual_cpus(tf, num_replicas)


def _connect_tpu(tf: typing.Any, target: Target, watchdog: Watchdog) -> Cluster:
    if target.tpu == LOCAL:
        _require_tpu_devices(tf)
    resolver, addresses = _look_up(tf, target, watchdog)
    where = ",".join(f"{GRPC}{host}:{port}" for host, port in addresses) or "this machine's own chips"
    by_name = target.tpu != LOCAL and not target.addresses
    resolution = f"TPU: {target.source} -> {where}{' (READY)' if by_name else ''}"
    _log.info("%s", resolution)
    for host, port in addresses:
        watchdog.waiting_for = f"the TPU worker {host}:{port} to answer"
        probe(host, port)
    proxy.bypass([host for host, _ in addresses])
    with _translated(tf, f"Cannot use the TPU of {where}"):
        watchdog.waiting_for = f"the TPU worker {where} to take a gRPC session"
        tf.config.experimental_connect_to_cluster(resolver)
        watchdog.waiting_for = f"the TPU system of {where} to initialise"
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    hosts = strategy.extended.num_hosts
    return StrategyCluster(
        strategy=strategy,
        kind="tpu",
        num_replicas=strategy.num_replicas_in_sync,
        num_hosts=hosts,
        description=f"{resolution}; {strategy.num_replicas_in_sync} replicas on {hosts} TPU host(s)",
    )


def _connect_workers(tf: typing.Any, workers: Workers, replicas: int | None, timeout_secs: float) -> Cluster:
    gpus = _use_gpus(tf, replicas)
    if not gpus and replicas not in (None, 1):
        raise ConfigError(
            f"--replicas={replicas} with a {workers.source} of {len(workers.addresses)} workers and no GPU: "
            "MultiWorkerMirroredStrategy uses one CPU device a worker. Remove --replicas and start more workers."
        )
    proxy.bypass([address.split(":")[0] for address in workers.addresses])
    others = ", ".join(a for i, a in enumerate(workers.addresses) if i != workers.index)
    _limit_registration(workers, timeout_secs)
    job, index = workers.task
    # Given, so that TensorFlow does not read TF_CONFIG itself: it knows neither CLUSTER_SPEC nor what is refused here.
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(workers.tasks), task_type=job, task_id=index, num_accelerators={"GPU": gpus}
    )
    with _translated(tf, f"Cannot train with {others}"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    _take_back_sigterm()
    num_workers, num_replicas = len(workers.addresses), strategy.num_replicas_in_sync
    return StrategyCluster(
        strategy=strategy,
        kind="gpu" if gpus else "cpu",
        num_replicas=num_replicas,
        num_workers=num_workers,
        worker_index=workers.index,
        num_hosts=num_workers,
        description=f"{'GPU' if gpus else 'CPU'}: {num_replicas} replicas on {num_workers} workers of "
        f"{workers.source}, this is {workers.index} at {workers.addresses[workers.index]}",
    )


def _limit_registration(workers: Workers, timeout_secs: float) -> None:
    """Makes TensorFlow itself give up on missing workers.

    MultiWorkerMirroredStrategy waits for them with the GIL held, so that no watchdog in Python could fire; the
    leader, as it stands, without any limit. It leaves alone a coordination service that is configured
    already; so this is its own configuration, private API and all, with a limit and with a barrier that the leader
    waits at too. TensorFlow 2.20 adds 1 s (the leader) to 5 s to the limit.
    """
    from tensorflow.python.eager import context

    jobs = [context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=n) for job, n in workers.jobs]
    service = context.context()
    service.configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{workers.jobs[0][0]}/task:0",
        cluster_register_timeout_in_ms=int(timeout_secs * 1000),
        coordinated_jobs=jobs,
    )
    service.coordination_service.cluster_register_with_barrier = True


def _take_back_sigterm() -> None:
    # The coordination service of MultiWorkerMirroredStrategy puts a handler in C++ (preemption_notifier.cc) in place of
    # the one that Python knows of, which then never runs; and with the default one, SIGTERM no longer ends the process.
    if handler := signal.getsignal(signal.SIGTERM):
        signal.signal(signal.SIGTERM, handler)


def _connect_this_machine(tf: typing.Any, replicas: int | None) -> Cluster:
    gpus = _use_gpus(tf, replicas)
    if gpus:
        strategy = tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(gpus)])
        description = f"GPU: {gpus} replica(s) on this machine's GPUs"
        return StrategyCluster(strategy=strategy, kind="gpu", num_replicas=gpus, description=description)
    return _virtual_cpus(tf, replicas) if replicas and replicas > 1 else _single_cpu(tf)


def _single_cpu(tf: typing.Any) -> Cluster:
    description = "CPU: 1 replica on this machine (no GPU found, no TPU asked for)"
    strategy = tf.distribute.get_strategy()
    return StrategyCluster(strategy=strategy, kind="cpu", num_replicas=1, description=description)


def _virtual_cpus(tf: typing.Any, num_replicas: int) -> Cluster:
    with diagnose.explained(_NO_REPLICAS):
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * num_replicas
        )
    # They share their memory: adding up in one place takes fewer copies and rounds than the ring of a collective.
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    description = f"CPU: {num_replicas} virtual replicas on this machine (--replicas)"
    return StrategyCluster(strategy=strategy, kind="cpu", num_replicas=num_replicas, description=description)


def _use_gpus(tf: typing.Any, replicas: int | None) -> int:
    """Returns how many GPUs this process trains on, the others hidden from TensorFlow; 0 where the machine has none."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and replicas is not None:
        if replicas > len(gpus):
            raise ConfigError(
                f"--replicas={replicas}, and this machine has {len(gpus)} GPU(s), each one replica. Lower --replicas, "
                "or hide the GPUs with CUDA_VISIBLE_DEVICES=-1 to train on virtual CPU replicas."
            )
        with diagnose.explained(_NO_REPLICAS):
            tf.config.set_visible_devices(gpus[:replicas], "GPU")  # else TensorFlow takes the memory of all
    return min(len(gpus), replicas or len(gpus))


def _require_tpu_devices(tf: typing.Any) -> None:
    # initialize_tpu_system would say so too, some seconds later and in words nobody understands.
    if any(device.device_type.startswith("TPU") for device in tf.config.list_physical_devices()):
        return
    raise ConfigError(
        f"This machine has TPU chips ({', '.join(local_chips())}), and TensorFlow {tf.__version__} sees none. Install "
        "TensorFlow with TPU support (the extra `tpu` in place of `cpu`), or end the process that holds the chips."
    )


def _look_up(tf: typing.Any, target: Target, watchdog: Watchdog) -> tuple[typing.Any, Sequence[tuple[str, int]]]:
    """Returns the resolver to connect with, and (host, port) of each worker: none for this machine's own chips."""
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver
    if target.tpu == LOCAL or target.addresses:
        return resolver(target.tpu), target.addresses
    workers = tpu_node.wait_until_usable(target, watchdog).workers
    # By address from here on: by name, TensorFlow would ask the API again at every step.
    return resolver(GRPC + ",".join(f"{host}:{port}" for host, port in workers)), workers


def probe(host: str, port: int, *, timeout_secs: float | None = None) -> None:
    """Says hello to a worker as gRPC does; without `timeout_secs` it may wait for ever.

    Raises:
        ConfigError: no such host, or one that does not speak gRPC.
        RetryError: nobody answers there.
    """
    # Where nobody listens, experimental_connect_to_cluster tries for ever; a TCP connection is refused at once. And a
    # context that has been connected before waits for a silent address with the GIL held, out of any watchdog's reach.
    try:
        with socket.create_connection((host, port), timeout_secs) as connection:
            connection.sendall(_HTTP2_HELLO)
            frame = connection.recv(9)  # length, type, flags, stream
    except socket.gaierror as error:
        raise ConfigError(f"TPU worker {host}:{port}: there is no host of this name ({error.strerror}).") from error
    except OSError as error:
        raise RetryError(
            f"The TPU worker {host}:{port} cannot be reached: {error.strerror or error}. "
            "Check that the TPU is up and that its network can be reached from here, and run again."
        ) from error
    if not frame:
        raise RetryError(f"The TPU worker {host}:{port} closes connections at once. Run again when it is up.")
    if frame[3:4] != bytes([_HTTP2_SETTINGS]):
        raise ConfigError(f"{host}:{port} is no TPU worker: it does not speak gRPC. Received: {frame!r}")


# --- errors ---


@contextlib.contextmanager
def _translated(tf: typing.Any, what: str) -> Iterator[None]:
    """Turns an error of TensorFlow into one line with cause and remedy; those that are not known are worth a retry."""
    try:
        with diagnose.explained(what):
            yield
    except tf.errors.OpError as error:
        raise RetryError(f"{what}: TensorFlow says: {diagnose.short(error)}. Run again.") from error
