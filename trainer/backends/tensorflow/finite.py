"""The check of `trainer.finite`, on the replicas of a strategy."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from trainer import finite, internals
from trainer.backends.tensorflow import internals as own_internals


class FiniteCheck:
    """The check, its state on each replica, and the gradient norm. Make it under the strategy's scope.

    Args:
        model: built and compiled; its loss metric tells whether the loss is finite.
    """

    def __init__(self, model: keras.Model):
        self._loss_total = internals.loss_total(model)
        self._guarded = [*internals.step_state(model), *model.metrics_variables]
        self._averaged = {id(variable) for variable in internals.float_state(model)}
        self._beside = threading.local()  # each replica is traced by a thread of its own
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
    def with_update(self, values: Sequence[tuple[keras.Variable, tf.Tensor]]) -> Iterator[None]:
        """Where an optimizer that updates weights assigns these on the replica too, the model's statistics averaged.

        For a step that leaves all else alone: nothing is to be undone then, and what the replicas exchange goes
        together.
        """
        self._beside.values = values
        try:
            yield
        finally:
            self._beside.values = ()

    def _checked(self, optimizer: keras.optimizers.Optimizer) -> own_internals.Apply:
        """An `apply` that averages the gradients over the replicas, and applies them only if they are finite."""

        def checked_apply(gradients: Sequence, apply: Callable[[Sequence], None]) -> None:
            beside = list(getattr(self._beside, "values", ()))
            statistics = [index for index, (variable, _) in enumerate(beside) if id(variable) in self._averaged]
            # Dense: on a TPU they are so anyway, and slices of several replicas do not add up elsewhere.
            present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
            exchanged = [self._loss_so_far(beside), *present, *(beside[index][1] for index in statistics)]
            loss, *means = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, exchanged)
            for index in reversed(statistics):
                beside[index] = (beside[index][0], means.pop())
            scale = internals.scale(optimizer)
            norm = tf.linalg.global_norm([tf.cast(mean, tf.float32) for mean in means]) / scale
            goes_on, change = finite.judge(self._state.read_value(), norm, loss, scale)
            self._state.assign_add(change)
            remaining = iter(means)
            averaged = [None if g is None else next(remaining) for g in gradients]

            def update(tensors: Sequence) -> None:
                apply(tensors[: len(averaged)])
                for (variable, _), value in zip(beside, tensors[len(averaged) :], strict=True):
                    variable.assign(value)

            own_internals.run_if(goes_on, update, [*averaged, *(value for _, value in beside)])

        return checked_apply

    def _loss_so_far(self, beside: Sequence[tuple[keras.Variable, tf.Tensor]]) -> tf.Tensor:
        """Of this replica, float32: the sum over steps turns NaN or infinite with the loss of the step."""
        if self._loss_total is None:
            return tf.constant(0.0)
        now = [value for variable, value in beside if variable is self._loss_total] or [self._loss_total.value]
        return tf.cast(now[0], tf.float32)
