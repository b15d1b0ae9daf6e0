"""The counts of `trainer.precision`, on the replicas of a strategy."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from trainer import internals, precision


class GradientFit:
    """The counts of the report in the making. Make it under the strategy's scope, on a model that has been built.

    It has to see gradients before they are averaged: make it after what does that (`finite.FiniteCheck`).
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._smallest = precision.smallest_normal(model)
        self._counts = tf.Variable(
            tf.constant(precision.NOTHING),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        for optimizer in internals.optimizers(model) if self._smallest else ():
            internals.watch_gradients(optimizer, self._note)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """Name -> [2] float32; a checkpoint has to hold it. Empty where nothing is computed in half precision."""
        return {precision.UNDERFLOW: self._counts} if self._smallest else {}

    def reset(self) -> None:
        """Begins the next report."""
        self._counts.assign(tf.constant(precision.NOTHING))

    def values(self, overflow: tf.Tensor) -> dict[str, tf.Tensor]:
        """What a report says, float32; NaN of what is not known. In cross-replica context.

        Args:
            overflow: share of steps undone because scaled gradients were not finite.
        """
        if not self._smallest:
            return {}
        return precision.values(self._model, self._counts.read_value(), overflow)

    def _note(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> None:
        chosen = [
            (tf.convert_to_tensor(gradient), self._smallest[id(variable)])
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and id(variable) in self._smallest
        ]
        tf.cond(
            precision.is_counted(self._counts.read_value()),
            lambda: None,
            lambda: self._count(chosen),
        )

    def _count(self, chosen: Sequence[tuple[tf.Tensor, float]]) -> None:
        self._counts.assign(precision.counted(chosen))
