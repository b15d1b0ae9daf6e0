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
    """Seconds of one step, and examples per second of the whole slice where nothing else is said."""

    compute_secs: float
    memory_secs: float
    links_secs: float
    step_secs: float  # the roofline, the longest of the three: about what a step takes at best
    bound_by: str  # which of them: compute, memory or links
    least_step_secs: float  # no step is shorter: the longest of the two bounds
    intensity: float  # FLOPs per byte accessed
    balance: float  # the intensity at which the chip's compute and its HBM take equally long
    examples_per_sec: float  # at the roofline: what all input pipelines together must reach
    examples_per_sec_of_host: float  # what each of them must reach
    most_examples_per_sec: float  # at least_step_secs: no slice of this kind takes more


def estimate(compiled: Compiled, target: Slice, batch: int) -> Estimate:
    """The roofline of a compiled train step on `target`, each replica of which takes `batch` examples."""
    chip = target.chip
    bounds = {
        "compute": compiled.flops / (chip.flops_per_sec / chip.replicas),
        "links": _links_secs(compiled.collectives, target),
    }
    times = bounds | {"memory": compiled.bytes_accessed / (chip.hbm_bytes_per_sec / chip.replicas)}
    step_secs, least_step_secs = max(times.values()), max(bounds.values())
    examples = batch * target.num_replicas
    return Estimate(
        compute_secs=times["compute"],
        memory_secs=times["memory"],
        links_secs=times["links"],
        step_secs=step_secs,
        bound_by=max(times, key=lambda name: times[name]),
        least_step_secs=least_step_secs,
        intensity=compiled.flops / compiled.bytes_accessed,
        balance=chip.flops_per_sec / chip.hbm_bytes_per_sec,
        examples_per_sec=examples / step_secs,
        examples_per_sec_of_host=examples / step_secs / target.num_hosts,
        most_examples_per_sec=examples / least_step_secs,
    )


def of_all_parts(compiled: Compiled, microbatches: int, state_bytes: int) -> Compiled:
    """The counts of a step that computes its batch in parts: XLA counts what is in a loop once.

    Args:
        compiled: the step, with a loop over its parts.
        microbatches: how often the loop runs.
        state_bytes: of weights and optimizer, which the update behind the loop reads and writes once.
    """
    update = min(2 * state_bytes, compiled.bytes_accessed)
    return dataclasses.replace(
        compiled,
        flops=compiled.flops * microbatches,
        bytes_accessed=(compiled.bytes_accessed - update) * microbatches + update,
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
