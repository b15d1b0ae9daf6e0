"""Which weights learn, and how fast: for a model that begins with trained ones."""

import dataclasses

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class FineTuningOptions:
    """Which weights learn, and how fast: for a model that begins with trained ones."""

    freeze: str = option(
        "",
        "variables that do not learn: patterns with commas between, 'stem*, block_0[0-5]*'; a layer that they cover "
        "wholly is frozen, and batch norm in it keeps its statistics",
        group="fine-tuning",
    )
    learning_rate_factors: str = option(
        "",
        "by what the learning rate of variables is multiplied: pattern=factor with commas between, the first that "
        "matches counts, 'logits/*=10, block_*=0.1'; weight decay goes with it",
        group="fine-tuning",
    )
    layer_decay: float | None = option(
        None,
        "learning rate of each numbered block of the model, as a part of the next one's; 1 behind the last",
        group="fine-tuning",
        above=0,
        below=1,
    )
