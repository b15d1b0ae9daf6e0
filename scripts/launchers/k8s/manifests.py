"""From settings to Kubernetes' objects, as YAML for its comments, though most of it is JSON, which YAML takes as it is.

Every kind holds the same Job: a CronJob makes one at each tick, a JobSet one for its workers and one for its evaluator.
"""

import json
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from scripts.launchers.k8s.settings import ACCELERATORS, MARGIN_SECS, SCRATCH, Settings, hosts
from trainer import config as config_lib
from trainer.errors import EXIT_CONFIG, EXIT_DEFECT, EXIT_RETRY, EXIT_USAGE

INSTANCE = "app.kubernetes.io/instance"
_KINDS = {"job": "Job", "cronjob": "CronJob", "jobset": "JobSet"}
_CONTAINER = "trainer"
_CONFIG_FILE = "run.json"
_CONFIG_DIR = "/config"
_PORT = 2222  # between workers; any that is free in a pod of its own
_TASK_INDEX = "$(TASK_INDEX)"
_SECS_OF_HOUR = 3600
# A tick that was missed, because of the run before it or of the cluster, may still start this late. Without a limit a
# CronJob that has missed 100 ticks starts none any more:
# https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/#starting-deadline
_STARTING_DEADLINE_SECS = 3600
_KEPT_JOBS = 3  # of a CronJob, of those that succeeded and of those that failed: their logs stay as long
# https://jobset.sigs.k8s.io/docs/tasks/ (exclusive job placement)
_IN_ONE_POOL = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}

Object = dict[str, Any]

_UNPRIVILEGED: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def text(settings: Settings, values: Mapping[str, Any]) -> str:
    """One file for `kubectl apply`.

    Args:
        settings: checked.
        values: of the trainer's options.
    """
    about = "".join(f"# {line}\n" for line in _about(settings, values))
    job = {"job": _job, "cronjob": _cron_job, "jobset": _job_set}[settings.kind](settings, values)
    # Not one List: the fields of that kubectl (1.31) would check itself, not let the server do it.
    return f"{about}---\n{_config_map(settings, values)}---\n{json.dumps(job, indent=2)}\n"


def _about(settings: Settings, values: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{settings.name}: a ConfigMap with the options of the trainer, and a {_KINDS[settings.kind]}.",
        f"- Exit codes {EXIT_DEFECT}, {EXIT_USAGE} and {EXIT_CONFIG} end it: no other pod would do better.",
        f"- After {EXIT_RETRY} (stopped early) or a disruption another pod goes on from the newest checkpoint, as",
        f"  often as it takes, for {settings.deadline_hours:g} h at most.",
        f"- Pods lost in another way (out of memory) count: number {settings.max_failures} ends it.",
        f"- A pod has {_grace_secs(values)} s from SIGTERM to its end. Two never train in one model_dir: the second",
        f"  finds the lease of the first and leaves with {EXIT_RETRY}.",
        f"- What goes to gs:// passes through {SCRATCH} ({settings.disk}), which is lost with the pod.",
    ]
    if settings.tpu:
        lines.append(
            "- GKE (from 1.28 on) gives the pod its chips and TPU_* variables. It runs as root, whose the chips are."
        )
    if settings.tpu and settings.is_slice_of_hosts:
        lines.append(
            f"- A pod on each of the {settings.tpu.num_hosts} hosts of {settings.tpu.name}; they meet at the first."
        )
    if settings.kind == "jobset":
        lines.append("- The cluster needs JobSet, https://jobset.sigs.k8s.io; TF_CONFIG is made of its host names.")
    if settings.kind == "cronjob" and "run_id" not in values:
        lines.append("- Every tick goes on with one run until it is finished; --run_id='{date}' makes a run of each.")
    if settings.alert_secret:
        lines.append(f"- Once: kubectl create secret generic {settings.alert_secret} --from-literal=url=...")
    if not settings.service_account:
        lines.append("- Without --service_account the pods have the rights of the namespace's default one.")
    return lines


def _metadata(settings: Settings, name: str | None = None, *, queued: bool = False) -> Object:
    labels = {"app.kubernetes.io/name": "keras-tpu-trainer", INSTANCE: settings.name}
    if queued and settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    place = {"name": name, **({"namespace": settings.namespace} if settings.namespace else {})} if name else {}
    return {**place, "labels": labels}


def _config_map(settings: Settings, values: Mapping[str, Any]) -> str:
    """Written out, since JSON would have the whole config in one line."""
    return (
        "apiVersion: v1\n"
        "kind: ConfigMap\n"
        f"metadata: {json.dumps(_metadata(settings, _config_name(settings)))}\n"
        "data:\n"
        f"  {_CONFIG_FILE}: |\n"
        f"{textwrap.indent(json.dumps(values, indent=2), '    ')}\n"
    )


def _config_name(settings: Settings) -> str:
    return f"{settings.name}-config"


def _job(settings: Settings, values: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(settings, settings.name, queued=True),
        "spec": {**_suspended(settings), **_job_spec(settings, values)},
    }


def _cron_job(settings: Settings, values: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": _metadata(settings, settings.name),
        "spec": {
            "schedule": settings.schedule,
            **({"timeZone": settings.time_zone} if settings.time_zone else {}),
            **_suspended(settings),
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": _STARTING_DEADLINE_SECS,
            "successfulJobsHistoryLimit": _KEPT_JOBS,
            "failedJobsHistoryLimit": _KEPT_JOBS,
            "jobTemplate": {
                "metadata": _metadata(settings, queued=True),
                "spec": _job_spec(settings, values),
            },
        },
    }


