"""`scripts/launch tpu-vm ACTION`: a TPU VM, or a pod of them, and the trainer on it.

Each ACTION is a step; `supervise` does all of them, as often as it takes.
"""

import argparse
import pathlib

from scripts.launchers.actions import Actions
from scripts.launchers.job import Job, local_paths
from scripts.launchers.tpu_vm.machine import Machine
from scripts.launchers.tpu_vm.remote import POD_RUNTIME, Remote
from scripts.launchers.tpu_vm.supervision import Supervisor, delete, tell_what_stays
from trainer import config as config_lib
from trainer.errors import ConfigError
from trainer.preflight import slices

# Known to `create` and `delete` by no name; `run` and `supervise` want them.
FILLED: tuple[str, ...] = ("model_dir", "dataset")

ACTIONS = {
    "create": "create it, or ask for it (--queued)",
    "install": "bring code and packages there",
    "run": "start the run in the background",
    "supervise": "all of these; again when the TPU is preempted, until the run ends",
    "logs": "print the end of the run's log",
    "delete": "delete the TPU, and the request for it",
}
_OF_RUN = ("run", "supervise")
_OF_MACHINE = ("create", "install", *_OF_RUN)
# Options that not every action has a use for.
_USED_BY = {
    "accelerator_type": _OF_MACHINE,
    "runtime_version": _OF_MACHINE,
    "queued": ("create", "supervise", "delete"),
    **dict.fromkeys(("valid_until", "spot", "service_account"), ("create", "supervise")),
    **dict.fromkeys(("network", "subnetwork", "internal_ips"), ("create", "supervise")),
    **dict.fromkeys(("code", "env_file"), ("install", "supervise")),
    **dict.fromkeys(("delete_when_done", "poll_secs", "max_failures"), ("supervise",)),
}
_LOG_LINES = 1000
_POLL_SECS, _MAX_FAILURES = 60.0, 5

