"""What preflight found, as tables and JSON. Pure: text from values."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.lowered import INPUT, Obstacle
from trainer.preflight.compilation import Compiled, Refusal
from trainer.preflight.estimate import Estimate
from trainer.preflight.search import Largest
from trainer.preflight.slices import CHIPS, Slice

_GIB = 2**30
_GIGA = 1e9
# How names of parameters begin -> what it is that fills HBM.
_GROUPS = {"model/": "weights", "average/": "optimizer", "optimizer": "optimizer", INPUT: "input"}
_OTHER = "other"

Outcome = Compiled | Refusal | Obstacle

NOT_COVERED = (
    "an estimate: XLA:TPU has compiled one train step, and nothing has run on a TPU. Not in it: the host loop, what "
    "feeds the devices, flags and layouts of a real TPU, memory that its runtime keeps for itself",
    "step ms and examples/s: the roofline of the chips' published peaks, which no real program reaches; XLA's count of "
    "bytes may make it too slow. At least: by FLOPs and links alone, which no program can undercut",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known of a run on one slice.

    batch: examples of one replica.
    parameters: names of the program's parameters, in order.
    outcome: what the compiler says of the train step at this batch.
    largest: batches of one replica that fit; None where it was not asked for, or has no sense.
    """

    slice: Slice
    batch: int
    parameters: tuple[str, ...]
    outcome: Outcome
    largest: Largest | None = None
    estimate: Estimate | None = None

    @property
    def fits(self) -> bool:
        """Whether the step compiles for the slice and fits in its memory."""
        return isinstance(self.outcome, Compiled)

    @property
    def without_examples(self) -> bool:
        """Whether not even one example fits: weights, gradients and optimizer state are too much."""
        return self.largest is not None and self.largest.refused == 1

    def memory(self) -> dict[str, int]:
        """Bytes of HBM of one replica by what fills them; nothing where there is no program."""
        if not isinstance(self.outcome, Compiled):
            return {}
        found = {"weights": 0, "optimizer": 0, "input": 0, _OTHER: 0}
        for name, parameter in zip(self.parameters, self.outcome.parameters, strict=True):
            group = next((group for prefix, group in _GROUPS.items() if name.startswith(prefix)), _OTHER)
            found[group] += parameter.bytes
        memory = self.outcome.memory
        found["activations"] = memory.temporaries
        found[_OTHER] += memory.outputs - memory.aliased + memory.code
        return found


def rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """The first table: a heading, and a line a slice: does it fit, and how fast could it be."""
    lines: list[tuple[str, ...]] = [
        ("slice", "replicas", "a replica", "verdict", "HBM GiB", "of", "largest batch", "step ms", "at least", "ex./s")
    ]
    for finding in findings:
        estimate = finding.estimate
        used = _used_bytes(finding.outcome)
        lines.append(
            (
                finding.slice.name,
                f"{finding.slice.num_replicas:,}",
                f"{finding.batch:,}",
                verdict(finding),
                f"{used / _GIB:.2f}" if used is not None else "",
                f"{finding.slice.chip.hbm_bytes / _GIB:.2f}",
                _largest(finding),
                f"{estimate.step_secs * 1e3:,.2f}" if estimate else "",
                f"{estimate.least_step_secs * 1e3:,.2f}" if estimate else "",
                f"{estimate.examples_per_sec:,.0f}" if estimate else "",
            )
        )
    return lines


