"""What Vertex AI would refuse, or take and fail at later: all of it in one error, before anything is submitted."""

import argparse
import re
from collections.abc import Iterator

from scripts.launchers.job import Job, local_paths
from scripts.launchers.vertex import machines, specs
from scripts.launchers.vertex.machines import Machine
from trainer import config as config_lib
from trainer.errors import ConfigError

_MOUNT = "/gcs/"  # where Vertex AI mounts every bucket that the job may read
_DAY_SECS = 24 * 60 * 60
_MAX_FLEX_START_SECS = 7 * _DAY_SECS
_DISK_GB = range(100, 64_001)
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_BY_VERTEX = re.compile(r"AIP_.*|CLOUD_ML_.*|CLUSTER_SPEC|TF_CONFIG|TPU_CONFIG|TPU_NODE_NAME")
_NETWORK = re.compile(r"projects/\d+/global/networks/[a-z0-9-]+")
_CRON = re.compile(r"\S+(\s+\S+){4}")
# Prebuilt containers say in their names what is in them: .../tf-gpu.2-17.py310:latest
_PREBUILT = re.compile(r".*/tf-[a-z]+\.(\d+)-(\d+)(?:\.[a-z]+(\d)(\d+))?(?::.*)?")
_OLDEST_TENSORFLOW, _OLDEST_PYTHON = (2, 19), (3, 11)  # of setup.cfg
_ALERTS = "TRAINER_ALERT_URL"


def check(job: Job, options: argparse.Namespace) -> Machine:
    """The machine that the options name, where nothing is wrong.

    Raises:
        ConfigError: one error with every problem.
    """
    problems: list[str] = []
    machine = None
    try:
        machine = machines.find(options.machine_type, options.accelerator, options.topology)
    except ValueError as error:
        problems.append(str(error))
    for check_one in (_where, _program, _environment, _scheduling, _schedule, _paths, _study):
        problems += check_one(job, options)
    if machine is not None:
        problems += [*_about_machine(job, options, machine), *_about_hardware_of_run(job, machine)]
    if problems or machine is None:
        raise ConfigError("\n  ".join(["Vertex AI cannot take this job:", *problems]))
    return machine


def _where(job: Job, options: argparse.Namespace) -> Iterator[str]:
    if options.base_output is None and "model_dir" not in job.values:
        yield "the job has no place to write; give --base_output=gs://..., or model_dir"
    if options.base_output is not None and not options.base_output.startswith("gs://"):
        yield f"base_output is a gs:// directory. Received: {options.base_output!r}"
    if options.network is not None and not _NETWORK.fullmatch(options.network):
        yield f"network is projects/NUMBER/global/networks/NAME, by number. Received: {options.network!r}"
    if options.tensorboard is not None:
        place = re.escape(options.region)
        if not re.fullmatch(rf"projects/[^/]+/locations/{place}/tensorboards/\d+", options.tensorboard):
            yield (
                f"tensorboard is projects/PROJECT/locations/{options.region}/tensorboards/NUMBER, in the region of the "
                f"job. Received: {options.tensorboard!r}"
            )
        if options.service_account is None or options.base_output is None:
            yield "tensorboard needs --service_account, which may write to it, and --base_output, where the logs go"
    for key, value in options.label:
        if not key or not _LABEL.fullmatch(key) or not _LABEL.fullmatch(value):
            yield f"labels are lower-case letters, digits, _ and -, at most 63. Received: {key}={value}"


def _program(_: Job, options: argparse.Namespace) -> Iterator[str]:
    if options.image:
        if options.executor_image:
            yield "executor_image is for --package; leave it out of --image"
        return
    if not re.fullmatch(r"gs://.+\.tar\.gz", options.package):
        yield f"package is a source distribution in a bucket, gs://BUCKET/NAME.tar.gz. Received: {options.package!r}"
    if options.retry == "supervise":
        yield "retry=supervise needs scripts/supervise, which is in no package; use --image, or --retry=vertex"
    if options.executor_image is None:
        yield "a package needs the prebuilt container that runs it; give --executor_image, or use --image instead"
        return
    prebuilt = _PREBUILT.fullmatch(options.executor_image)
    if prebuilt is None:
        return
    tensorflow = tuple(int(part) for part in prebuilt.group(1, 2))
    python = tuple(int(part) for part in prebuilt.group(3, 4)) if prebuilt[3] else None
    if tensorflow < _OLDEST_TENSORFLOW or (python is not None and python < _OLDEST_PYTHON):
        yield (
            "the trainer needs TensorFlow 2.19 and Python 3.11 or later, and that prebuilt container is older (2.17 on "
            f"3.10 was the newest in July 2026); use --image. Received: {options.executor_image}"
        )


def _environment(_: Job, options: argparse.Namespace) -> Iterator[str]:
    for name, _value in options.env:
        if not _ENV_NAME.fullmatch(name):
            yield f"an environment variable has a name of letters, digits and _. Received: {name!r}"
        elif _SET_BY_VERTEX.fullmatch(name):
            yield f"{name} is set by Vertex AI itself; leave it out of --env"
        elif name == _ALERTS:
            yield (
                f"{_ALERTS} would stand readable in the job, since Vertex AI has no secret variables; put it into the "
                "image instead"
            )


