"""The check of `trainer.finite`, on the replicas of a strategy."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from trainer import finite, internals
from trainer.backends.tensorflow import internals as own_internals


class Change(NamedTuple):
    """What a step makes of a variable on a replica."""

    variable: keras.Variable
    before: tf.Tensor
    after: tf.Tensor


class FiniteCheck:
    """The check, its state on each replica, and the gradient norm. Make it under the strategy's scope.

    Args:
        model: built and compiled; its loss metric tells whether the loss is finite.
    """

    def __init__(self, model: keras.Model):
        self._loss_total = internals.loss_total(model)
        self._guarded = [*internals.step_state(model), *model.metrics_variables]
        self._averaged = {id(variable) for variable in internals.float_state(model)}
        self._step = threading.local()  # each replica is traced by a thread of its own
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
        """Runs a step on a replica; what it did to metrics and state is taken back if it failed."""
        before = [variable.value.read_value() for variable in self._guarded]
        step()

        def undo() -> None:
            for variable, value in zip(self._guarded, before, strict=True):
                variable.assign(value)

        tf.cond(finite.has_halted(self._state.read_value()), undo, lambda: None)

    @contextlib.contextmanager
    def with_update(self, changes: Sequence[Change], *, waits: bool) -> Iterator[None]:
        """Where an optimizer that updates the weights lets these change too, the model's statistics averaged.

        For a step that leaves all else alone: nothing is to be undone then, and what the replicas exchange goes
        together.

        Args:
            changes: beside the weights.
            waits: for the judgement. Else the step has its effect in any case, and whoever made it undoes the call.
        """
        self._step.changes, self._step.waits = changes, waits
        try:
            yield
        finally:
            self._step.changes, self._step.waits = (), True

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> own_internals.Apply:
        """An `apply` that averages the gradients over the replicas, and applies them only if they are finite."""

        def checked_apply(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            changes: Sequence[Change] = getattr(self._step, "changes", ())
            statistics = [change.after for change in changes if id(change.variable) in self._averaged]
            # Dense: on a TPU they are so anyway, and slices of several replicas do not add up elsewhere.
            present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
            exchanged = [self._loss_so_far(changes), *statistics, *present]
            loss, *means = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, exchanged)
            remaining = iter(means)
            afterwards = [next(remaining) if id(c.variable) in self._averaged else c.after for c in changes]
            averaged = [None if g is None else next(remaining) for g in gradients]
            half_square = tf.add_n([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in averaged if g is not None])
            scale = internals.scale(optimizer)
            if not getattr(self._step, "waits", True):
                self._state.assign_add(finite.note(half_square, loss, scale))
                for change, after in zip(changes, afterwards, strict=True):
                    change.variable.assign(after)
                apply(averaged)
                return
            goes_on, kept = finite.judge(self._state.read_value(), half_square, loss, scale)
            self._state.assign_add(kept)
            for change, after in zip(changes, afterwards, strict=True):
                change.variable.assign(tf.where(goes_on, after, change.before))
            own_internals.run_if(goes_on, apply, averaged)

        return checked_apply

    def _loss_so_far(self, changes: Sequence[Change]) -> tf.Tensor:
        """Of this replica, float32: the sum over steps turns NaN or infinite with the loss of the step."""
        if self._loss_total is None:
            return tf.constant(0.0)
        now = [change.after for change in changes if change.variable is self._loss_total]
        return tf.cast(now[0] if now else self._loss_total.value, tf.float32)
