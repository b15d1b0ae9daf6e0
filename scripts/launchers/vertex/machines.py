"""Which machines Vertex AI trains TensorFlow on, and what each must be given; whatever else is refused with the reason.

Facts, read and not tried, from Google's documentation under docs.cloud.google.com (Vertex AI, since 2026 also "Gemini
Enterprise Agent Platform"): "Configure compute resources" (lists of machines, GPUs and TPU topologies), "Training with
TPU accelerators" (what TensorFlow runs on), "Use Spot VMs with training", "Schedule training jobs based on resource
availability".
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from trainer.config import nearest

# Sizes in vCPUs of the families without an accelerator; N1 takes GPUs besides.
_SIZES: Mapping[str, tuple[int, ...]] = {
    "e2-standard": (4, 8, 16, 32),
    "e2-highmem": (2, 4, 8, 16),
    "e2-highcpu": (16, 32),
    "n4-standard": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highcpu": (2, 4, 8, 16, 32, 48, 64, 80),
    "n2-standard": (4, 8, 16, 32, 48, 64, 80),
    "n2-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n2-highcpu": (16, 32, 48, 64, 80),
    "n1-standard": (4, 8, 16, 32, 64, 96),
    "n1-highmem": (2, 4, 8, 16, 32, 64, 96),
    "n1-highcpu": (16, 32, 64, 96),
    "c2-standard": (4, 8, 16, 30, 60),
    "m1-ultramem": (40, 80, 160),
    "m1-megamem": (96,),
}
CPU_MACHINES = frozenset(f"{family}-{size}" for family, sizes in _SIZES.items() for size in sizes)
# Machines with GPUs built in: which, and how many.
_BUILT_IN: Mapping[str, tuple[str, int]] = {
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    **{f"g2-standard-{vcpus}": ("NVIDIA_L4", 1) for vcpus in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{vcpus}": ("NVIDIA_L4", n) for vcpus, n in ((24, 2), (48, 4), (96, 8))},
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
# What may be attached to an N1, by its vCPUs: so many GPUs as carry them.
_FOUR = {2: (1, 2, 4), 4: (1, 2, 4), 8: (1, 2, 4), 16: (1, 2, 4), 32: (2, 4), 64: (4,), 96: (4,)}
_ATTACHED: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "NVIDIA_TESLA_T4": _FOUR,
    "NVIDIA_TESLA_P4": _FOUR,
    "NVIDIA_TESLA_V100": {
        **{vcpus: (1, 2, 4, 8) for vcpus in (2, 4, 8)},
        **{16: (2, 4, 8), 32: (4, 8), 64: (8,), 96: (8,)},
    },
}
# Flex start queues for these only.
_FLEX_START = re.compile(r"NVIDIA_(L4|TESLA_A100|A100_80GB|H100_80GB|H100_MEGA_80GB|H200_141GB|B200)")
# v2 and v3: cores by acceleratorCount, 8 on one host, a multiple of 32 on several.
CLOUD_TPU = "cloud-tpu"
_CORES_OF_HOST, _CORES_OF_POD = 8, 32
# v5e and v6e: hosts by machine type and topology.
_SLICES = {"2x2": 1, "2x4": 2, "4x4": 4, "4x8": 8, "8x8": 16, "8x16": 32, "16x16": 64}
_TOPOLOGIES: Mapping[str, Mapping[str, int]] = {
    machine: topologies
    for family in ("ct5lp-hightpu", "ct6e-standard")
    for machine, topologies in (
        (f"{family}-1t", {"1x1": 1}),
        (f"{family}-4t", _SLICES),
        (f"{family}-8t", {"2x4": 1}),
    )
}
_REFUSED = {
    "tpu7x": "TPU7x has no TensorFlow; for JAX, use it on GKE (scripts/launch k8s), or take ct5lp-* (v5e)",
    "ct5p": "Vertex AI offers no v5p for training; take ct5lp-* (v5e), or scripts/launch tpu-vm or k8s",
    "ct4p": "Vertex AI offers no v4 for training; take ct5lp-* (v5e), or scripts/launch tpu-vm",
}
_P100 = "NVIDIA_TESLA_P100"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine of a replica.

    spec: the API's MachineSpec.
    kind: cpu, gpu or tpu; also the extra of setup.cfg that it needs.
    hosts: VMs of the TPU slice.
    gpus: of each replica.
    """

    spec: Mapping[str, Any]
    kind: str
    hosts: int = 1
    gpus: int = 0

    @property
    def pjrt(self) -> bool:
        """Whether TensorFlow must be told to load libtpu by the PJRT interface: v5e and later."""
        return self.kind == "tpu" and self.spec["machineType"] != CLOUD_TPU

    @property
    def v6e(self) -> bool:
        """Whether Google's pages contradict each other about TensorFlow on it."""
        return str(self.spec["machineType"]).startswith("ct6e")

    @property
    def flex_start(self) -> bool:
        """Whether the Dynamic Workload Scheduler can queue for it."""
        return self.gpus > 0 and bool(_FLEX_START.fullmatch(self.spec["acceleratorType"]))


