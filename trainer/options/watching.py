"""How a run survives, and who hears of it."""

import dataclasses

from trainer.options.field import TRYING, option


@dataclasses.dataclass(frozen=True)
class WatchingOptions:
    """How a run survives, and who hears of it."""

    grace_secs: float = option(
        25.0,
        "seconds from SIGTERM, SIGINT or a notice of preemption to the end of the process; a little less than what the "
        "scheduler grants",
        group="surviving",
        minimum=2,
        changes_numbers=False,
    )
    lease_secs: float = option(
        60.0,
        "seconds without a heartbeat after which another process may go on with the run",
        group="surviving",
        minimum=6,
        changes_numbers=False,
    )
    on_nonfinite: str = option(
        "stop",
        "when loss or gradients become NaN or infinite: stop before that step; skip it; or rollback to the last "
        "checkpoint and go on behind the step, without the batches in between",
        group="surviving",
        choices=("stop", "skip", "rollback"),
        changes_numbers=False,
    )
    max_nonfinite: int = option(
        10, "how often a run may skip or roll back", group="surviving", minimum=1, changes_numbers=False
    )
    log_format: str = option(
        "text",
        "of the console: for people, or JSON lines for Cloud Logging",
        group="watching",
        choices=("text", "json"),
        changes_numbers=False,
    )
    quiet: bool = option(
        False,
        "say only warnings, errors, alerts and what came of it: the table at the end, or what the mode finds",
        group="watching",
        changes_numbers=False,
    )
    stall_secs: float | None = option(
        1800.0,
        "seconds without progress after which the stacks are written down and the process ends, to be run again; "
        "none: never",
        group="watching",
        above=0,
        changes_numbers=False,
    )
    alert_url: str | None = option(
        None,
        "where alerts are sent, as a JSON POST: stall, nonfinite, preempted, slow input, underflow, failing saves, "
        "finished",
        group="watching",
        changes_numbers=False,
        secret=True,
    )
    report_examples: int = option(
        2000,
        "examples of eval_split, at most, by which a classifier is looked at in the end: its confusion matrix and what "
        "it is most wrong about, in examples.json; 0: none",
        group="watching",
        minimum=0,
        modes=("train_and_eval", "eval", *TRYING),
        changes_numbers=False,
    )
    profile_steps: str | None = option(
        None,
        "A,B: steps A to B-1 are profiled for TensorBoard; SIGUSR1 profiles a job that runs",
        group="watching",
        changes_numbers=False,
    )
