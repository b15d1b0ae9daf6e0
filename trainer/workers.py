"""Which processes train together, as TF_CONFIG, CLUSTER_SPEC or the environment of a TPU slice say. Pure."""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence

from trainer.errors import ConfigError

HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?")
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

# What GKE tells each host of a slice, and libtpu reads: https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus
HOSTS, HOST_INDEX, SLICES = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES"
# Where these meet: free on a host of a slice, and the one that JAX' own start would take.
_HOST_OF_SLICE_PORT = 8482

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


def cluster_of_environment(environ: Mapping[str, str]) -> tuple[Workers | None, Evaluation]:
    """The workers that train together (None: this process trains alone, or not at all), and who evaluates.

    Raises:
        ConfigError: a variable contradicts itself, or asks for what there is not.
    """
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
    return ":" in str(text) and bool(HOST_PORT.fullmatch(str(text)))


def _workers(tasks: Mapping[str, list[str]], role: str, index: int, source: str) -> Workers | None:
    """The processes that train; None where it is one."""
    jobs = tuple((job, len(tasks[job])) for job in _TRAINING_JOBS if job in tasks)
    addresses = tuple(address for job, _ in jobs for address in tasks[job])
    return Workers(addresses, addresses.index(tasks[role][index]), jobs, source) if len(addresses) > 1 else None


# --- the hosts of a TPU slice ---


def hosts_of_slice(environ: Mapping[str, str]) -> Workers | None:
    """The hosts whose chips are one slice with this one's; None for one alone, or where nothing tells.

    Raises:
        ConfigError: the variables contradict each other, or tell of several slices.
    """
    check_one_slice(environ.get(SLICES, ""))
    names, index = environ.get(HOSTS), environ.get(HOST_INDEX, "")
    return workers_of_hosts(names.split(","), index, HOSTS) if names else None


def workers_of_hosts(names: Sequence[str], index: str, source: str) -> Workers | None:
    """The same, of the names of the hosts and the index of this one.

    Raises:
        ConfigError: they contradict each other.
    """
    hosts = [name.strip().partition(":")[0] for name in names]
    if not index.isdecimal() or int(index) >= len(hosts) or len(set(hosts)) < len(hosts) or not all(hosts):
        raise ConfigError(
            f"{source} must name each host of the TPU slice once, and {HOST_INDEX} this one among them, from 0. "
            f"Received: {','.join(names)}, {HOST_INDEX}={index or 'unset'}"
        )
    addresses = tuple(f"{host}:{_HOST_OF_SLICE_PORT}" for host in hosts)
    return Workers(addresses, int(index), (("worker", len(hosts)),), source) if len(hosts) > 1 else None


def check_one_slice(number: str) -> None:
    """Raises ConfigError for a `MEGASCALE_NUM_SLICES` that tells of several."""
    if number not in ("", "1"):
        raise ConfigError(
            "This is one of several TPU slices that work together, and a run here is for one: take one larger slice. "
            f"Received: {SLICES}={number}"
        )
