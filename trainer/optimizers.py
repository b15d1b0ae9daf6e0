"""Optimizers and schedules. Keras' own, with what every run wants set once."""

import keras

from trainer.config import Config

# Shrinking a bias or a norm's scale towards zero is not regularisation (He et al. 2019, arXiv:1812.01187).
NOT_DECAYED = ("bias", "gamma", "beta")


def build(config: Config, train_steps: int) -> keras.optimizers.Optimizer:
    """The optimizer of `config`, with its schedule over `train_steps` steps; under the strategy's scope."""
    arguments = {
        "learning_rate": schedule(config.learning_rate, config.warmup_steps, train_steps),
        "clipnorm": config.clipnorm,
        "global_clipnorm": config.global_clipnorm,
        "clipvalue": config.clipvalue,
    }
    if config.optimizer == "sgd":
        optimizer = keras.optimizers.SGD(
            momentum=config.momentum, weight_decay=config.weight_decay or None, **arguments
        )
    else:
        optimizer = keras.optimizers.AdamW(weight_decay=config.weight_decay, **arguments)
    if config.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=list(NOT_DECAYED))
    return optimizer


def schedule(peak: float, warmup_steps: int, train_steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Linear from 0 to `peak` over `warmup_steps`, then a cosine to 0 at `train_steps`."""
    if not warmup_steps:
        return keras.optimizers.schedules.CosineDecay(peak, train_steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0, train_steps - warmup_steps, warmup_target=peak, warmup_steps=warmup_steps
    )