# Images with driver and libraries for the chips; TensorFlow is the trainer's own. https://cloud.google.com/tpu/docs/runtimes
_RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
_OLDER_RUNTIME = "tpu-ubuntu2204-base"
# The workers of a pod run the TensorFlow of the image: it has to be one that the trainer runs on.
_POD_RUNTIME = "tpu-vm-tf-2.19.0-pod-pjrt"
_POD_TENSORFLOWS = ("2.19", "2.20", "2.21")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this platform."""
    does = "; ".join(f"{action}: {what}" for action, what in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=does)
    tpu = parser.add_argument_group("the TPU, named by --name")
    tpu.add_argument("--zone", required=True, help="zone of the TPU, such as us-central1-a")
    tpu.add_argument("--project", help="default: gcloud's own")
    tpu.add_argument("--accelerator_type", help="slice: v2-8, v3-32, v5litepod-8 or v5e-8, v6e-8, ...")
    tpu.add_argument("--runtime_version", help="image; default: Cloud's for that chip")
    tpu.add_argument("--queued", action="store_true", help="ask for it as queued resource, and wait for capacity")
    tpu.add_argument("--valid_until", help="of a queued one: how long the request stands, such as 6h")
    tpu.add_argument("--spot", action="store_true", help="cheaper, and may be taken away at any time")
    tpu.add_argument("--service_account", help="whom the VM acts as; needs the buckets, and on pods roles/tpu.viewer")
    tpu.add_argument("--network", help="VPC network; default: `default`")
    tpu.add_argument("--subnetwork", help="subnetwork; default: the network's")
    tpu.add_argument("--internal_ips", action="store_true", help="no external address; pip then needs a NAT or mirror")
    run = parser.add_argument_group("what is installed")
    run.add_argument(
        "--code", help="gs:// archive of the checkout (git archive, .tar.gz); default: this checkout's HEAD"
    )
    run.add_argument("--env_file", help="file of NAME=value lines for the run, such as TRAINER_ALERT_URL; copied there")
    supervise = parser.add_argument_group("supervise")
    supervise.add_argument("--delete_when_done", action="store_true", help="delete the TPU when the run has ended")
    supervise.add_argument("--poll_secs", type=float, help=f"seconds between two looks; default {_POLL_SECS:g}")
    supervise.add_argument("--max_failures", type=int, help=f"failures in a row; default {_MAX_FAILURES}")


def launch(job: Job, options: argparse.Namespace, actions: Actions) -> None:
    """Does `options.action`, or prints what it would do.

    Raises:
        ConfigError: everything that is wrong with job and options, in one error.
        TrainerError: a command failed; of `supervise`, how the run has ended.
    """
    machine = _checked(job, options)
    remote = Remote(machine, actions, job, options.code, options.env_file)
    if options.action == "create":
        actions.note("Queued: it comes when there is capacity." if machine.queued else "It is billed from here on.")
        actions.run(machine.create())
    elif options.action == "install":
        remote.install()
    elif options.action == "run":
        remote.start()
    elif options.action == "logs":
        actions.run(remote.logs(_LOG_LINES))
    elif options.action == "delete":
        _delete(machine, actions)
    else:
        _supervise(remote, options)


def _delete(machine: Machine, actions: Actions) -> None:
    if actions.submit:
        delete(machine, actions)
        tell_what_stays(machine, actions)
        return
    actions.note("What there is of it: the node, or with --queued the request and its node.")
    actions.run(machine.delete(queued=machine.queued))


def _supervise(remote: Remote, options: argparse.Namespace) -> None:
    supervisor = Supervisor(
        remote,
        poll_secs=_POLL_SECS if options.poll_secs is None else options.poll_secs,
        max_failures=_MAX_FAILURES if options.max_failures is None else options.max_failures,
        delete_when_done=options.delete_when_done,
    )
    supervisor.run() if remote.actions.submit else supervisor.rehearse()


def _checked(job: Job, options: argparse.Namespace) -> Machine:
    """The machine that `options` describe; ConfigError with all that is wrong with it and with what runs on it."""
    problems, cut = [], None
    if options.accelerator_type:
        try:
            cut = _slice(options.accelerator_type)
        except ConfigError as error:
            problems.append(str(error))
    elif options.action in _OF_MACHINE:
        problems.append(f"accelerator_type is missing for {options.action}; give --accelerator_type=v5litepod-8 or so")
    machine = Machine(
        name=job.name,
        zone=options.zone,
        project=options.project,
        slice=cut,
        runtime_version=options.runtime_version or (_runtime(cut) if cut else ""),
        queued=options.queued,
        spot=options.spot,
        valid_until=options.valid_until,
        service_account=options.service_account,
        network=options.network,
        subnetwork=options.subnetwork,
        internal_ips=options.internal_ips,
    )
    problems += _problems_of_options(options) + (_problems_of_runtime(machine) if cut else [])
    if options.action in _OF_RUN:
        problems += _problems_of_run(job, machine)
    if problems:
        raise ConfigError("\n  ".join(["this cannot be launched:", *problems]))
    return machine


def _slice(text: str) -> slices.Slice:
    try:
        cut = slices.parse(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--slice=", "--accelerator_type=")) from error
    if not cut.chip.tensorflow:
        raise ConfigError(f"TensorFlow does not run on {cut.chip.name}. Received: --accelerator_type={text}")
    if ":" in text:
        raise ConfigError(
            f"give Cloud's name, such as v5litepod-8, not a topology. Received: --accelerator_type={text}"
        )
    return cut


def _runtime(cut: slices.Slice) -> str:
    return _POD_RUNTIME if cut.num_hosts > 1 else _RUNTIMES.get(cut.chip.name, _OLDER_RUNTIME)


def _problems_of_runtime(machine: Machine) -> list[str]:
    of_pod = POD_RUNTIME.fullmatch(machine.runtime_version)
    received = f"Received: --runtime_version={machine.runtime_version}"
    if machine.is_pod and (of_pod is None or of_pod[1] not in _POD_TENSORFLOWS):
        return [
            "the workers of a pod run the TensorFlow of its image; name one such as "
            f"{_POD_RUNTIME}, of {', '.join(_POD_TENSORFLOWS)}. {received}"
        ]
    if not machine.is_pod and of_pod:
        return [f"this image is for pods, and {machine.accelerator_type} is one VM. {received}"]
    return []


def _problems_of_options(options: argparse.Namespace) -> list[str]:
    problems = []
    if options.valid_until and not options.queued:
        problems.append(f"valid_until is for a queued resource; add --queued. Received: {options.valid_until}")
    problems += [
        f"{name} is for {' and '.join(actions)}; leave it out of {options.action}"
        for name, actions in _USED_BY.items()
        if options.action not in actions and getattr(options, name)
    ]
    if options.poll_secs is not None and options.poll_secs <= 0:
        problems.append(f"poll_secs must be above 0. Received: {options.poll_secs:g}")
    if options.max_failures is not None and options.max_failures < 1:
        problems.append(f"max_failures must be at least 1. Received: {options.max_failures}")
    if options.code and not (options.code.startswith("gs://") and options.code.endswith(".tar.gz")):
        problems.append(f"code is a .tar.gz on gs://, as `git archive` makes it. Received: {options.code}")
    if options.env_file and not pathlib.Path(options.env_file).is_file():
        problems.append(f"env_file is no file. Received: {options.env_file}")
    return problems


def _problems_of_run(job: Job, machine: Machine) -> list[str]:
    """What the trainer would refuse there, and what would be lost with the VM."""
    problems = [f"{name} is missing; give -- --{name}=..." for name in FILLED if name not in job.values]
    problems += [
        f"{name} must be on gs://: the disk of a TPU VM goes with it. Received: {path}"
        for name, path in local_paths(job).items()
    ]
    config = job.config
    by_name = "dataset" in job.values and "/" not in config.dataset and config.dataset != "synthetic"
    if by_name and config.data_dir is None:
        problems.append(f"data_dir is missing, the directory on gs:// that holds {config.dataset}")
    if config.tpu not in (None, config_lib.TPU_OF_THIS_ENVIRONMENT):
        problems.append(f"tpu is {machine.name} itself; leave it out. Received: {config.tpu}")
    if config.backend == "jax":
        problems.append(
            "what is installed and started here is TensorFlow's. For --backend=jax install '.[jax-tpu]' on every host "
            "of the TPU and start the trainer with --tpu=local on all of them (`tpu-vm ssh --worker=all`), or use "
            "scripts/launch k8s. Received: backend=jax"
        )
    told = {**job.values, **Remote.trainer_flags(machine)}
    filled = {name: f"<{name}>" for name in FILLED}
    problems += config_lib.inspect(filled, told)[1]
    if machine.is_pod and config.cache != "none":
        problems.append(
            f"cache is for hosts that run the trainer, which the workers of a pod do not. Received: {config.cache}"
        )
    if machine.is_pod and config.data_service:
        problems.append(
            f"the workers of a pod read their data themselves; leave out data_service. Received: {config.data_service}"
        )
    return problems
