"""How long a compiled step takes at best, by the roofline of its slice. Pure arithmetic.

The published peak of each thing that a step uses gives a time, and none of these can be undercut by the others being
fast (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785). Two of the three are bounds:

    compute    FLOPs / bfloat16 peak. A bound, as far as XLA counts FLOPs rightly.
    links      bytes that a chip must send for the all-reduces / speed of all its links. A bound; see `_links_secs`.
    memory     bytes accessed / HBM bandwidth. An estimate: XLA counts what stays in VMEM too, so it may be too long.

Real steps take longer: no program reaches all peaks, and what waits for another (the all-reduce for the gradients) adds
to it. Host, input and dispatch are not in it.
"""

import dataclasses
from collections.abc import Iterable

from trainer.preflight.slices import Slice
from trainer.preflight.verdict import Collective, Compiled


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Times in seconds for one step, rates in examples per second."""

    compute_secs: float
    memory_secs: float
    links_secs: float
    intensity: float  # FLOPs per byte accessed
    balance: float  # that intensity at which the chip's compute and HBM take equally long
    global_batch_size: int
    num_hosts: int

    @property
    def bound_secs(self) -> float:
        """No step is shorter."""
        return max(self.compute_secs, self.links_secs)

    @property
    def roofline_secs(self) -> float:
        """What a step takes about, at best."""
        return max(self.bound_secs, self.memory_secs)

    @property
    def limit(self) -> str:
        """What the roofline is made of: 'compute', 'memory' or 'links'."""
        times = {"compute": self.compute_secs, "memory": self.memory_secs, "links": self.links_secs}
        return max(times, key=lambda name: times[name])

    @property
    def examples_per_sec(self) -> float:
        """What the input pipelines of all hosts together must reach to keep up with the roofline."""
        return self.global_batch_size / self.roofline_secs

    @property
    def examples_per_sec_of_host(self) -> float:
        """What each host's pipeline must reach."""
        return self.examples_per_sec / self.num_hosts

    @property
    def most_examples_per_sec(self) -> float:
        """No slice of this kind takes more."""
        return self.global_batch_size / self.bound_secs


def estimate(compiled: Compiled, target: Slice, global_batch_size: int) -> Estimate:
    """The roofline of a compiled step on `target`, whose replicas share `global_batch_size` examples."""
    chip = target.chip
    flops_per_sec = chip.flops_per_sec / chip.replicas
    hbm_bytes_per_sec = chip.hbm_bytes_per_sec / chip.replicas
    return Estimate(
        compute_secs=compiled.flops / flops_per_sec,
        memory_secs=compiled.bytes_accessed / hbm_bytes_per_sec,
        links_secs=_links_secs(compiled.collectives, target),
        intensity=compiled.flops / compiled.bytes_accessed,
        balance=chip.flops_per_sec / chip.hbm_bytes_per_sec,
        global_batch_size=global_batch_size,
        num_hosts=target.num_hosts,
    )


def _links_secs(collectives: Iterable[Collective], target: Slice) -> float:
    """The least time for the all-reduces of a step, over `num_chips` = N.

    Each chip must send 2 (N - 1) / N of the bytes, once to reduce and once to spread, which a ring attains (Patarasuk
    and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). It can use all of its links at once only in a full
    torus: in a small slice some lead nowhere, and the real time is a multiple. What replicas of one chip do among
    themselves is taken to cost nothing. Other collectives are left out. All of this keeps it a bound.
    """
    chips = target.num_chips
    reduced = sum(collective.bytes for collective in collectives if collective.kind == "all-reduce")
    return 2 * (chips - 1) / chips * reduced / target.chip.ici_bytes_per_sec
