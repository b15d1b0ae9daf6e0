"""What hardware a run asks for, from flags and environment alone: no TensorFlow, no network, no waiting.

`resolve` decides, `cluster.connect` connects. Between the two a caller knows `Target.is_remote`, and can refuse paths
that a worker on another machine cannot read. Nothing falls back: what is asked for and is not there is an error.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import pathlib
import re
from collections.abc import Mapping

from trainer.config import TPU_OF_THIS_ENVIRONMENT as AUTO
from trainer.errors import ConfigError
from trainer.workers import HOST_PORT, Evaluation, Workers, cluster_of_environment, hosts_of_slice

LOCAL = "local"
GRPC = "grpc://"
_GRPC_PORT = 8470  # of every Cloud TPU worker
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclasses.dataclass(frozen=True)
class Target:
    """What to connect to, as far as flags and environment tell. Made by `resolve`."""

    tpu: str | None  # None, 'local', the name of a TPU node, or 'grpc://ip:port[,ip:port...]'
    zone: str | None
    project: str | None
    replicas: int | None
    workers: Workers | None  # None: this process trains alone
    source: str  # where `tpu` came from: 'TPU_CONFIG unset, TPU_NAME=my-tpu'
    evaluation: Evaluation = "here"

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each TPU worker that is named by its address."""
        return parse_grpc(self.tpu) if self.tpu and self.tpu.startswith(GRPC) else ()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self.evaluation != "only" and (self.workers is None or self.workers.index == 0)

    @property
    def is_remote(self) -> bool:
        """Whether files are read and written by a TPU worker on another machine, which sees no local path of ours."""
        if self.tpu in (None, LOCAL):
            return False
        return not self.addresses or not all(_is_loopback(host) for host, _ in self.addresses)


def resolve(
    *,
    tpu: str | None,
    tpu_zone: str | None = None,
    tpu_project: str | None = None,
    replicas: int | None = None,
    backend: str = "tensorflow",
    environ: Mapping[str, str] = os.environ,
    root: str = "/",
) -> Target:
    """Decides what to connect to, from flags and environment alone: no network, no TensorFlow.

    Args:
      tpu: None for no TPU, 'auto' for the TPU of this environment, 'local' for this VM's own chips, the name of a TPU
        node, or 'grpc://ip[:port]' with further workers after commas.
      tpu_zone, tpu_project: of the named node; None asks TPU_CONFIG, then (in `connect`) the metadata server.
      replicas: virtual CPU replicas, or the number of GPUs to use; None means one CPU replica or all GPUs.
      backend: of Keras. JAX uses the chips of its own machine only, and runs on every host of a slice.
      environ: environment variables.
      root: the directory whose dev/ lists this machine's devices.

    Raises:
      ConfigError: a value is malformed or in contradiction with another, or this machine has no TPU.
    """
    workers, evaluation = cluster_of_environment(environ)
    if replicas is not None and replicas < 1:
        raise ConfigError(f"--replicas must be at least 1. Received: {replicas}")
    if tpu is None:
        if tpu_zone or tpu_project:
            raise ConfigError(
                "--tpu_zone and --tpu_project have no effect without --tpu. "
                f"Received: tpu_zone={tpu_zone}, tpu_project={tpu_project}. Add --tpu=NAME or remove them."
            )
        return Target(None, None, None, replicas, workers, "no TPU asked for", evaluation)
    if replicas is not None:
        raise ConfigError(
            f"--replicas={replicas} has no effect with --tpu={tpu}: a slice has one replica a core, all of them used. "
            "Remove --replicas, or remove --tpu to train on GPUs or virtual CPU replicas."
        )
    if evaluation == "only":
        raise ConfigError(
            "An evaluator uses the GPUs or the CPU of its own machine: it must not take the TPU from the run that it "
            f"evaluates. Start it with --tpu=none. Received: --tpu={tpu}"
        )
    if backend == "jax":
        workers = workers or hosts_of_slice(environ)
        tpu, node, source = _tpu_of_jax(tpu, environ, root)
    elif workers:
        raise ConfigError(
            f"--tpu={tpu} with a {workers.source} of {len(workers.addresses)} workers: one process drives a whole TPU "
            f"slice. Start one process and unset {workers.source}, or remove --tpu. "
            f"Received workers: {', '.join(workers.addresses)}"
        )
    else:
        tpu, node, source = _tpu_of_tensorflow(tpu, environ, root)
    zone, project = tpu_zone or node.get("zone"), tpu_project or node.get("project")
    if (zone or project) and (tpu == LOCAL or tpu.startswith(GRPC)):
        raise ConfigError(
            f"A zone and a project look up a TPU by name, and {tpu} is not a name. "
            f"Received: {source}, tpu_zone={zone}, tpu_project={project}. Remove the two."
        )
    if tpu == LOCAL and not local_chips(root):
        raise ConfigError(
            f"This machine has no TPU: no {root}dev/accel* and no {root}dev/vfio/<number>. Looked for: {source}. "
            "Run on a TPU VM (in a container, pass its devices on), name a TPU with --tpu=NAME, or leave out --tpu."
        )
    return Target(tpu, zone or None, project or None, None, workers, source, evaluation)


