"""What a run says at its start and at its end. Pure: text from values."""

import textwrap
from collections.abc import Mapping, Sequence

from trainer.plan import Plan

_OPTIONS_WIDTH = 100


def start_up(
    *,
    dataset: str,
    reading: str,
    augmentation: str,
    model: str,
    fine_tuning: str,
    devices: str,
    plan: Plan,
    start_step: int,
    model_dir: str,
    options: Mapping[str, Mapping[str, str]],
) -> str:
    """The summary before training: what, on what, how much, and who said so (`options`: source -> option -> value)."""
    steps = f"{start_step:,} -> {plan.train_steps:,}" if start_step else f"{plan.train_steps:,}"
    rows = [
        ("dataset", dataset),
        *((name, said) for name, said in (("reading", reading), ("augmentation", augmentation)) if said),
        ("model", model),
        *([("fine-tuning", fine_tuning)] if fine_tuning else []),
        ("devices", devices),
        ("batch", f"{plan.global_batch_size:,} = {plan.num_replicas} x {plan.per_replica_batch_size:,} a replica"),
        (
            "steps",
            f"{steps}, {plan.steps_per_epoch:,.1f} an epoch; evaluation every {plan.eval_every_steps:,}, "
            f"checkpoint every {plan.checkpoint_every_steps:,}, {plan.steps_per_loop:,} a loop",
        ),
        ("model_dir", model_dir),
    ]
    for source, values in options.items():
        lines = textwrap.wrap(", ".join(f"{name}={value}" for name, value in values.items()), _OPTIONS_WIDTH)
        rows += [(f"from {source}" if line is lines[0] else "", line) for line in lines]
    return table(rows)


def results(metrics: Mapping[str, float], examples_per_sec: float | None, account: Sequence[tuple[str, str]]) -> str:
    """The table at the end: evaluation metrics, throughput, and the account of its time (`Receipt.rows`, `account`)."""
    rows = [(f"eval {name}", f"{value:.4f}") for name, value in metrics.items()]
    if examples_per_sec is not None:
        rows.append(("examples/s", f"{examples_per_sec:,.0f}"))
    return table([*rows, *account])


def account(seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """Where the time of one process went, for `results`."""
    total = sum(seconds.values())
    rows = [
        (f"time, {part.replace('_', ' ')}", f"{value:8.1f} s {value / total:6.1%}")
        for part, value in seconds.items()
        if value >= 0.05
    ]
    return [*rows, ("time, total", f"{total:8.1f} s")]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, numbers to the right."""
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [f"{line[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )
