"""Fine-tuning: which weights of a model learn, and by what the learning rate of each is multiplied."""

import math
import re
from collections.abc import Sequence
from typing import Any

import keras

from trainer import internals, patterns
from trainer.config import Config
from trainer.errors import ConfigError

# Ends behind the number of the finest block in a name: `conv2_block1` of `conv2_block1_1_conv`, `stage_0_block_2`.
_NUMBERED = re.compile(r".*(?:block|layer|stage|stack)_?\d+[a-z]?(?=_|$)")
# With one there is nothing to decay between.
_LEAST_BLOCKS = 2


def freeze(model: keras.Model, config: Config, inputs: Any) -> None:
    """Freezes what `config.freeze` names; before the model is compiled.

    A layer all of whose weights are named is frozen itself: only then does batch norm act as outside of training.

    Args:
        model: a new model.
        config: the run's options.
        inputs: symbolic inputs, to build a model with that has no variables yet.

    Raises:
        ConfigError: a pattern names nothing that can be frozen, or nothing is left to learn.
    """
    wanted = patterns.split(config.freeze)
    if not wanted:
        return
    _build(model, inputs)
    learning = model.trainable_weights
    named = {id(v) for v in model.weights if patterns.first_match(v.path, wanted)}
    # Freezing a layer freezes those in it.
    whole = [layer for layer in internals.layers(model) if layer.weights and {id(v) for v in layer.weights} <= named]
    frozen = [v for v in learning if id(v) in named] + [v for layer in whole for v in layer.weights]
    _refuse_unused("freeze", wanted, frozen, learning)
    for layer in whole:
        layer.trainable = False
    for variable in frozen:
        variable.trainable = False
    if not model.trainable_weights:
        raise ConfigError(f"freeze leaves nothing to learn. Received: {config.freeze!r}. Leave out the head")


def scale_learning_rates(model: keras.Model, config: Config, inputs: Any) -> None:
    """Multiplies learning rates as `config.learning_rate_factors` and `config.layer_decay` say; a compiled model's.

    Args:
        model, config, inputs: as for `freeze`.

    Raises:
        ConfigError: a pattern names no variable that learns, or no blocks are numbered.
    """
    given = patterns.factors(config.learning_rate_factors)
    if not given and config.layer_decay is None:
        return
    _build(model, inputs)
    learning = model.trainable_weights
    _refuse_unused("learning_rate_factors", list(given), learning, learning)
    by_depth = _factors_of_depth(model, config.layer_decay)
    factors = []
    for variable in learning:
        pattern = patterns.first_match(variable.path, list(given))
        factors.append((variable, by_depth[id(variable)] * (1.0 if pattern is None else given[pattern])))
    for optimizer in internals.optimizers(model):
        internals.scale_learning_rates(optimizer, factors)


def describe(model: keras.Model, config: Config) -> str:
    """What learns, and how fast; nothing where all of the model learns alike."""
    said = []
    if config.freeze:
        said.append(f"{_count(model.trainable_weights):,} of {_count(model.weights):,} parameters learn")
    if config.learning_rate_factors:
        said.append(f"learning rate times {config.learning_rate_factors}")
    if config.layer_decay is not None:
        names = list(dict.fromkeys(filter(None, blocks([v.path for v in model.weights]))))
        first = config.layer_decay ** (len(names) + 1)
        said.append(f"times {first:.3g} before {names[0]}, {config.layer_decay:.3g} in {names[-1]}, 1 behind")
    return "; ".join(said)


def blocks(paths: Sequence[str]) -> list[str]:
    """The numbered block that each path of a variable is in, "" for none.

    It is the first part of the path that has `block`, `layer`, `stage` or `stack` and a number, as far as to the last
    of these. `transformer_block` counts beside `transformer_block_1`: so Keras names the first.
    """
    numbered = {match[0] for path in paths for part in path.split("/") if (match := _NUMBERED.match(part))}

    def block(path: str) -> str:
        parts = path.split("/")
        for index, part in enumerate(parts):
            match = _NUMBERED.match(part)
            if match or f"{part}_1" in numbered:
                return "/".join([*parts[:index], match[0] if match else part])
        return ""

    return [block(path) for path in paths]


def depths(paths: Sequence[str]) -> tuple[list[int], int]:
    """How deep each variable is, for paths in the order of the model's layers, and how deep the head.

    0 before the first block, 1 in it, and so on; what stands between two is of the one before. The head is behind the
    last block and one deeper (Bao et al. 2021, arXiv:2106.08254).
    """
    found = blocks(paths)
    order = list(dict.fromkeys(filter(None, found)))
    last = max((index for index, name in enumerate(found) if order and name == order[-1]), default=-1)
    result, reached = [], 0
    for index, name in enumerate(found):
        reached = max(reached, order.index(name) + 1) if name else reached
        result.append(order.index(name) + 1 if name else len(order) + 1 if index > last else reached)
    return result, len(order) + 1


def _factors_of_depth(model: keras.Model, decay: float | None) -> dict[int, float]:
    """Of each weight, by its id. Frozen ones count, so that freezing the first blocks leaves the others as they are."""
    weights = model.weights
    if decay is None:
        return dict.fromkeys(map(id, weights), 1.0)
    depth_of, head = depths([v.path for v in weights])
    if head < _LEAST_BLOCKS + 1:
        raise ConfigError(
            "layer_decay goes by numbered blocks, and this model's variables are not named so, as block_3/kernel is. "
            f"Received: {patterns.shown([v.path for v in weights])}. Use learning_rate_factors"
        )
    return {id(v): decay ** (head - depth) for v, depth in zip(weights, depth_of, strict=True)}


def _refuse_unused(option: str, wanted: Sequence[str], used: Sequence[Any], candidates: Sequence[Any]) -> None:
    names = {v.path for v in used}
    for pattern in wanted:
        if not any(patterns.first_match(name, [pattern]) for name in names):
            raise ConfigError(
                f"{option} names no variable that learns. Received: {pattern!r}. "
                f"There are: {patterns.near(pattern, [v.path for v in candidates])}"
            )


def _build(model: keras.Model, inputs: Any) -> None:
    if not model.built:
        model(inputs)


def _count(variables: Sequence[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)
