"""What a run computes on: what flags and environment mean, the TPU by its API, its workers, batch arithmetic."""

import concurrent.futures
import http.client
import re
import socket
from collections.abc import Iterator

from trainer import hardware, plan, tpu_node
from trainer.doctor.findings import Case, Finding, failed, passed, refused, skipped, warned
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.preflight import slices

PROBE_SECS = 8.0  # for one worker: below the limit of the check, so that it can say which ones are silent
_PARALLEL_PROBES = 32


def resolve(case: Case) -> hardware.Target:
    """What flags and environment mean; ConfigError where they are refused."""
    config = case.config
    return hardware.resolve(
        tpu=config.tpu,
        tpu_zone=config.tpu_zone,
        tpu_project=config.tpu_project,
        replicas=config.replicas,
        backend=config.backend,
        environ=case.environ,
        root=case.root,
    )


def target_of(case: Case) -> hardware.Target | None:
    """What flags and environment mean; None where they are refused, which `target` says."""
    try:
        return resolve(case)
    except ConfigError:
        return None


def target(case: Case) -> Iterator[Finding]:
    """What --tpu, --replicas and TF_CONFIG mean here; the port of this worker, and names of its peers."""
    found = resolve(case)
    if found.workers is None:
        role = "evaluator: " if found.evaluation == "only" else ""
        yield passed("target", f"{role}{found.source} -> {found.tpu or 'GPUs, else the CPU'}")
        return
    source = found.workers.source
    yield passed("target", f"worker {found.workers.index} of the {len(found.workers.addresses)} in {source}")
    for index, address in enumerate(found.workers.addresses):
        host, _, port = address.rpartition(":")
        if index == found.workers.index:
            if index == 0 or not case.is_jax:  # on JAX all meet at the chief's
                yield from _own_port(int(port), source)
            continue
        try:
            socket.getaddrinfo(host, int(port))
        except socket.gaierror as error:
            what = f"{source} names {host}, and no host has this name: {error.strerror}"
            yield warned("peer", what, f"Mend {source}; on Kubernetes, the name may come with the pod")


def _own_port(port: int, source: str) -> Iterator[Finding]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            what = f"port {port}, this worker's in {source}, cannot be had: {error.strerror}"
            yield failed("port", what, "Wait for the end of the run that has it, or name another", retryable=True)


def node(case: Case) -> Iterator[Finding]:
    """State, health, type and version of a TPU by name, as the Cloud TPU API tells them."""
    found = target_of(case)
    if found is None or found.tpu in (None, hardware.LOCAL) or found.addresses:
        yield skipped("TPU node", "no TPU is asked for by name")
        return
    lookup = tpu_node.Lookup(found)
    told = lookup.ask()
    if told.state != tpu_node.READY:
        raise RetryError(f"{lookup.what} is {told.trouble}. {told.remedy}.")
    facts = {"node_workers": told.workers, "node_type": told.accelerator_type, "node_version": told.version}
    kind = told.accelerator_type or "of unknown type"
    yield passed("TPU node", f"{lookup.what} is READY: {kind}, {len(told.workers)} workers", **facts)
    if not told.is_healthy:
        yield failed("TPU health", f"{found.tpu} is {told.trouble}", told.remedy, retryable=True)


def node_unfinished(how: str) -> Finding:
    """Neither the API nor the metadata server has answered."""
    remedy = "Check the network of this machine; give --tpu_zone and --tpu_project off Google Cloud"
    return failed("TPU node", f"the Cloud TPU API, or the metadata server, is silent: {how}", remedy, retryable=True)


def workers(case: Case) -> Iterator[Finding]:
    """Whether each TPU worker, and each helper of --data_service, speaks gRPC."""
    found = target_of(case)
    addresses = list((found.addresses if found else ()) or case.facts.get("node_workers", ()))
    if case.config.data_service is not None:
        addresses += hardware.parse_grpc(case.config.data_service)
    if not addresses:
        yield skipped("workers", "no TPU worker or data helper on another machine is known")
        return
    from trainer.backends.tensorflow import cluster

    def probe(address: tuple[str, int]) -> TrainerError | None:
        try:
            cluster.probe(*address, timeout_secs=PROBE_SECS)
        except TrainerError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_PROBES) as pool:
        errors = [error for error in pool.map(probe, addresses) if error]
    yield from (refused("worker", error) for error in errors)
    if len(errors) < len(addresses):
        yield passed("workers", f"{len(addresses) - len(errors)} of {len(addresses)} answer")


