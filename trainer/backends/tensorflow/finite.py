"""The check of `trainer.finite`, on the replicas of a strategy."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from trainer import finite, internals
from trainer.backends.tensorflow import internals as own_internals


class FiniteCheck:
    """The check, its state on each replica, and the gradient norm. Make it under the strategy's scope.

    Args:
        model: built and compiled; its loss metric tells whether the loss is finite.
        guarded: metrics and state that a step changes without the optimizer, to be undone with it.
    """

    def __init__(self, model: keras.Model, guarded: Sequence[keras.Variable]):
        self._loss_total = internals.loss_total(model)
        self._guarded = list(guarded)
        # Each replica writes its own copy, all the same.
        self._state = tf.Variable(
            tf.constant(finite.NOTHING),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        for optimizer in internals.optimizers(model):
            own_internals.before_apply(optimizer, self._checked(optimizer))

    @property
    def state(self) -> tf.Variable:
        """[5] float32; a checkpoint has to hold it, so that the mean goes on where it was."""
        return self._state

    def end_of_call(self) -> tf.Tensor:
        """See `finite.end_of_call`. In cross-replica context."""
        halted_at, kept = finite.end_of_call(self._state.read_value())
        self._state.assign(kept)
        return halted_at

    def gradient_norm(self) -> tf.Tensor:
        """See `finite.gradient_norm`. In cross-replica context."""
        return finite.gradient_norm(self._state.read_value())

    def overflow(self) -> tf.Tensor:
        """See `finite.overflow`. In cross-replica context."""
        return finite.overflow(self._state.read_value())

    def reset(self) -> None:
        """Starts the means anew."""
        self._state.assign(finite.NOTHING)

    def undone_unless_finite(self, step: Callable[[], None]) -> None:
        """Runs a step on a replica; what it did to the guarded state is taken back if it failed."""
        before = [variable.value.read_value() for variable in self._guarded]
        step()

        def undo() -> None:
            for variable, value in zip(self._guarded, before, strict=True):
                variable.assign(value)

        tf.cond(finite.has_halted(self._state.read_value()), undo, lambda: None)

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> own_internals.Apply:
        """An `apply` that averages the gradients over the replicas, and applies them only if they are finite."""

        def checked_apply(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            # Dense: on a TPU they are so anyway, and slices of several replicas do not add up elsewhere.
            present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
            replica = tf.distribute.get_replica_context()
            *means, failed = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [*present, self._loss_failed()])
            scale = internals.scale(optimizer)
            norm = tf.linalg.global_norm([tf.cast(mean, tf.float32) for mean in means]) / scale
            goes_on, kept = finite.judge(self._state.read_value(), norm, failed > 0.0, scale)
            self._state.assign(kept)
            remaining = iter(means)
            averaged = [None if g is None else next(remaining) for g in gradients]
            own_internals.run_if(goes_on, apply, averaged)

        return checked_apply

    def _loss_failed(self) -> tf.Tensor:
        """1.0 or 0.0, of this replica: the sum over steps turns NaN or infinite with the loss of the step."""
        if self._loss_total is None:
            return tf.constant(0.0)
        return tf.cast(~tf.math.is_finite(self._loss_total.value.read_value()), tf.float32)
