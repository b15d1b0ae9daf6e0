"""Whether gradients fit the half precision that they are computed in, counted on the devices once a report.

A gradient that is too small for float16 becomes 0, and looks like that of a weight that the batch does not reach. What
can be seen is how many are about to: below the smallest normal number (2^-14 of float16) digits are lost, down to the
smallest of all (2^-24). Loss scaling moves gradients out of there (Micikevicius et al., arXiv:1710.03740, section 3.2).

    gradient_underflow    share of entries below the smallest normal number among those that are not 0; where the whole
                          gradient of a variable is 0, all of its entries count as below
    gradient_overflow     share of steps that a scaled gradient beyond float16 has undone (mixed float16 only)
    loss_scale            by which the loss is multiplied now (mixed float16 only)

Counted are gradients as a replica computed them, scaled, before any average; only of layers that compute in half
precision, at the first step of each report whose gradients are finite.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from trainer import internals

UNDERFLOW, OVERFLOW, LOSS_SCALE = "gradient_underflow", "gradient_overflow", "loss_scale"
NAMES = (UNDERFLOW, OVERFLOW, LOSS_SCALE)
_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}


class GradientFit:
    """The counts of the report in the making. Make it under the strategy's scope, on a model that has been built.

    It has to see gradients before they are averaged: make it after what does that (`finite.FiniteCheck`).
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._smallest = {id(variable): _SMALLEST_NORMAL[dtype] for variable, dtype in internals.half_precision(model)}
        # (entries below, entries that are not 0), of each replica's own gradients. float32: shares need no last digit.
        self._counts = tf.Variable(
            tf.zeros([2], tf.float32),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        for optimizer in internals.optimizers(model) if self._smallest else ():
            internals.watch_gradients(optimizer, self._note)

    @property
    def state(self) -> dict[str, tf.Variable]:
        """Name -> [2] float32; a checkpoint has to hold it. Empty where nothing is computed in half precision."""
        return {UNDERFLOW: self._counts} if self._smallest else {}

    def reset(self) -> None:
        """Begins the next report."""
        self._counts.assign(tf.zeros([2], tf.float32))

    def values(self, overflow: tf.Tensor) -> dict[str, tf.Tensor]:
        """What a report says, float32; NaN of what is not known. In cross-replica context.

        Args:
            overflow: share of steps undone because scaled gradients were not finite.
        """
        if not self._smallest:
            return {}
        below, present = tf.unstack(self._counts.read_value())
        found = {UNDERFLOW: below / present}
        if internals.scales(self._model.optimizer):
            found |= {OVERFLOW: overflow, LOSS_SCALE: internals.scale(self._model.optimizer)}
        return found

    def _note(self, gradients: Sequence, variables: Sequence[keras.Variable]) -> None:
        chosen = [
            (tf.convert_to_tensor(gradient), self._smallest[id(variable)])
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and id(variable) in self._smallest
        ]
        # Counted already, it costs a look at one number.
        tf.cond(self._counts.read_value()[1] > 0, lambda: None, lambda: self._count(chosen))

    def _count(self, chosen: Sequence[tuple[tf.Tensor, float]]) -> None:
        counts = tf.add_n([_counts_of(gradient, smallest) for gradient, smallest in chosen])
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient, _ in chosen])
        self._counts.assign(tf.where(finite, counts, tf.zeros_like(counts)))


def _counts_of(gradient: tf.Tensor, smallest: float) -> tf.Tensor:
    """(entries below, entries that are not 0) of one variable's gradient, [2] float32."""
    magnitude = tf.abs(gradient)
    present = tf.math.count_nonzero(magnitude > 0, dtype=tf.int32)
    below = tf.math.count_nonzero((magnitude > 0) & (magnitude < smallest), dtype=tf.int32)
    vanished = tf.fill([2], tf.size(gradient))
    return tf.cast(tf.where(present > 0, tf.stack([below, present]), vanished), tf.float32)
