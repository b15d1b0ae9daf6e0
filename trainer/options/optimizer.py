"""The optimizer, its learning rate, and what happens to gradients."""

import dataclasses

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, its learning rate, and what happens to gradients."""

    optimizer: str = option("adamw", "optimizer", group="optimizer", choices=("sgd", "adamw"))
    learning_rate: float = option(1e-3, "peak learning rate, after warm-up", group="optimizer", above=0)
    warmup_steps: int = option(
        0, "steps of linear warm-up from 0, before the cosine decay to 0", group="optimizer", minimum=0
    )
    momentum: float = option(0.9, "momentum of sgd", group="optimizer", minimum=0, below=1)
    weight_decay: float = option(
        0.0,
        "decoupled weight decay, multiplied by the learning rate; not on biases and norms",
        group="optimizer",
        minimum=0,
    )
    clipnorm: float | None = option(None, "clip each gradient to this norm", group="optimizer", above=0)
    global_clipnorm: float | None = option(None, "clip all gradients to this joint norm", group="optimizer", above=0)
    clipvalue: float | None = option(None, "clip gradient entries to +-this value", group="optimizer", above=0)