def _scheduling(_: Job, options: argparse.Namespace) -> Iterator[str]:
    if options.timeout_secs is not None and options.timeout_secs < 1:
        yield f"timeout_secs is at least 1. Received: {options.timeout_secs}"
    if options.max_wait_secs is not None and options.strategy != "flex-start":
        yield f"max_wait_secs has no effect on strategy={options.strategy}; leave it out or use --strategy=flex-start"
    if options.max_wait_secs is not None and options.max_wait_secs < 0:
        yield f"max_wait_secs is at least 0. Received: {options.max_wait_secs}"
    if options.strategy == "flex-start" and (options.timeout_secs or 0) > _MAX_FLEX_START_SECS:
        yield f"flex-start ends a job after 7 days; give a lower --timeout_secs. Received: {options.timeout_secs}"
    if options.disk_gb is not None and options.disk_gb not in _DISK_GB:
        yield f"disk_gb is from {_DISK_GB[0]} to {_DISK_GB[-1]}. Received: {options.disk_gb}"


def _schedule(_: Job, options: argparse.Namespace) -> Iterator[str]:
    if options.schedule is None:
        if options.scheduler_account or options.time_zone != "Etc/UTC":
            yield "time_zone and scheduler_account have no effect without --schedule"
        return
    if not _CRON.fullmatch(options.schedule):
        yield f"schedule has five fields, as cron's: '0 3 * * *'. Received: {options.schedule!r}"
    if options.scheduler_account is None:
        yield "schedule needs a service account that creates the job; give --scheduler_account"


def _paths(job: Job, options: argparse.Namespace) -> Iterator[str]:
    for name, path in local_paths(job).items():
        if not path.startswith(_MOUNT):
            yield f"{name} is on this machine only; put it into a bucket, gs://... or {_MOUNT}... Received: {path!r}"
    config = job.config
    named = config.dataset and "/" not in config.dataset and not config.dataset.startswith("synthetic")
    if named and config.data_dir is None and "TFDS_DATA_DIR" not in dict(options.env):
        yield f"dataset {config.dataset!r} would be looked for on the machine; give data_dir, gs://..."


def _study(job: Job, options: argparse.Namespace) -> Iterator[str]:
    if options.study is None:
        return
    if "model_dir" in job.values:
        yield "all trials would write into one model_dir; leave it out, --base_output gives each its own"
    if options.base_output is None:
        yield "trials need --base_output=gs://..., below which each writes"
    if job.config.mode != "train_and_eval":
        yield f"a study needs evaluations, mode=train_and_eval. Received: {job.config.mode}"


def _about_machine(job: Job, options: argparse.Namespace, machine: Machine) -> Iterator[str]:
    if options.workers < 0:
        yield f"workers is at least 0. Received: {options.workers}"
    if machine.kind == "tpu" and (options.workers or options.evaluator):
        yield (
            "Vertex AI takes one pool of one replica for TPUs; leave out workers and evaluator, and take a larger "
            "slice by --topology, or --accelerator=TPU_V3:32"
        )
    if machine.hosts > 1 and job.config.backend == "jax":
        yield (
            f"this slice has {machine.hosts} VMs; how Vertex AI starts JAX on each of them has not been tried: take "
            "a slice of one, or GKE (scripts/launch k8s --slice=...)"
        )
    if machine.pjrt and options.package:
        yield f"there is no prebuilt container for {options.machine_type}; use --image instead of --package"
    if machine.hosts > 1 and options.strategy == "spot":
        yield "Spot is not supported on TPU slices of several VMs; take a slice of one, or --strategy=standard"
    if options.strategy == "flex-start" and not machine.flex_start:
        yield "flex-start is for L4, A100, H100, H200 and B200 GPUs; use --strategy=standard or spot"
    replicas = job.config.replicas
    if machine.kind == "gpu" and replicas is not None and replicas > machine.gpus:
        yield f"{options.machine_type} has {machine.gpus} GPUs here; leave out replicas. Received: {replicas}"


def _about_hardware_of_run(job: Job, machine: Machine) -> Iterator[str]:
    """The options of the trainer that speak of hardware, against the machine."""
    tpu = job.config.tpu
    if machine.kind != "tpu":
        if tpu is not None:
            yield f"{machine.spec['machineType']} has no TPU; leave out tpu, or name a TPU machine. Received: {tpu!r}"
        return
    if tpu not in (None, config_lib.TPU_OF_THIS_ENVIRONMENT, specs.TPU_OF_THIS_VM):
        yield f"the TPU of a job on Vertex AI is its own; leave out tpu. Received: {tpu!r}"
        return
    if tpu == specs.TPU_OF_THIS_VM and machine.hosts > 1:
        yield f"tpu={tpu} is the chips of one VM, and this slice has {machine.hosts}; leave out tpu"
    if tpu is None:
        # What the trainer says to a TPU beside the other options.
        filled, on_tpu = {"model_dir": job.config.model_dir}, {"tpu": config_lib.TPU_OF_THIS_ENVIRONMENT}
        yield from config_lib.inspect(filled, job.values, on_tpu)[1]
