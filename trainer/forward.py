"""Keras' forward pass in training as a function of arrays: weights and state go in, loss and new state come out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from trainer import assignments, internals
from trainer.errors import ConfigError

Arrays = list[Any]


class Forward:
    """The pass of a built and compiled model without a `train_step` of its own.

    trainable: variables in the order of the weights. state: those in the order of the state: all that the pass may
    change, metrics and what is `beside` the model too.

    Args:
        model: built and compiled.
        beside: variables of the state that are not the model's.
        assign: what is done at once with an assignment to what is no state, as the pass goes on; None: it is refused.
    """

    def __init__(
        self,
        model: keras.Model,
        beside: Sequence[keras.Variable] = (),
        assign: Callable[[keras.Variable, Any], None] | None = None,
    ):
        self._model = model
        self._assign = assign
        self.trainable: Sequence[keras.Variable] = model.trainable_variables
        self.state: Sequence[keras.Variable] = [*model.non_trainable_variables, *model.metrics_variables, *beside]
        self._is_state = {id(variable) for variable in self.state}
        # Ids of the state that the pass changes; known once it has been traced.
        self.assigned: set[int] = set()

    def __call__(self, weights: Arrays, state: Arrays, data: tuple, loss_scale: Any) -> tuple[Any, Arrays]:
        """The scaled loss of `(x, y)`, a scalar, and the state afterwards.

        Raises:
            ConfigError: without `assign`, where a layer assigns to trainable weights while it is called, or to what is
                not handed over; where it assigns within a branch, a loop or a function of TensorFlow's.
        """
        model = self._model
        x, y = data
        mapping = [*zip(self.trainable, weights, strict=True), *zip(self.state, state, strict=True)]
        scope, keep = keras.StatelessScope(mapping, collect_losses=True), functools.partial(self._kept, weights)
        with scope, assignments.noting_assigned(scope, keep) as assigned:
            y_pred = model(x, training=True)
            loss = internals.compute_loss(model, x, y, y_pred)
            internals.note_loss(model, loss, examples=keras.ops.shape(keras.tree.flatten(x)[0])[0])
            model.compute_metrics(x, y, y_pred, sample_weight=None)
            scaled = loss * keras.ops.cast(loss_scale, loss.dtype)
        trainable = {id(variable) for variable in self.trainable}
        if lost := sorted({variable.path for variable in assigned if id(variable) in trainable}):
            raise ConfigError(
                "a layer assigns to trainable weights while it is called, which a step of arrays only would lose. On "
                f"TensorFlow use --xla=off and no --microbatches; on JAX it cannot be had. Received: {', '.join(lost)}"
            )
        self.assigned.update(map(id, assigned))
        return scaled, [scope.get_current_value(variable) for variable in self.state]

    def _kept(self, weights: Arrays, variable: keras.Variable, value: Any) -> Any:
        """What a variable is that has been assigned at once; None of one that has not."""
        if self._assign is None or id(variable) in self._is_state:
            return None
        self._assign(variable, value)
        read = [weight for known, weight in zip(self.trainable, weights, strict=True) if known is variable]
        if not read:
            return value
        # A gradient is that by all that is read of a weight, before and after, as of one that is no function of itself.
        return keras.ops.stop_gradient(value) + (read[0] - keras.ops.stop_gradient(read[0]))
