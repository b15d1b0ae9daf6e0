"""What is kept, and where weights come from."""

import dataclasses

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """What is kept, and where weights come from."""

    checkpoint_every_steps: int | None = option(
        None,
        "steps between checkpoints; default: eval_every_steps",
        group="checkpoints",
        minimum=1,
        changes_numbers=False,
    )
    checkpoint_every_secs: float | None = option(
        None,
        "seconds after which a checkpoint is due even where checkpoint_every_steps asks for none",
        group="checkpoints",
        above=0,
        changes_numbers=False,
    )
    keep_checkpoints: int = option(
        3, "newest checkpoints to keep", group="checkpoints", minimum=1, changes_numbers=False
    )
    keep_best_checkpoints: int = option(
        1,
        "best checkpoints to keep besides; one is saved after each evaluation that is among them",
        group="checkpoints",
        minimum=0,
        changes_numbers=False,
    )
    best_metric: str = option(
        "loss", "evaluation metric that says which are best", group="checkpoints", changes_numbers=False
    )
    best_goal: str = option(
        "min",
        "whether the best of best_metric is its smallest or its largest value",
        group="checkpoints",
        choices=("min", "max"),
        changes_numbers=False,
    )
    init_from: str | None = option(
        None,
        "start from the weights of this model_dir's newest checkpoint, or of one checkpoint in it; last: of the newest "
        "finished run of the series; a run that has a checkpoint of its own goes on from that",
        group="checkpoints",
    )
    init_fresh: str = option(
        "",
        "variables that init_from leaves as initialised, such as a head of another shape: patterns with commas "
        "between, 'dense_1/*'; all others have to be found with their shapes",
        group="checkpoints",
    )