def local_chips(root: str = "/") -> list[str]:
    """Device files of the TPU chips of this machine: dev/accel<n> (up to v4), dev/vfio/<group> (v5e and later)."""
    dev = pathlib.Path(root, "dev")
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]  # vfio/vfio, the control file, is on any machine
    return sorted(str(path) for path in found)


# --- flags and environment ---


def _tpu_of_tensorflow(tpu: str, environ: Mapping[str, str], root: str) -> tuple[str, dict[str, str], str]:
    """What --tpu means, with what TPU_CONFIG says of zone and project, and how it was found."""
    if tpu != AUTO:
        return _checked_tpu(tpu, f"--tpu={tpu}"), {}, f"--tpu={tpu}"
    tpu, node, source = _tpu_of_environment(environ, root)
    return _checked_tpu(tpu, source), node, source


def _tpu_of_jax(tpu: str, environ: Mapping[str, str], root: str) -> tuple[str, dict[str, str], str]:
    """The same for JAX, which knows this machine's own chips only."""
    source = f"--tpu={tpu}"
    if tpu == AUTO:
        tpu, _, source = _tpu_of_environment(environ, root)
        if local_chips(root):  # whatever name they have
            return LOCAL, {}, f"{len(local_chips(root))} chips on this machine"
    if tpu != LOCAL:
        raise ConfigError(
            "JAX drives the TPU chips of the machine that it runs on, and none over the network: run the same command "
            "with --tpu=local on every host of the slice (`gcloud compute tpus tpu-vm ssh NAME --worker=all "
            "--command=...`, `scripts/launch`), or leave out --backend=jax. "
            f"Received: {source}"
        )
    return LOCAL, {}, source


def _tpu_of_environment(environ: Mapping[str, str], root: str) -> tuple[str, dict[str, str], str]:
    """Returns the --tpu value that the environment stands for, its TPU_CONFIG (zone, project), and how it was found."""
    # TPU_CONFIG is what Vertex AI sets. TensorFlow's own client would read it, but TensorFlow prefers cloud-tpu-client
    # where that is installed, and cloud-tpu-client does not.
    if text := environ.get("TPU_CONFIG"):
        try:
            node = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"TPU_CONFIG is not JSON ({error}). Received: {text}") from error
        if not isinstance(node, dict) or not isinstance(node.get("tpu_node_name"), str):
            raise ConfigError(f'TPU_CONFIG needs {{"tpu_node_name", "zone", "project"}}. Received: {text}')
        return node["tpu_node_name"], node, f"TPU_CONFIG names {node['tpu_node_name']}"
    if name := environ.get("TPU_NAME"):
        return name, {}, f"TPU_CONFIG unset, TPU_NAME={name}"
    if endpoints := environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"):
        address = endpoints if endpoints.startswith(GRPC) else GRPC + endpoints
        return address, {}, f"TPU_CONFIG, TPU_NAME unset, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS={endpoints}"
    unset = "TPU_CONFIG, TPU_NAME, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS unset"
    return LOCAL, {}, f"{unset}, {len(local_chips(root))} chips on this machine"


def _checked_tpu(tpu: str, source: str) -> str:
    """Returns `tpu` with full addresses, or raises ConfigError where it is neither 'local', an address nor a name."""
    if tpu.startswith(GRPC):
        return GRPC + ",".join(f"{host}:{port}" for host, port in parse_grpc(tpu))
    if "://" not in tpu and (":" in tpu or _is_ip(tpu)):
        # TensorFlow would take it for the name of a node, and fail far from the cause.
        raise ConfigError(f"{tpu} looks like an address: did you mean {GRPC}{tpu}? Received: {source}")
    if not _NODE_NAME.fullmatch(tpu):
        raise ConfigError(f"'{tpu}' is no name of a TPU. Use local, NAME or {GRPC}IP[:PORT]. Received: {source}")
    return tpu


def parse_grpc(tpu: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each worker in "grpc://host[:port],...", or ConfigError where one is no address."""
    addresses = []
    for entry in tpu.split(","):
        match = HOST_PORT.fullmatch(entry.strip().removeprefix(GRPC))
        if not match or not 0 < int(match["port"] or _GRPC_PORT) < 2**16:
            raise ConfigError(f"'{entry}' is not {GRPC}HOST[:PORT]. Received: {tpu}")
        addresses.append((match["host"], int(match["port"] or _GRPC_PORT)))
    return tuple(addresses)


def _is_ip(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)
