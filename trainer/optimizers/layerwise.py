"""Optimizers for large batches, which scale the step of each variable by its norm: LARS and LAMB.

Keras has no LARS. It has a Lamb, but one whose weight decay is applied before and apart from the scaled step, so that
norm and step are those of other numbers than in the paper, and which scales biases and norms too. What is left out of
weight decay is neither decayed nor scaled here, as in the code that the results of both papers come from.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trainer import internals


class _Layerwise(keras.optimizers.Optimizer):
    """What both share: the decay, which is part of the step and not Keras' decoupled one, and the norms."""

    def __init__(self, learning_rate: Any, *, weight_decay: float | None, epsilon: float, **of_every_optimizer: Any):
        super().__init__(learning_rate=learning_rate, **of_every_optimizer)
        self.decay = weight_decay or 0.0
        self.epsilon = epsilon

    def _scaled(self, learning_rate: Any, weights: Any, length: Any) -> Any:
        """`learning_rate` times ||weights|| / length, or as it is where either is 0."""
        norm = _norm(weights)
        known = (norm > 0) & (length > 0)
        return learning_rate * ops.where(known, norm / ops.where(known, length, 1.0), 1.0)


class Lars(_Layerwise):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888), as for ResNet-50 in large batches.

    Of each variable w with gradient g, momentum m and weight decay d, all float32:

        rate = learning_rate * trust_coefficient * ||w|| / (||g|| + d ||w|| + epsilon)
        v <- m v + rate (g + d w)
        w <- w - v

    and with rate = learning_rate, d = 0 for what is excluded from weight decay.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        weight_decay: float | None = None,
        **of_every_optimizer: Any,
    ):
        super().__init__(learning_rate, weight_decay=weight_decay, epsilon=epsilon, **of_every_optimizer)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient

    def build(self, variables: Sequence[keras.Variable]) -> None:
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        velocity = internals.slot(self, self.velocities, variable)
        rate, step = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        if internals.is_decayed(self, variable):
            length = _norm(step) + self.decay * _norm(variable) + self.epsilon
            rate = self._scaled(rate * self.trust_coefficient, variable, length)
            step = step + self.decay * variable
        self.assign(velocity, self.momentum * velocity + rate * step)
        self.assign_sub(variable, velocity)


class Lamb(_Layerwise):
    """Adam with layer-wise scaling (You et al. 2020, arXiv:1904.00962, algorithm 2, phi the identity).

    Of each variable w with weight decay d, and the bias-corrected moments m and v of Adam, all float32:

        u = m / (sqrt(v) + epsilon) + d w
        w <- w - learning_rate * ||w|| / ||u|| * u

    and without d and the two norms for what is excluded from weight decay.
    """

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        **of_every_optimizer: Any,
    ):
        super().__init__(learning_rate, weight_decay=weight_decay, epsilon=epsilon, **of_every_optimizer)
        self.beta_1 = beta_1
        self.beta_2 = beta_2

    def build(self, variables: Sequence[keras.Variable]) -> None:
        super().build(variables)
        self.momentums, self.velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        momentum = internals.slot(self, self.momentums, variable)
        velocity = internals.slot(self, self.velocities, variable)
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        count = ops.cast(self.iterations + 1, variable.dtype)
        self.assign_add(momentum, (gradient - momentum) * (1 - self.beta_1))
        self.assign_add(velocity, (ops.square(gradient) - velocity) * (1 - self.beta_2))
        # 1 - beta^count; in float32 the difference would have four digits of beta_2 = 0.999.
        mean = momentum / -ops.expm1(count * math.log(self.beta_1))
        deviation = ops.sqrt(velocity / -ops.expm1(count * math.log(self.beta_2)))
        step = mean / (deviation + self.epsilon)
        if internals.is_decayed(self, variable):
            step = step + self.decay * variable
            rate = self._scaled(rate, variable, _norm(step))
        self.assign_sub(variable, rate * step)


def _norm(values: Any) -> Any:
    return ops.sqrt(ops.sum(ops.square(values)))
