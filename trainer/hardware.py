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
import typing
from collections.abc import Callable, Mapping

from trainer.config import TPU_OF_THIS_ENVIRONMENT as AUTO
from trainer.errors import ConfigError

LOCAL = "local"
GRPC = "grpc://"
_GRPC_PORT = 8470  # of every Cloud TPU worker
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?")
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TRAINING_JOBS = ("chief", "worker")  # in the order of worker_index
_EVALUATOR = "evaluator"
# Where a process reads which others there are, and what their types of tasks mean; the first that is set counts.
# https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
# https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
_CLUSTERS: Mapping[str, Mapping[str, str]] = {
    "TF_CONFIG": {"chief": "chief", "worker": "worker", "ps": "ps", "evaluator": _EVALUATOR},
    "CLUSTER_SPEC": {
        "workerpool0": "chief",
        "workerpool1": "worker",
        "workerpool2": "ps",
        "workerpool3": _EVALUATOR,
    },
}

# Who evaluates: "here" the process that trains, "elsewhere" an evaluator beside it; "only": this one is the evaluator.
Evaluation = typing.Literal["here", "elsewhere", "only"]


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that train together, from TF_CONFIG or CLUSTER_SPEC."""

    addresses: tuple[str, ...]  # host:port each; the chief first
    index: int  # of this process
    jobs: tuple[tuple[str, int], ...]  # task types of TF_CONFIG in use, with their numbers of tasks
    source: str = "TF_CONFIG"  # the variable that names them

    @property
    def tasks(self) -> dict[str, list[str]]:
        """The addresses by task type, as TensorFlow wants them."""
        left = iter(self.addresses)
        return {job: [next(left) for _ in range(count)] for job, count in self.jobs}

    @property
    def task(self) -> tuple[str, int]:
        """Task type and index of this process."""
        return [(job, index) for job, count in self.jobs for index in range(count)][self.index]


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
    environ: Mapping[str, str] = os.environ,
    root: str = "/",
) -> Target:
    """Decides what to connect to, from flags and environment alone: no network, no TensorFlow.

    Args:
      tpu: None for no TPU, 'auto' for the TPU of this environment, 'local' for this VM's own chips, the name of a TPU
        node, or 'grpc://ip[:port]' with further workers after commas.
      tpu_zone, tpu_project: of the named node; None asks TPU_CONFIG, then (in `connect`) the metadata server.
      replicas: virtual CPU replicas, or the number of GPUs to use; None means one CPU replica or all GPUs.
      environ: environment variables.
      root: the directory whose dev/ lists this machine's devices.

    Raises:
      ConfigError: a value is malformed or in contradiction with another, or this machine has no TPU.
    """
    workers, evaluation = _cluster_of_environment(environ)
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
    if workers:
        raise ConfigError(
            f"--tpu={tpu} with a {workers.source} of {len(workers.addresses)} workers: one process drives a whole TPU "
            f"slice. Start one process and unset {workers.source}, or remove --tpu. "
            f"Received workers: {', '.join(workers.addresses)}"
        )
    if evaluation == "only":
        raise ConfigError(
            "An evaluator uses the GPUs or the CPU of its own machine: it must not take the TPU from the run that it "
            f"evaluates. Start it with --tpu=none. Received: --tpu={tpu}"
        )
    source = f"--tpu={tpu}"
    if tpu == AUTO:
        tpu, node, source = _tpu_of_environment(environ, root)
        tpu_zone = tpu_zone or node.get("zone")
        tpu_project = tpu_project or node.get("project")
    tpu = _checked_tpu(tpu, source)
    if (tpu_zone or tpu_project) and (tpu == LOCAL or tpu.startswith(GRPC)):
        raise ConfigError(
            f"A zone and a project look up a TPU by name, and {tpu} is not a name. "
            f"Received: {source}, tpu_zone={tpu_zone}, tpu_project={tpu_project}. Remove the two."
        )
    if tpu == LOCAL and not local_chips(root):
        raise ConfigError(
            f"This machine has no TPU: no {root}dev/accel* and no {root}dev/vfio/<number>. Looked for: {source}. "
            "Run on a TPU VM (in a container, pass its devices on), name a TPU with --tpu=NAME, or leave out --tpu."
        )
    return Target(tpu, tpu_zone or None, tpu_project or None, None, None, source, evaluation)


def local_chips(root: str = "/") -> list[str]:
    """Device files of the TPU chips of this machine: dev/accel<n> (up to v4), dev/vfio/<group> (v5e and later)."""
    dev = pathlib.Path(root, "dev")
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]  # vfio/vfio, the control file, is on any machine
    return sorted(str(path) for path in found)


# --- flags and environment ---


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
        match = _HOST_PORT.fullmatch(entry.strip().removeprefix(GRPC))
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


def _cluster_of_environment(environ: Mapping[str, str]) -> tuple[Workers | None, Evaluation]:
    """The workers that train together (None: this process trains alone, or not at all), and who evaluates."""
    for variable, types in _CLUSTERS.items():
        if text := environ.get(variable):
            return _parse_cluster(variable, text, types)
    return None, "here"


def _parse_cluster(variable: str, text: str, types: Mapping[str, str]) -> tuple[Workers | None, Evaluation]:
    """Reads a variable strictly, since TensorFlow waits for ever for a worker that a typo made.

    The evaluator may stand in the cluster, as Vertex AI has it, or, as TensorFlow has it, only be a task: then the
    others do not know of it.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{variable} {reason}. Received: {text}")

    try:
        config = json.loads(text)
    except ValueError as error:
        raise refuse(f"is not JSON ({error})") from error
    cluster = (config.get("cluster") or {}) if isinstance(config, dict) else None
    if not isinstance(cluster, dict):
        job = next(iter(types))
        raise refuse(f'is not {{"cluster": {{"{job}": ["host:port", ...]}}, "task": {{"type": "{job}", "index": 0}}}}')
    tasks = _tasks(cluster, types, refuse)
    task = config.get("task")
    job, index = (str(task.get("type")), str(task.get("index"))) if isinstance(task, dict) else ("", "")
    role = types[job] if job in types else None
    if role == _EVALUATOR and index == "0" and role not in tasks:
        return None, "only"
    if not tasks:
        return None, "here"
    everyone = [address for addresses in tasks.values() for address in addresses]
    several = any(len(tasks[one]) > 1 for one in ("chief", _EVALUATOR) if one in tasks)
    if several or len(set(everyone)) < len(everyone):
        raise refuse("must name one chief at most, one evaluator at most, and each address once")
    if role not in tasks or not index.isdecimal() or int(index) >= len(tasks[role]):
        raise refuse("must name this process by task.type and task.index, as it stands in the cluster")
    if role == _EVALUATOR:
        return None, "only"
    return _workers(tasks, role, int(index), variable), "elsewhere" if _EVALUATOR in tasks else "here"