def details(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """The second table, of the slices that have a program: what fills HBM, what is computed and exchanged."""
    parts = ("weights", "optimizer", "activations", "input", _OTHER)
    lines: list[tuple[str, ...]] = [
        ("slice", *(f"{part} GiB" for part in parts), "GFLOP a step", "FLOP/byte", "all-reduce", "bound by")
    ]
    for finding in findings:
        if not isinstance(finding.outcome, Compiled) or finding.estimate is None:
            continue
        memory = finding.memory()
        exchanged = ", ".join(
            f"{c.count} x {c.dtype} {c.bytes:,} B" for c in finding.outcome.collectives if c.kind == "all-reduce"
        )
        lines.append(
            (
                finding.slice.name,
                *(f"{memory[part] / _GIB:.3f}" for part in parts),
                f"{finding.outcome.flops / _GIGA:,.1f}",
                f"{finding.estimate.intensity:,.0f}",
                exchanged or "none",
                finding.estimate.bound_by,
            )
        )
    return lines if len(lines) > 1 else []


def verdict(finding: Finding) -> str:
    """In a word or two."""
    if isinstance(finding.outcome, Compiled):
        return "fits"
    if isinstance(finding.outcome, Obstacle):
        return "cannot be compiled"
    words = {"oom": "out of memory", "unsupported": "cannot be compiled", "timeout": "gave up"}
    return words.get(finding.outcome.kind, "compiler failed")


def said(outcome: Compiled | Refusal) -> str:
    """What the compiler said of one program, for the console."""
    if isinstance(outcome, Compiled):
        return f"takes {outcome.memory.peak / _GIB:.2f} GiB a replica (compiled in {outcome.seconds:,.0f} s)"
    if outcome.kind == "oom" and outcome.used_bytes:
        return f"would take {outcome.used_bytes / _GIB:.2f} GiB a replica"
    return outcome.message


def problem(finding: Finding) -> str:
    """What is wrong with a slice and what to do, in a sentence or two."""
    outcome = finding.outcome
    if isinstance(outcome, Obstacle):
        return str(outcome)
    if not isinstance(outcome, Refusal):
        return ""
    if outcome.kind != "oom":
        return outcome.message
    needed = f", it needs {outcome.used_bytes / _GIB:.2f} GiB" if outcome.used_bytes else ""
    text = f"{finding.batch:,} examples a replica do not fit in {finding.slice.chip.hbm_bytes / _GIB:.2f} GiB{needed}"
    if finding.largest is None:
        return text
    if finding.largest.fits is None:
        what = "a single example" if finding.without_examples else "any smaller batch that was tried"
        return f"{text}; nor does {what}"
    total = finding.largest.fits * finding.slice.num_replicas
    return f"{text}. The largest that fits: --global_batch_size={total} ({finding.largest.fits:,} a replica)"


def about_input(findings: Sequence[Finding], measured: float | None) -> list[tuple[str, str]]:
    """What the input pipeline must reach, against what `profile_input` measured, in examples/s; as rows."""
    wanted = {f.slice.name: f.estimate for f in findings if f.estimate}
    if not wanted:
        return []
    if measured is None:
        name, most = max(wanted.items(), key=lambda item: item[1].examples_per_sec_of_host)
        rate = f"{name} may take up to {most.examples_per_sec_of_host:,.0f} examples/s of each host"
        return [("input", f"{rate}; what this machine can give --mode=profile_input measures")]
    slow = [
        f"{n} ({e.examples_per_sec_of_host:,.0f})" for n, e in wanted.items() if e.examples_per_sec_of_host > measured
    ]
    text = f"the pipeline gave {measured:,.0f} examples/s here (profile_input)"
    if slow:
        return [("input", f"{text}, less than each host may have to on {', '.join(slow)}")]
    return [("input", f"{text}, as much as any of these slices can take of a host")]


def remedies(too_large: Sequence[Finding], *, precision: str, optimizer_copies: float, backend: str) -> str:
    """What to change where no batch fits, or too small a one.

    Args:
        too_large: what does not fit.
        precision: of the run.
        optimizer_copies: how many times the size of the weights its optimizer keeps, averages of weights included.
        backend: of the run.
    """
    largest = max(finding.slice.chip.hbm_bytes for finding in too_large)
    larger = [chip.name for chip in CHIPS.values() if chip.runs(backend) and chip.hbm_bytes > largest]
    changes = [f"a slice whose cores have more HBM ({', '.join(larger)})"] if larger else []
    if all(finding.without_examples for finding in too_large):
        changes.append("a model with fewer parameters: weights, gradients and optimizer state are too much already")
    else:
        changes += [] if precision == "mixed_bfloat16" else ["--precision=mixed_bfloat16"]
        changes += [
            "--microbatches=2 or more, which computes each replica's share in parts",
            "--remat='block_*', or as the layers are called, which computes activations again instead of keeping them",
            "a slice with more cores, each with a smaller share of the batch",
        ]
    if round(optimizer_copies) > 1:
        changes.append(
            f"an optimizer with less state (this one keeps {round(optimizer_copies)} copies of the weights, a moving "
            "average of them included; sgd, lars and lion keep one)"
        )
    return "to need less memory: " + "; ".join(changes)


def to_json(findings: Sequence[Finding], circumstances: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for `preflight.json`: bytes, FLOPs and seconds."""
    return {"slices": [_finding_json(finding) for finding in findings], **circumstances, "notes": list(NOT_COVERED)}


def _finding_json(finding: Finding) -> dict[str, Any]:
    chip = finding.slice.chip
    found: dict[str, Any] = {
        "slice": finding.slice.name,
        "topology": finding.slice.topology,
        "num_replicas": finding.slice.num_replicas,
        "num_hosts": finding.slice.num_hosts,
        "per_replica_batch_size": finding.batch,
        "verdict": verdict(finding),
        "problem": problem(finding),
        "hbm_bytes": chip.hbm_bytes,
        "used_bytes": _used_bytes(finding.outcome),
        "memory_bytes": finding.memory(),
        "largest": dataclasses.asdict(finding.largest) if finding.largest else None,
        "estimate": dataclasses.asdict(finding.estimate) if finding.estimate else None,
        "peaks": {
            "flops_per_sec": chip.flops_per_sec,
            "hbm_bytes_per_sec": chip.hbm_bytes_per_sec,
            "ici_bytes_per_sec": chip.ici_bytes_per_sec,
            "source": chip.source,
        },
    }
    if isinstance(finding.outcome, Compiled):
        compiled = dataclasses.asdict(finding.outcome)
        found["compiled"] = {name: value for name, value in compiled.items() if name != "parameters"}
    else:
        found["refused"] = dataclasses.asdict(finding.outcome)
    return found


def _used_bytes(outcome: Outcome) -> int | None:
    if isinstance(outcome, Compiled):
        return outcome.memory.peak
    return outcome.used_bytes if isinstance(outcome, Refusal) else None


def _largest(finding: Finding) -> str:
    largest = finding.largest
    if largest is None:
        return ""
    if largest.fits is None:
        return "none"
    total = f"{largest.fits * finding.slice.num_replicas:,}"
    return total if largest.refused is not None else f">= {total}"
