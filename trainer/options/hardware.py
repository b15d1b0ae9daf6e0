"""What computes."""

import dataclasses

from trainer import backend
from trainer.options.field import TRAINING, TRYING, option


@dataclasses.dataclass(frozen=True)
class HardwareOptions:
    """What computes."""

    backend: str = option(
        backend.NAMES[0],
        "what Keras computes with; weights, data and files are the same, random numbers are others",
        group="hardware",
        choices=backend.NAMES,
        changes_numbers=False,
    )
    tpu: str | None = option(
        None,
        "TPU to use: local, a name, grpc://host:port; bare --tpu: the TPU of this environment; "
        "without it all GPUs, else the CPU",
        group="hardware",
        changes_numbers=False,
    )
    tpu_zone: str | None = option(None, "zone of the named TPU", group="hardware", changes_numbers=False)
    tpu_project: str | None = option(None, "project of the named TPU", group="hardware", changes_numbers=False)
    replicas: int | None = option(
        None,
        "GPUs to use, or virtual CPU devices; default: all GPUs, else one CPU device",
        group="hardware",
        minimum=1,
        changes_numbers=False,
    )
    connect_timeout_secs: float = option(
        300.0, "seconds to wait for a TPU or for other workers", group="hardware", above=0, changes_numbers=False
    )
    xla: str = option(
        "auto",
        "compile with XLA on CPU and GPU (a TPU always does); auto: on for GPUs, off on CPU",
        group="hardware",
        choices=("auto", "on", "off"),
        changes_numbers=False,
    )
    compile_cache: str | None = option(
        None,
        "directory of this machine or a disk that hosts share, where programs compiled by XLA are kept for the next "
        "start; whoever can write there can run code here",
        group="hardware",
        modes=(*TRAINING, *TRYING),
        changes_numbers=False,
    )
    steps_per_loop: int = option(
        50,
        "steps the devices run between two looks of the host; no result depends on it",
        group="hardware",
        minimum=1,
        changes_numbers=False,
    )