def _tasks(
    cluster: Mapping[str, object], types: Mapping[str, str], refuse: Callable[[str], ConfigError]
) -> dict[str, list[str]]:
    """The addresses of those jobs that have any, by what the job means."""
    tasks: dict[str, list[str]] = {}
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(map(_is_address, addresses)):
            raise refuse(f'needs a list of "host:port" for {job}')
        if not addresses:
            continue
        if job not in types:
            raise refuse(f"has tasks of type {job}, where it can have {', '.join(types)}")
        if types[job] == "ps":
            raise refuse(
                f"has tasks of type {job}: parameter servers are for training without synchronisation, and here every "
                "step waits for all workers. Leave them out"
            )
        tasks[types[job]] = addresses
    return tasks


def _is_address(text: object) -> bool:
    return ":" in str(text) and bool(_HOST_PORT.fullmatch(str(text)))


def _workers(tasks: Mapping[str, list[str]], role: str, index: int, source: str) -> Workers | None:
    """The processes that train; None where it is one."""
    jobs = tuple((job, len(tasks[job])) for job in _TRAINING_JOBS if job in tasks)
    addresses = tuple(address for job, _ in jobs for address in tasks[job])
    return Workers(addresses, addresses.index(tasks[role][index]), jobs, source) if len(addresses) > 1 else None
