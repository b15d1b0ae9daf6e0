"""The learning rate as a function of the step.

Keras has classes for some of these forms, and a warm-up for one. They compute what is left of a decay as
1 - step / steps in float32, which cancels near the end: of a CosineDecay over 1e6 steps the 100th from the end is off
by a fifth, the last ten are 0. Here what is left is counted in whole numbers first. Nothing but the step is state.
"""

import math
from typing import Any

import keras
from keras import ops

from trainer.plan import LearningRate


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear from 0 to the peak over the warm-up, then as `planned.schedule` says; traces under XLA.

    With t steps done, warm-up W, training T and f the final factor, the peak is multiplied by t/W while t < W, then by

        constant     1
        cosine       f + (1-f) (1 + cos(pi (t-W)/(T-W))) / 2     Loshchilov and Hutter 2017, arXiv:1608.03983
        polynomial   f + (1-f) ((T-t)/(T-W))^power
        exponential  factor^((t-W)/every)
        step         factor^(number of decay_at that are at most t)
        rsqrt        sqrt(W/t)                                   Vaswani et al. 2017, arXiv:1706.03762
        wsd          1 until D = decay_at, then f + (1-f) (T-t)/(T-D)       Hu et al. 2024, arXiv:2404.06395
    """

    def __init__(self, planned: LearningRate):
        self._planned = planned
        self._after_warmup = getattr(self, f"_{planned.schedule}")

    def __call__(self, step: Any) -> Any:
        """The learning rate, float32, of the step that follows `step` steps, an integer."""
        steps, warmup = ops.cast(step, "int"), self._planned.warmup_steps  # 64 bits on TensorFlow, 32 on JAX
        warm = ops.cast(steps, "float32") / max(1, warmup)
        return self._planned.peak * ops.where(steps < warmup, warm, self._after_warmup(steps))

    def _left(self, steps: Any, begin: int) -> Any:
        """What is left of the time from `begin` to the end of training, from 1 to 0."""
        span = max(1, self._planned.train_steps - begin)
        return ops.cast(ops.clip(self._planned.train_steps - steps, 0, span), "float32") / span

    def _down_to_final(self, part: Any) -> Any:
        return self._planned.final_factor + (1 - self._planned.final_factor) * part

    def _constant(self, steps: Any) -> Any:
        return ops.ones_like(steps, "float32")

    def _cosine(self, steps: Any) -> Any:
        # sin^2 of half the angle: 1 + cos would cancel to nothing near the end.
        left = self._left(steps, self._planned.warmup_steps)
        return self._down_to_final(ops.square(ops.sin(math.pi / 2 * left)))

    def _polynomial(self, steps: Any) -> Any:
        left = self._left(steps, self._planned.warmup_steps)
        return self._down_to_final(ops.power(left, self._planned.decay_power))

    def _exponential(self, steps: Any) -> Any:
        times = ops.cast(steps - self._planned.warmup_steps, "float32") / max(1, self._planned.decay_every_steps)
        return ops.power(self._planned.decay_factor, times)

    def _step(self, steps: Any) -> Any:
        times = sum(ops.cast(steps >= mark, "float32") for mark in self._planned.decay_steps)
        return ops.power(self._planned.decay_factor, times)

    def _rsqrt(self, steps: Any) -> Any:
        warmup = max(1, self._planned.warmup_steps)
        return ops.sqrt(warmup / ops.cast(ops.maximum(steps, warmup), "float32"))

    def _wsd(self, steps: Any) -> Any:
        [begin] = self._planned.decay_steps
        return self._down_to_final(self._left(steps, begin))
