"""TPU slices by the names that Cloud gives them, and what their chips can do. Pure: no TensorFlow, no compiler.

Cloud counts TensorCores in some names (v3-8: 4 chips) and chips in others (v5e-8: 8 chips), and XLA:TPU knows neither:
it takes a topology, `v3:2x2`. `parse` leads from one to the other.
"""

import dataclasses
import math
import re

from trainer.config import nearest
from trainer.errors import ConfigError

GIB = 2**30
# How XLA:TPU builds multi-host slices of all chips up to v6e: hosts of 2 x 2 chips.
_CHIPS_OF_HOST = (2, 2, 1)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPUs. Speeds are the published peaks of a whole chip, which real programs do not reach."""

    name: str
    cloud_name: str  # before the number in Cloud's accelerator types: v5litepod-8
    counts: int  # what that number counts of each chip: 2 TensorCores, or the 1 chip
    replicas: int  # a chip: one a TensorCore, or one for both where they work as one ("megacore")
    chips_of_vm: int  # in the largest virtual machine that is a slice of its own; VMs of larger slices have 4
    chip_config: str  # the compiler's name for how the TensorCores work
    hbm_bytes: int  # of one replica, as far as XLA:TPU (libtpu 0.0.42.1) lets a program fill it
    flops_per_sec: float  # dense bfloat16
    hbm_bytes_per_sec: float
    ici_bytes_per_sec: float  # all links to other chips together, one direction
    topologies: tuple[str, ...]  # of the slices that Cloud has names for; the last one is the whole pod
    source: str  # of the speeds
    tensorflow: bool = True  # whether TensorFlow runs on it

    def runs(self, backend: str) -> bool:
        """Whether Keras' `backend` does: JAX runs on all of them."""
        return self.tensorflow or backend != "tensorflow"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice. One replica is one device of `tf.distribute.TPUStrategy`, of JAX and of the compiler."""

    name: str  # as it was given
    chip: Chip
    topology: str  # the compiler's: v5e:2x4
    num_hosts: int  # virtual machines, each with an input pipeline of its own

    @property
    def num_chips(self) -> int:
        """Chips in the slice."""
        return math.prod(_dimensions(self.topology))

    @property
    def num_replicas(self) -> int:
        """Replicas that share a global batch."""
        return self.num_chips * self.chip.replicas

    @property
    def host_bounds(self) -> tuple[int, ...]:
        """Chips of one host along each of three axes. The compiler wants it where a host is not 2 x 2 chips."""
        dimensions = _dimensions(self.topology)
        return (*dimensions, 1, 1)[:3] if self.num_hosts == 1 else _CHIPS_OF_HOST


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_CACM = "https://doi.org/10.1145/3360307"  # Jouppi et al. 2020, to which Cloud's page on v2 refers
_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

# HBM: "exceeds available HBM (7.48G)" and so on in the compiler's own refusals; tests/preflight/test_topologies.py asks
# again. Speeds: `source`, and for links between chips
#   v2      4 links of 496 Gbit/s (the CACM article)
#   v3, v4  all-reduce bandwidth of the pod / its chips: 340 TB/s / 1024, 1.1 PB/s / 4096
#   v5p     4800 Gbit/s; v5e, v6e, TPU7x: half of the bidirectional 400, 800 and 1200 GB/s
# In a row: name, Cloud's name, what that counts of a chip, replicas of a chip, chips_of_vm, chip_config.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v2", "v2", 2, 2, 4, "default"),
            hbm_bytes=round(7.48 * GIB),
            flops_per_sec=46e12,
            hbm_bytes_per_sec=700e9,
            ici_bytes_per_sec=248e9,
            topologies=("2x2", "4x4", "8x8", "8x16", "16x16"),
            source=_CACM,
        ),
        Chip(
            *("v3", "v3", 2, 2, 4, "default"),
            hbm_bytes=round(15.48 * GIB),
            flops_per_sec=123e12,
            hbm_bytes_per_sec=900e9,
            ici_bytes_per_sec=332e9,
            topologies=("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
            source=_DOCS + "v3",
        ),
        Chip(
            *("v4", "v4", 2, 1, 4, "megacore"),
            hbm_bytes=round(30.75 * GIB),
            flops_per_sec=275e12,
            hbm_bytes_per_sec=1200e9,
            ici_bytes_per_sec=269e9,
            topologies=(*_3D, "16x16x16"),
            source=_DOCS + "v4",
        ),
        Chip(
            *("v5e", "v5litepod", 1, 1, 8, "default"),
            hbm_bytes=round(15.75 * GIB),
            flops_per_sec=197e12,
            hbm_bytes_per_sec=819e9,
            ici_bytes_per_sec=200e9,
            topologies=_2D,
            source=_DOCS + "v5e",
        ),
        Chip(
            *("v5p", "v5p", 2, 1, 4, "default"),
            hbm_bytes=round(95.74 * GIB),
            flops_per_sec=459e12,
            hbm_bytes_per_sec=2765e9,
            ici_bytes_per_sec=600e9,
            topologies=(*_3D, "16x16x16", "16x16x24"),
            source=_DOCS + "v5p",
        ),
        Chip(
            *("v6e", "v6e", 1, 1, 8, "default"),
            hbm_bytes=round(31.25 * GIB),
            flops_per_sec=918e12,
            hbm_bytes_per_sec=1638e9,
            ici_bytes_per_sec=400e9,
            topologies=_2D,
            source=_DOCS + "v6e",
        ),
        Chip(
            *("tpu7x", "tpu7x", 2, 2, 4, "default"),
            hbm_bytes=round(94.75 * GIB),
            flops_per_sec=2307e12,
            hbm_bytes_per_sec=7380e9,
            ici_bytes_per_sec=600e9,
            topologies=_3D,
            source=_DOCS + "tpu7x",
            tensorflow=False,
        ),
    )
}
# What people rent first.
_COMMON = (
    *("v2-8", "v3-8", "v3-32", "v4-8", "v5e-1", "v5e-4", "v5e-8", "v5e-16", "v5p-8"),
    *("v6e-1", "v6e-4", "v6e-8", "v6e-16", "tpu7x-8"),
)


def parse(text: str) -> Slice:
    """The slice of a Cloud name (`v2-8`, `v5litepod-16`, `v5e-8`) or of a topology in chips (`v5e:2x4`, `v4:2x2x1`).

    Raises:
        ConfigError: Cloud has no such slice; the message names the nearest one.
    """
    match = re.fullmatch(r"(?P<chip>[a-z0-9]+)(-(?P<count>[0-9]+)|:(?P<topology>[0-9]+(x[0-9]+)*))", text)
    prefixes = {prefix: chip for chip in CHIPS.values() for prefix in (chip.name, chip.cloud_name)}
    if not match or match["chip"] not in prefixes:
        known = (name for chip in CHIPS.values() for name in _names(chip))
        raise ConfigError(
            f"no TPU slice has this name. Use a name such as v3-8 or v5e-8, or a topology such as v5e:2x4, of "
            f"{', '.join(CHIPS)}. Received: --slice={text}{nearest(text, known)}"
        )
    chip = prefixes[match["chip"]]
    topology = match["topology"] or _names(chip).get(f"{chip.name}-{match['count']}")
    if topology is None:
        closest = min(_sizes(chip), key=lambda size: abs(size - int(match["count"])))
        what = "chips" if chip.counts == 1 else "TensorCores, two a chip"
        raise ConfigError(
            f"{chip.name} comes in slices of {', '.join(map(str, _sizes(chip)))} {what}. "
            f"Received: --slice={text}; did you mean '{chip.name}-{closest}'?"
        )
    _check_topology(chip, topology, text)
    return Slice(text, chip, f"{chip.name}:{topology}", _num_hosts(chip, topology))


def common(global_batch_size: int, backend: str) -> list[Slice]:
    """The slices people rent first, of those that `backend` runs on and that can share so many examples equally."""
    slices = (candidate for candidate in map(parse, _COMMON) if candidate.chip.runs(backend))
    return [candidate for candidate in slices if global_batch_size % candidate.num_replicas == 0]


def _names(chip: Chip) -> dict[str, str]:
    """Topology of each name that Cloud has for slices of this chip."""
    return {f"{chip.name}-{size}": topology for size, topology in zip(_sizes(chip), chip.topologies, strict=True)}


def _sizes(chip: Chip) -> list[int]:
    return [math.prod(_dimensions(topology)) * chip.counts for topology in chip.topologies]


def _num_hosts(chip: Chip, topology: str) -> int:
    """Virtual machines of a slice."""
    chips = math.prod(_dimensions(topology))
    return 1 if chips <= chip.chips_of_vm else chips // math.prod(_CHIPS_OF_HOST)


def _check_topology(chip: Chip, topology: str, text: str) -> None:
    """Refuses what the compiler would refuse, and what is larger than the pod."""
    dimensions = _dimensions(topology)
    pod = _dimensions(chip.topologies[-1])
    fits = len(dimensions) == len(pod) and math.prod(dimensions) <= math.prod(pod)
    whole_hosts = all(size > 0 and size % host == 0 for size, host in zip(dimensions, _CHIPS_OF_HOST, strict=False))
    if topology not in chip.topologies and not (fits and whole_hosts):
        raise ConfigError(
            f"{chip.name} has no such topology. It is the number of chips along each of {len(pod)} axes, up to "
            f"{chip.topologies[-1]}, the first two even. Received: --slice={text}{nearest(topology, chip.topologies)}"
        )


def _dimensions(topology: str) -> tuple[int, ...]:
    return tuple(int(size) for size in topology.rpartition(":")[2].split("x"))