def find(machine_type: str, accelerator: str | None, topology: str | None) -> Machine:
    """The machine that the options name.

    Args:
        machine_type: Google's name.
        accelerator: `TYPE:COUNT`, such as NVIDIA_TESLA_T4:2 or TPU_V3:8; what is built in need not be named.
        topology: of a v5e or v6e slice, such as 4x4.

    Raises:
        ValueError: Vertex AI has no such machine for TensorFlow; says what it has.
    """
    for family, reason in _REFUSED.items():
        if machine_type.startswith(family):
            raise ValueError(f"{reason}. Received: --machine_type={machine_type}")
    if machine_type in _TOPOLOGIES:
        return _slice(machine_type, accelerator, topology)
    if topology:
        raise ValueError(f"a topology is for ct5lp-* and ct6e-*; leave it out of {machine_type}. Received: {topology}")
    kind, count = _parse(accelerator)
    if machine_type == CLOUD_TPU:
        return _cloud_tpu(kind, count)
    if machine_type in _BUILT_IN:
        built_in = _BUILT_IN[machine_type]
        if accelerator and (kind, count) != built_in:
            told = "{}:{}".format(*built_in)
            raise ValueError(f"{machine_type} has {told} built in; give that or nothing. Received: {accelerator}")
        return _with_gpus(machine_type, *built_in)
    if machine_type not in CPU_MACHINES:
        known = [*CPU_MACHINES, *_BUILT_IN, *_TOPOLOGIES, CLOUD_TPU]
        raise ValueError(f"Vertex AI trains on no machine type {machine_type!r}{nearest(machine_type, known)}")
    if kind is None:
        return Machine({"machineType": machine_type}, "cpu")
    return _n1(machine_type, kind, count)


def _parse(accelerator: str | None) -> tuple[str | None, int]:
    if accelerator is None:
        return None, 0
    kind, _, count = accelerator.partition(":")
    if not kind or not count.isascii() or not count.isdecimal() or int(count) == 0:
        raise ValueError(f"accelerator is TYPE:COUNT, such as NVIDIA_TESLA_T4:2 or TPU_V3:8. Received: {accelerator!r}")
    return kind, int(count)


def _slice(machine_type: str, accelerator: str | None, topology: str | None) -> Machine:
    hosts = _TOPOLOGIES[machine_type]
    if accelerator:
        raise ValueError(f"{machine_type} takes a topology, no accelerator; leave out {accelerator}")
    if topology is None or topology not in hosts:
        raise ValueError(f"{machine_type} comes in the topologies {', '.join(hosts)}. Received: {topology}")
    return Machine({"machineType": machine_type, "tpuTopology": topology}, "tpu", hosts=hosts[topology])


def _cloud_tpu(kind: str | None, count: int) -> Machine:
    if kind not in ("TPU_V2", "TPU_V3"):
        raise ValueError(f"{CLOUD_TPU} takes TPU_V2 or TPU_V3, newer ones are ct5lp-* and ct6e-*. Received: {kind}")
    if count != _CORES_OF_HOST and (count == 0 or count % _CORES_OF_POD):
        raise ValueError(f"{kind} comes with 8 cores or a multiple of 32. Received: {count}")
    return _accelerated(CLOUD_TPU, kind, count, "tpu", hosts=count // _CORES_OF_HOST)


def _n1(machine_type: str, kind: str, count: int) -> Machine:
    if kind == _P100:
        raise ValueError(f"{_P100} reached its end of support on 15 September 2026; take NVIDIA_TESLA_T4 or NVIDIA_L4")
    built_in = sorted({machine for machine, (gpu, _) in _BUILT_IN.items() if gpu == kind})
    if built_in:
        raise ValueError(f"{kind} comes with the machine types {', '.join(built_in)}. Received: {machine_type}")
    if kind not in _ATTACHED:
        raise ValueError(f"no accelerator {kind!r} on {machine_type}{nearest(kind, _ATTACHED)}")
    if not machine_type.startswith("n1-"):
        raise ValueError(f"{kind} is attached to n1-* only. Received: {machine_type}")
    counts = _ATTACHED[kind][int(machine_type.rsplit("-", 1)[1])]
    if count not in counts:
        raise ValueError(f"{machine_type} takes {', '.join(map(str, counts))} {kind}. Received: {count}")
    return _with_gpus(machine_type, kind, count)


def _with_gpus(machine_type: str, kind: str, count: int) -> Machine:
    return _accelerated(machine_type, kind, count, "gpu", gpus=count)


def _accelerated(
    machine_type: str, accelerator: str, count: int, kind: str, *, hosts: int = 1, gpus: int = 0
) -> Machine:
    spec = {"machineType": machine_type, "acceleratorType": accelerator, "acceleratorCount": count}
    return Machine(spec, kind, hosts=hosts, gpus=gpus)
