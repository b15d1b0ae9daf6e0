"""What a model cannot be trained with on this many replicas, and why."""

from typing import Any

import keras

from trainer import internals
from trainer.errors import ConfigError


def check_losses(losses: Any, *, num_replicas: int) -> None:
    """Raises ConfigError for a loss that sums over the batch, on several replicas."""
    for loss in keras.tree.flatten(losses):
        if num_replicas > 1 and getattr(loss, "reduction", None) == "sum":
            raise ConfigError(
                f"the loss {loss.name} sums over the batch, so its gradient would depend on the number of replicas. "
                f"Received: reduction='sum' on {num_replicas} replicas. Use the default reduction "
                "'sum_over_batch_size' and scale the learning rate"
            )


def check_layers(model: keras.Model) -> None:
    """Raises ConfigError for a layer whose numbers depend on the batch before."""
    stateful = [layer for layer in internals.layers(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise ConfigError(
            f"the layer {stateful[0].name} ({type(stateful[0]).__name__}) goes on where the batch before has ended, "
            "which is of other examples here: records are shuffled, and shared among replicas. Received: "
            "stateful=True. Leave it out"
        )


def check_optimizer(optimizer: keras.optimizers.Optimizer, *, num_replicas: int) -> None:
    """Raises ConfigError for an optimizer that does what Keras cannot on several replicas."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = inner.gradient_accumulation_steps
    if num_replicas > 1 and steps:
        raise ConfigError(
            f"Keras accumulates gradients on one replica only. Received: gradient_accumulation_steps={steps} on "
            f"{num_replicas} replicas. Use --microbatches={steps} with a global batch {steps} times as large"
        )
    if num_replicas > 1 and inner.use_ema and inner.ema_overwrite_frequency:
        raise ConfigError(
            "Keras writes moving averages over the weights on one replica only. Received: ema_overwrite_frequency="
            f"{inner.ema_overwrite_frequency} on {num_replicas} replicas. Leave it out: the averages are evaluated and "
            "exported as it is"
        )


def reason_against_xla(model: keras.Model, num_replicas: int) -> str | None:
    """Why the train step cannot be compiled on CPU and GPU, or None."""
    if num_replicas == 1:
        return None
    own = internals.overrides(model, "train_step")
    if own:
        return f"the train_step of {own} exchanges gradients inside the step, which XLA cannot do on CPU and GPU"
    exchanging = _exchanging(model)
    return (
        f"the layer {exchanging} is synchronized: it exchanges statistics inside the step, as XLA cannot"
        if exchanging
        else None
    )


def check_parts(model: keras.Model, num_replicas: int, microbatches: int) -> None:
    """Raises ConfigError for a model whose batch cannot be computed in parts, if there is more than one."""
    reason = _reason_against_parts(model, num_replicas) if microbatches > 1 else None
    if reason:
        raise ConfigError(f"--microbatches={microbatches} cannot be had: {reason}")


def _reason_against_parts(model: keras.Model, num_replicas: int) -> str | None:
    own = internals.overrides(model, "train_step")
    if own:
        return f"the train_step of {own} applies the gradients of the batch that it is given"
    exchanging = _exchanging(model) if num_replicas > 1 else None
    return (
        f"the layer {exchanging} exchanges statistics for the whole batch, and sees a part of it"
        if exchanging
        else None
    )


def _exchanging(model: keras.Model) -> str | None:
    return next((layer.name for layer in internals.layers(model) if getattr(layer, "synchronized", False)), None)
