"""Batches, steps, and what is due when."""

import dataclasses

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Batches, steps, and what is due when."""

    global_batch_size: int = option(128, "examples a step, over all replicas", group="training", minimum=1)
    microbatches: int = option(
        1,
        "equal parts of each replica's share of a batch, computed one after the other to take less memory; the step "
        "stays that of the whole batch, but for batch norm and dropout",
        group="training",
        minimum=1,
    )
    remat: str = option(
        "",
        "layers that keep no activations but compute them again in the backward pass, for less memory: patterns of "
        "names with commas between, 'block_*'",
        group="training",
        changes_numbers=False,
    )
    train_steps: int | None = option(
        None, "steps to train; or give train_epochs or train_examples", group="training", minimum=1
    )
    train_epochs: float | None = option(
        None,
        "epochs to train, rounded up to whole steps; default 10 where nothing else says when to stop",
        group="training",
        above=0,
    )
    train_examples: float | None = option(
        None, "examples to train on, 1e8, rounded up to whole steps", group="training", above=0
    )
    eval_every_steps: int | None = option(
        None, "steps between evaluations; default: one epoch", group="training", minimum=1, changes_numbers=False
    )
    log_every_steps: int = option(
        50, "steps between records in metrics.jsonl and TensorBoard", group="training", minimum=1, changes_numbers=False
    )
