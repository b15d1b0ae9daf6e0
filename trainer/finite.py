"""Whether a step's loss and gradients are finite, decided on the devices, and a step that is not without effect.

At the first step whose loss or gradient norm is NaN or infinite the replicas *halt*: that step's update, and those of
all later steps of the same call, change nothing. So the host, which looks once a loop, finds the very state in which
the step failed, and can examine it, save it, or go on behind it. All replicas decide from the same averaged numbers.

It runs at every step: what it costs is measured by `scripts/bench_finite.py`.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from trainer import internals

# Entries of the state, one vector so that a step reads and writes it once.
_HALTED, _STEPS, _NORM_SUM, _NORM_COUNT, _OVERFLOWS = range(5)
_NOTHING = (0.0,) * 5


class FiniteCheck:
    """The check, its state on each replica, and the gradient norm. Make it under the strategy's scope.

    Args:
        model: built and compiled; its loss metric tells whether the loss is finite.
        guarded: metrics and state that a step changes without the optimizer, to be undone with it.
    """

    def __init__(self, model: keras.Model, guarded: Sequence[keras.Variable]):
        self._loss_total = internals.loss_total(model)
        self._guarded = list(guarded)
        # Each replica writes its own copy, all the same. float32: every device has it, and steps of a call are few.
        self._state = tf.Variable(
            tf.constant(_NOTHING),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        for optimizer in internals.optimizers(model):
            internals.before_apply(optimizer, self._checked(optimizer))

    @property
    def state(self) -> tf.Variable:
        """[5] float32; a checkpoint has to hold it, so that the mean goes on where it was."""
        return self._state

    def end_of_call(self) -> tf.Tensor:
        """Which step of the call that ends failed, float32; -1 where none did. In cross-replica context."""
        state = self._state.read_value()
        self._state.assign(state * [0.0, 0.0, 1.0, 1.0, 1.0])
        return tf.where(state[_HALTED] > 0, state[_STEPS], -1.0)

    def gradient_norm(self) -> tf.Tensor:
        """Mean of the global norm of the gradients before clipping, since the last reset; NaN where no step counted."""
        state = self._state.read_value()
        return state[_NORM_SUM] / state[_NORM_COUNT]

    def overflow(self) -> tf.Tensor:
        """Share of steps since the last reset whose scaled gradients were not finite; NaN where there was no step."""
        state = self._state.read_value()
        return state[_OVERFLOWS] / (state[_NORM_COUNT] + state[_OVERFLOWS])

    def reset(self) -> None:
        """Starts the mean of the gradient norm anew."""
        self._state.assign(_NOTHING)

    def undone_unless_finite(self, step: Callable[[], None]) -> None:
        """Runs a step on a replica; what it did to the guarded state is taken back if it failed."""
        before = [variable.value.read_value() for variable in self._guarded]
        step()

        def undo() -> None:
            for variable, value in zip(self._guarded, before, strict=True):
                variable.assign(value)

        tf.cond(self._state.read_value()[_HALTED] > 0, undo, lambda: None)

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> internals.Apply:
        """An `apply` that averages the gradients over the replicas, and applies them only if they are finite."""

        def checked_apply(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            # Dense: on a TPU they are so anyway, and slices of several replicas do not add up elsewhere.
            present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
            replica = tf.distribute.get_replica_context()
            *means, failed = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [*present, self._loss_failed()])
            scale = internals.scale(optimizer)
            norm = tf.linalg.global_norm([tf.cast(mean, tf.float32) for mean in means]) / scale
            counts = tf.math.is_finite(norm)
            # A scaled gradient that overflows is how dynamic loss scaling finds its scale; the optimizer deals with it.
            fails = (failed > 0.0) | (~counts & (scale <= 1.0))
            state = self._state.read_value()
            goes_on = ~fails & (state[_HALTED] == 0.0)
            changes = [~goes_on, goes_on, goes_on & counts, goes_on & ~counts]
            halted, steps, count, overflow = tf.unstack(tf.cast(tf.stack(changes), tf.float32))
            normed = tf.where(goes_on & counts, norm, 0.0)
            self._state.assign(state + tf.stack([halted, steps, normed, count, overflow]))
            remaining = iter(means)
            averaged = [None if g is None else next(remaining) for g in gradients]
            internals.run_if(goes_on, apply, averaged)

        return checked_apply

    def _loss_failed(self) -> tf.Tensor:
        """1.0 or 0.0, of this replica: the sum over steps turns NaN or infinite with the loss of the step."""
        if self._loss_total is None:
            return tf.constant(0.0)
        return tf.cast(~tf.math.is_finite(self._loss_total.value.read_value()), tf.float32)