def versions(case: Case) -> Iterator[Finding]:
    """TensorFlow here against TensorFlow on the TPU: their graphs have to understand each other (tensorflow 41075)."""
    found = target_of(case)
    told = case.facts.get("node_version")
    if told is None and found is not None and found.addresses:
        from cloud_tpu_client import Client

        try:
            told = Client(found.tpu).runtime_version()
        except (OSError, http.client.HTTPException, ValueError) as error:
            yield versions_unfinished(str(error))
            return
    if told is None:
        yield skipped("TPU version", "no TPU on another machine tells one")
        return
    here = case.facts.get("tensorflow")
    there = re.search(r"(\d+\.\d+)(\.\d+)?", told)
    if here is None or there is None:
        yield skipped("TPU version", f"the TPU runs {told}; TensorFlow here is {here or 'not usable'}")
    elif here.split(".")[:2] != there[1].split("."):
        remedy = f"Install TensorFlow {there[0]} here, or create the TPU with the runtime of {here}"
        yield failed("TPU version", f"the TPU runs {told}, TensorFlow here is {here}", remedy)
    else:
        yield passed("TPU version", f"the TPU runs {told}, TensorFlow here is {here}")


def versions_unfinished(how: str) -> Finding:
    """Not every worker answers on the port for versions."""
    return skipped("TPU version", f"the worker tells none ({how})")


def batch(case: Case) -> Iterator[Finding]:
    """Whether the global batch divides over the replicas, as far as these are known without connecting."""
    counts, why = _replicas(case)
    if not counts:
        yield skipped("batch", why)
    for num_replicas in counts:
        try:
            found = plan.resolve(case.config, num_replicas=num_replicas, num_train_examples=0, num_eval_examples=0)
        except ConfigError as error:
            yield refused("batch", ConfigError(f"{why}: {error}"))
            continue
        sizes = f"{found.global_batch_size:,} = {num_replicas} x {found.per_replica_batch_size:,} a replica"
        yield passed("batch", f"{sizes} ({why})")


def _replicas(case: Case) -> tuple[tuple[int, ...], str]:
    """Numbers of replicas that the run may get, and where that comes from."""
    found, gpus = target_of(case), case.facts.get("gpus", 0)
    if found is None:
        return (), "the target is refused"
    if found.tpu is None:
        of_worker = (min(gpus, found.replicas or gpus) if gpus else found.replicas) or 1
        if found.workers is not None:
            count = len(found.workers.addresses)
            return (count * (of_worker if gpus or case.is_jax else 1),), f"{count} workers of {found.workers.source}"
        return (of_worker,), f"{gpus} GPUs" if gpus else "CPU"
    if found.tpu == hardware.LOCAL:
        tpus, of = case.facts.get("tpus", 0), "JAX" if case.is_jax else "TensorFlow"
        return ((tpus,), "chips of this machine") if tpus else ((), f"{of} sees no TPU device")
    kind = case.facts.get("node_type")
    if kind is None:
        return (), "how many replicas the TPU has is known once it is connected"
    return replicas_of(kind), str(kind)


def replicas_of(accelerator_type: str) -> tuple[int, ...]:
    """Number of replicas of a slice of this type (v3-8, v5litepod-16); none where it is not known."""
    try:
        return (slices.parse(accelerator_type).num_replicas,)
    except ConfigError:
        return ()


def num_hosts(case: Case) -> int:
    """Hosts that read records, as far as known: TPU workers, or the workers that train together."""
    found = target_of(case)
    if found is None:
        return 1
    if found.workers is not None:
        return len(found.workers.addresses)
    return len(found.addresses or case.facts.get("node_workers", ())) or 1