def _job_set(settings: Settings, values: Mapping[str, Any]) -> Object:
    jobs = [
        {
            "name": task,
            "replicas": 1,
            "template": {
                "metadata": _metadata(settings),
                "spec": {
                    "completionMode": "Indexed",
                    "completions": pods,
                    "parallelism": pods,
                    **_job_spec(settings, values, task),
                },
            },
        }
        for task, pods in settings.tasks.items()
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **_metadata(settings, settings.name, queued=True),
            # All pods of a slice in one node pool, which is the slice.
            **({"annotations": _IN_ONE_POOL} if settings.is_slice_of_hosts else {}),
        },
        "spec": {
            **_suspended(settings),
            "network": {"enableDNSHostnames": True, "subdomain": settings.name},
            # A Job replaces its own pods, and the others end with 75 and are replaced too. So where one fails, all do.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }


def _suspended(settings: Settings) -> Object:
    # Left out rather than false: to apply the file again must not resume what somebody has suspended.
    return {"suspend": True} if settings.suspend else {}


def _job_spec(settings: Settings, values: Mapping[str, Any], task: str | None = None) -> Object:
    """What all kinds have in common.

    The first rule that matches counts: https://kubernetes.io/docs/tasks/job/pod-failure-policy/. What none matches
    counts against backoffLimit. Ignored failures do not, so only the deadline bounds them.
    """
    codes = {"containerName": _CONTAINER, "operator": "In"}
    fatal = sorted([EXIT_DEFECT, EXIT_USAGE, EXIT_CONFIG])
    return {
        "backoffLimit": settings.max_failures - 1,
        "activeDeadlineSeconds": round(settings.deadline_hours * _SECS_OF_HOUR),
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {**codes, "values": fatal}},
                {"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_RETRY]}},
            ]
        },
        "template": {"metadata": _metadata(settings), "spec": _pod(settings, values, task)},
    }


def _pod(settings: Settings, values: Mapping[str, Any], task: str | None) -> Object:
    return {
        "restartPolicy": "Never",  # podFailurePolicy wants it
        "terminationGracePeriodSeconds": _grace_secs(values),
        **({"serviceAccountName": settings.service_account} if settings.service_account else {}),
        **_node(settings),
        # A node's chips are device files of root; since GKE 1.28 a pod needs no privileges beyond that:
        # https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode
        "securityContext": {
            "seccompProfile": {"type": "RuntimeDefault"},
            **({} if settings.tpu else {"runAsNonRoot": True}),
        },
        "containers": [_container(settings, task)],
        "volumes": [
            {"name": "config", "configMap": {"name": _config_name(settings)}},
            {"name": "scratch", "emptyDir": {"sizeLimit": settings.disk}},
            # A container has 64 MiB of it, and NCCL needs more between GPUs, as libtpu does.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _grace_secs(values: Mapping[str, Any]) -> int:
    return math.ceil(config_lib.merge(values).grace_secs) + MARGIN_SECS


def _node(settings: Settings) -> Object:
    """On which nodes a pod may stand. GKE itself adds the tolerations of what a pod has of TPUs and GPUs."""
    selector: dict[str, str] = {}
    if settings.tpu:
        selector["cloud.google.com/gke-tpu-accelerator"] = ACCELERATORS[settings.tpu.chip.name]
        selector["cloud.google.com/gke-tpu-topology"] = settings.tpu.topology.rpartition(":")[2]
    if settings.gpu_type:
        selector["cloud.google.com/gke-accelerator"] = settings.gpu_type
    if not settings.spot:
        return {"nodeSelector": selector} if selector else {}
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    return {"nodeSelector": {**selector, spot["key"]: "true"}, "tolerations": [spot]}


def _container(settings: Settings, task: str | None) -> Object:
    chips: Mapping[str, int] = {}  # Kubernetes takes them whole: what is requested is the limit too
    if settings.tpu:
        chips = {"google.com/tpu": settings.tpu.num_chips // settings.tpu.num_hosts}
    elif settings.gpus:
        chips = {"nvidia.com/gpu": settings.gpus}
    requests = {"cpu": settings.cpu, "memory": settings.memory, "ephemeral-storage": settings.disk, **chips}
    return {
        "name": _CONTAINER,
        "image": settings.image,
        "command": ["python", "-m", "trainer.main", f"--config={_CONFIG_DIR}/{_CONFIG_FILE}"],
        "env": _environment(settings, task),
        "resources": {"requests": requests, **({"limits": chips} if chips else {})},
        **({} if settings.tpu else {"securityContext": _UNPRIVILEGED}),
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_DIR, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _environment(settings: Settings, task: str | None) -> list[Object]:
    variables: list[Object] = [{"name": "TMPDIR", "value": SCRATCH}]
    if settings.alert_secret:
        secret = {"secretKeyRef": {"name": settings.alert_secret, "key": "url"}}
        variables.append({"name": "TRAINER_ALERT_URL", "valueFrom": secret})
    if task:
        # Kubernetes puts $(NAME) of an earlier variable into a later one:
        # https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        variables.append({"name": "TASK_INDEX", "valueFrom": index})
        variables.append({"name": "TF_CONFIG", "value": _tf_config(settings, task)})
    return variables


def _tf_config(settings: Settings, task: str) -> str:
    cluster: dict[str, list[str]] = {}
    for (job, _), host in hosts(settings).items():
        cluster.setdefault(job, []).append(f"{host}.{settings.name}:{_PORT}")
    config = json.dumps({"cluster": cluster, "task": {"type": task, "index": _TASK_INDEX}})
    return config.replace(f'"{_TASK_INDEX}"', _TASK_INDEX)  # a number
