"""What `scripts/launch k8s` refuses before a cluster, or the trainer in it, does."""

import re
from collections.abc import Mapping
from typing import Any

from scripts.launchers import schedule
from scripts.launchers.job import Job, local_paths
from scripts.launchers.k8s.settings import ACCELERATORS, MARGIN_SECS, SCRATCH, Settings, hosts
from trainer import config as config_lib
from trainer import plan
from trainer.errors import ConfigError
from trainer.preflight import slices

# After SIGTERM a pod of a Spot VM has 15 s, best effort; system pods get the other half of the VM's 30 s.
# https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
_SPOT_SECS = 15
# Workers wait for each other while nodes are made and an image of gigabytes is pulled onto them.
_PATIENCE_SECS = 1800.0
_LONGEST_NAME = 63  # of a pod: RFC 1035, 2.3.4
_POD_SUFFIX = "-abcde"  # random characters that Kubernetes adds
_IMAGE = re.compile(r"(?P<name>[^:@\s]+(:[0-9]+/[^:@\s]+)?)(:(?P<tag>[\w.-]+))?(?P<digest>@sha256:[0-9a-f]{64})?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGT]|[KMGT]i)?")


def checked(settings: Settings, job: Job) -> dict[str, Any]:
    """The values of the trainer's options there: those given, and those that follow from `settings`.

    Raises:
        ConfigError: everything that is wrong, in one error.
    """
    values = {**job.values, **_following(settings, job.values)}
    config, problems = config_lib.inspect(values)
    problems += _problems_of_hardware(settings, config, job.config.tpu)
    problems += _problems_of_tasks(settings, config)
    problems += _problems_of_paths(job)
    problems += _problems_of_values(settings, config)
    if problems:
        raise ConfigError("\n  ".join(["this cannot run on Kubernetes:", *problems]))
    return values


