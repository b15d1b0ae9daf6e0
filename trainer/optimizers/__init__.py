"""Optimizers and schedules. Keras' own, with what every run wants set once; ours where Keras has none."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from trainer import patterns
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.optimizers.layerwise import Lamb, Lars
from trainer.optimizers.schedules import Schedule
from trainer.options.optimizer import NO_DECAY, OPTIMIZERS
from trainer.plan import LearningRate

KINDS: Mapping[str, type[keras.optimizers.Optimizer]] = {
    "sgd": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "adamax": keras.optimizers.Adamax,
    "nadam": keras.optimizers.Nadam,
    "adadelta": keras.optimizers.Adadelta,
    "adafactor": keras.optimizers.Adafactor,
    "adagrad": keras.optimizers.Adagrad,
    "ftrl": keras.optimizers.Ftrl,
    "lamb": Lamb,
    "lars": Lars,
    "lion": keras.optimizers.Lion,
    "muon": keras.optimizers.Muon,
    "rmsprop": keras.optimizers.RMSprop,
}


def build(config: Config, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """The optimizer of `config`; under the strategy's scope.

    Raises:
        ConfigError: Keras does not take a value of `optimizer_options`; later, as the optimizer is built, a pattern of
            `no_decay` fits no variable.
    """
    defaults = OPTIMIZERS[config.optimizer]
    # A whole number for a number: Keras insists on momentum=0.0.
    given = {key: float(v) if type(defaults[key]) is float else v for key, v in config.optimizer_options.items()}
    averaged: dict[str, Any] = {}
    if config.ema_momentum is not None:
        averaged = {"use_ema": True, "ema_momentum": config.ema_momentum}
    try:
        optimizer = KINDS[config.optimizer](
            learning_rate=Schedule(learning_rate),
            weight_decay=config.weight_decay,
            clipnorm=config.clipnorm,
            global_clipnorm=config.global_clipnorm,
            clipvalue=config.clipvalue,
            **averaged,
            **{**defaults, **given},
        )
    except ValueError as error:
        raise ConfigError(f"optimizer_options of {config.optimizer} cannot be used: {error}") from error
    if not config.weight_decay:
        optimizer.weight_decay = None  # AdamW insists on a number, and would multiply every weight by 1
    if config.optimizer == "muon":
        optimizer.adam_weight_decay = optimizer.weight_decay  # of the variables that it leaves to Adam
    _leave_out(optimizer, patterns.split(config.no_decay))
    return optimizer


def _leave_out(optimizer: keras.optimizers.Optimizer, no_decay: Sequence[str]) -> None:
    """Excludes what fits `no_decay` from weight decay, once there are variables.

    Keras takes parts of names only, and looks for them anywhere in the names of layers too.
    """
    build = optimizer.build

    def build_leaving_out(variables: Sequence[keras.Variable]) -> None:
        fitting = {pattern: [v for v in variables if _fits(v.path, pattern)] for pattern in no_decay}
        unused = [pattern for pattern in no_decay if not fitting[pattern] and pattern not in patterns.split(NO_DECAY)]
        if unused:
            listed = "".join(f"\n  {variable.path}" for variable in variables)
            raise ConfigError(f"no_decay fits no variable. Received: {', '.join(unused)}. Variables are:{listed}")
        optimizer.exclude_from_weight_decay(var_list=[v for found in fitting.values() for v in found])
        build(variables)

    optimizer.build = build_leaving_out


def _fits(path: str, pattern: str) -> bool:
    """As of `init_fresh`: with or without the `model/` that begins the name in a checkpoint."""
    return any(patterns.first_match(name, [pattern]) for name in (path, f"model/{path}"))
