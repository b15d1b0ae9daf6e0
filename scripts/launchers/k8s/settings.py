"""What `scripts/launch k8s` takes: its options, and what follows from them alone."""

import argparse
import dataclasses
import functools

from trainer.preflight import slices

ACTIONS = ("start", "suspend", "resume", "status", "logs", "delete")
MARGIN_SECS = 3  # from the trainer's own deadline (--grace_secs) to that of the kubelet
SCRATCH = "/scratch"  # where a pod may write: its TMPDIR
# GKE's names for chips. There are no nodes with v2.
# https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
ACCELERATORS = {
    "v3": "tpu-v3-device",
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `add_arguments`, by the same names."""

    name: str
    action: str
    image: str | None
    namespace: str | None
    slice: str | None
    gpus: int
    gpu_type: str | None
    workers: int
    evaluator: bool
    cpu: str
    memory: str
    disk: str
    spot: bool
    service_account: str | None
    alert_secret: str | None
    schedule: str | None
    time_zone: str | None
    suspend: bool
    queue: str | None
    max_failures: int
    deadline_hours: float

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Settings":
        """The parsed command line."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @property
    def kind(self) -> str:
        """The kind of object, as kubectl names it."""
        if self.workers > 1 or self.is_slice_of_hosts:
            return "jobset"
        return "cronjob" if self.schedule else "job"

    @functools.cached_property
    def tpu(self) -> slices.Slice | None:
        """The slice that is asked for; ConfigError where there is none of that name."""
        return slices.parse(self.slice) if self.slice else None

    @property
    def is_slice_of_hosts(self) -> bool:
        """Whether the slice has several hosts, a pod on each; ConfigError as for `tpu`."""
        return self.tpu is not None and self.tpu.num_hosts > 1

    @property
    def tasks(self) -> dict[str, int]:
        """Task types of TF_CONFIG, with how many pods each has."""
        workers = self.tpu.num_hosts if self.tpu is not None else self.workers
        return {"worker": workers, **({"evaluator": 1} if self.evaluator else {})}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of `Settings` to a command line."""
    what = parser.add_argument_group("what")
    what.add_argument("--action", choices=ACTIONS, default="start", help="[start]; the rest is done to a started job")
    what.add_argument("--image", help="image of the Dockerfile, with a tag or digest")
    what.add_argument("--schedule", help="a CronJob: five fields of cron, or @daily and the like")
    what.add_argument("--time_zone", help="of the schedule, such as Europe/Zurich [that of the cluster]")
    what.add_argument("--suspend", action="store_true", help="create it suspended; --action=resume starts it")
    where = parser.add_argument_group("where")
    where.add_argument("--namespace", help="[that of the current context of kubectl]")
    where.add_argument("--slice", help="TPU slice, such as v5e-8 or v4:2x2x1; one of several hosts for backend=jax")
    where.add_argument("--gpus", type=int, default=0, help="GPUs of each pod [0]")
    where.add_argument("--gpu_type", help="GKE's name of the GPU, such as nvidia-l4 [any]")
    where.add_argument("--workers", type=int, default=1, help="pods that train together; several make a JobSet [1]")
    where.add_argument("--evaluator", action="store_true", help="one more pod, which evaluates beside the workers")
    where.add_argument("--cpu", default="4", help="CPUs to reserve for each pod [4]")
    where.add_argument("--memory", default="16Gi", help="memory to reserve for each pod [16Gi]")
    where.add_argument("--disk", default="10Gi", help=f"of {SCRATCH}, through which what goes to gs:// passes [10Gi]")
    where.add_argument("--spot", action="store_true", help="on Spot VMs")
    where.add_argument("--queue", help="Kueue's LocalQueue that admits it")
    where.add_argument("--service_account", help="whose rights to the buckets the pods have (Workload Identity)")
    where.add_argument("--alert_secret", help="Secret whose key `url` is TRAINER_ALERT_URL")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max_failures", type=int, default=5, help="pods lost without a word before giving up [5]")
    limits.add_argument("--deadline_hours", type=float, default=168.0, help="hours after which a run is stopped [168]")


def hosts(settings: Settings) -> dict[tuple[str, int], str]:
    """(task type, index) -> host name of the pod, which a JobSet gives it.

    Source: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ (enableDNSHostnames)
    """
    return {
        (task, index): f"{settings.name}-{task}-0-{index}"
        for task, pods in settings.tasks.items()
        for index in range(pods)
    }