def _following(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the trainer that follow from where it runs."""
    values: dict[str, Any] = {}
    if settings.slice:
        values["tpu"] = "local"  # the chips of the pod's own node
    if settings.spot and "grace_secs" not in given:
        values["grace_secs"] = float(_SPOT_SECS - MARGIN_SECS)
    if _makes_job_set(settings) and "connect_timeout_secs" not in given:
        values["connect_timeout_secs"] = _PATIENCE_SECS
    return values


def _problems_of_hardware(settings: Settings, config: config_lib.Config, tpu: str | None) -> list[str]:
    problems = []
    if tpu is not None and not settings.slice:
        problems.append(f"a TPU needs a node of GKE; give --slice, such as --slice=v5e-8. Received: --tpu={tpu}")
    if tpu not in (None, "local", config_lib.TPU_OF_THIS_ENVIRONMENT):
        problems.append(f"a pod uses the chips of its own node; leave out tpu. Received: --tpu={tpu}")
    if settings.slice and settings.gpus:
        problems.append(f"--gpus has no effect with --slice; leave one out. Received: --gpus={settings.gpus}")
    if settings.gpus < 0:
        problems.append(f"--gpus must be at least 0. Received: {settings.gpus}")
    if settings.gpu_type and not settings.gpus:
        problems.append(f"--gpu_type has no effect without --gpus. Received: --gpu_type={settings.gpu_type}")
    if settings.gpus and config.replicas is not None and config.replicas > settings.gpus:
        problems.append(f"replicas={config.replicas} and --gpus={settings.gpus}: one replica a GPU, so raise --gpus")
    try:
        problems += _problems_of_slice(settings.tpu, config.backend) if settings.tpu else []
        replicas = settings.tpu.num_replicas if settings.tpu else config.replicas or max(settings.gpus, 1)
        total = replicas * max(settings.workers, 1)
        plan.resolve(config, num_replicas=total, num_train_examples=0, num_eval_examples=0)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _makes_job_set(settings: Settings) -> bool:
    try:
        return settings.kind == "jobset"
    except ConfigError:  # no such slice, which is told elsewhere
        return False


def _problems_of_slice(tpu: slices.Slice, backend: str) -> list[str]:
    known = ", ".join(name for name in ACCELERATORS if backend == "jax" or slices.CHIPS[name].tensorflow)
    if not tpu.chip.tensorflow and backend != "jax":
        return [
            f"TensorFlow does not run on {tpu.chip.name}; use {known}, or --backend=jax. Received: --slice={tpu.name}"
        ]
    if tpu.chip.name not in ACCELERATORS:
        return [
            f"GKE has no nodes with {tpu.chip.name}, Cloud TPU VMs have (scripts/launch tpu-vm); "
            f"use {known}. Received: --slice={tpu.name}"
        ]
    if tpu.num_hosts == 1:
        return []
    if backend == "jax" and tpu.chip.name == "v3":  # its nodes of several hosts have another name, and no JAX of today
        return [f"on GKE a v3 slice is one host here; use v4 or later. Received: --slice={tpu.name}"]
    if backend == "jax":
        return []
    # https://docs.cloud.google.com/tpu/docs/tensorflow-pods; for GKE, .../kubernetes-engine/docs/how-to/tpu-multislice
    return [
        f"--slice={tpu.name} has {tpu.num_hosts} hosts. TensorFlow drives such a slice from one process, through TPU "
        "workers that Cloud's images for TPU VMs run on every host (tpu-vm-tf-*-pod) and GKE's nodes do not; Google's "
        f"guides to slices of several hosts on GKE are for JAX and PyTorch. Use --backend=jax, at most "
        f"{tpu.chip.chips_of_vm} chips (one host), or a pod of TPU VMs: scripts/launch tpu-vm"
    ]


def _problems_of_tasks(settings: Settings, config: config_lib.Config) -> list[str]:
    problems = []
    if settings.workers < 1:
        problems.append(f"--workers must be at least 1. Received: {settings.workers}")
    if settings.evaluator and settings.workers < 2:
        problems.append("--evaluator stands beside several workers, one evaluates itself. Add --workers=2 or more")
    if settings.evaluator and config.mode != "train_and_eval":
        problems.append(f"--evaluator has nothing to do with mode={config.mode}; leave it out")
    if settings.workers >= 2 and settings.slice:
        whole = (
            "a slice has a pod on each of its hosts" if config.backend == "jax" else "one process drives a whole slice"
        )
        problems.append(f"{whole}; leave out --workers or --slice")
    if not _makes_job_set(settings):
        return problems
    if settings.schedule:
        several = f"--slice={settings.slice}" if settings.slice else f"--workers={settings.workers}"
        problems.append(
            "a CronJob makes Jobs, and several workers are a JobSet, which has no schedule; leave out one of "
            f"--{'slice' if settings.slice else 'workers'} and --schedule. Received: {several}, "
            f"--schedule={settings.schedule!r}"
        )
    if config.replicas not in (None, 1) and not settings.gpus and config.backend != "jax":
        problems.append(f"a worker without GPUs is one replica; leave out replicas. Received: {config.replicas}")
    longest = max(len(host) for host in hosts(settings).values()) + len(_POD_SUFFIX)
    if longest > _LONGEST_NAME:
        problems.append(f"--name is {longest - _LONGEST_NAME} characters too long for the names of a JobSet's pods")
    return problems


def _problems_of_paths(job: Job) -> list[str]:
    problems = [
        f"{option} is a path of this machine, which a pod does not see; use gs://. Received: {path}"
        for option, path in local_paths(job).items()
    ]
    config = job.config
    synthetic = config.dataset.partition(":")[0] == "synthetic"
    if not synthetic and config.data_dir is None and "/" not in config.dataset:
        problems.append(f"a pod has no datasets; give --data_dir=gs://... Received: dataset={config.dataset}")
    if config.cache_dir and not f"{config.cache_dir}/".startswith(f"{SCRATCH}/"):
        problems.append(f"a pod can write below {SCRATCH} only (--disk). Received: cache_dir={config.cache_dir}")
    return problems


def _problems_of_values(settings: Settings, config: config_lib.Config) -> list[str]:
    problems = [
        f"--{name} must be a quantity of Kubernetes, such as 4, 500m or 16Gi. Received: {value!r}"
        for name, value in (("cpu", settings.cpu), ("memory", settings.memory), ("disk", settings.disk))
        if not _QUANTITY.fullmatch(value)
    ]
    image = _IMAGE.fullmatch(settings.image or "")
    if not image or not (image["digest"] or image["tag"]) or (image["tag"] == "latest" and not image["digest"]):
        problems.append(
            "--image must name one image for good, by a tag other than latest or by a digest: a pod in the place "
            f"of another must run the same code. Received: {settings.image}"
        )
    try:
        if settings.schedule:
            schedule.parse(settings.schedule)
    except ConfigError as error:
        problems.append(f"--schedule: {error}")
    if settings.time_zone and not settings.schedule:
        problems.append(f"--time_zone has no effect without --schedule. Received: {settings.time_zone}")
    if settings.queue and settings.suspend:
        problems.append("Kueue itself suspends what it has not admitted; leave out --suspend or --queue")
    if settings.spot and config.grace_secs > _SPOT_SECS - MARGIN_SECS:
        problems.append(
            f"a pod of a Spot VM has {_SPOT_SECS} s from SIGTERM on; grace_secs must be at most "
            f"{_SPOT_SECS - MARGIN_SECS}. Received: {config.grace_secs:g}"
        )
    if settings.max_failures < 1:
        problems.append(f"--max_failures must be at least 1. Received: {settings.max_failures}")
    if not settings.deadline_hours > 0:
        problems.append(f"--deadline_hours must be above 0. Received: {settings.deadline_hours:g}")
    return problems
