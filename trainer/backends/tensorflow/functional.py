"""The train step as a function of tensors: what it makes of weights and state is assigned at its end, or not at all."""

import keras
import tensorflow as tf

from trainer import internals
from trainer.backends.tensorflow.finite import Change, FiniteCheck
from trainer.backends.tensorflow.once import TracedOnce
from trainer.forward import Forward

Tensors = list[tf.Tensor]


class FunctionalTrainStep:
    """Keras' train step with forward and backward pass as one function of tensors only.

    XLA cannot compile a step that reads the variables of another replica's device or exchanges gradients (keras 19005,
    tensorflow 53140), nor can a loop on the device hold variables of several: so variables go in and come out as
    tensors, and the optimizer runs outside. A step that is not finite has then changed nothing, and needs no undoing;
    but for what a layer assigns to weights, or beside the model, which goes through at once.

    Args:
        model: built and compiled, without a `train_step` of its own.
        check: averages gradients and statistics over the replicas, and assigns what the step has made.
        microbatches: equal parts of a replica's share that are computed one after the other. Their gradients are
            averaged and applied once, so that activations of one part alone take memory. Each part has batch statistics
            and dropout masks of its own.
        xla: compile it.
    """

    def __init__(self, model: keras.Model, check: FiniteCheck, *, microbatches: int, xla: bool):
        self._model, self._check = model, check
        self._microbatches = microbatches
        is_plain = microbatches == 1 and not xla
        # What is drawn without a generator moves on too.
        self._forward = Forward(model, [internals.global_seed()], internals.assign_at_once if is_plain else None)
        passes = self._one_pass if microbatches == 1 else self._passes
        self._forward_backward = TracedOnce(tf.function(passes, jit_compile=True, autograph=False) if xla else passes)

    def __call__(self, data: tuple, *, waits: bool = True) -> None:
        """See `FiniteCheck.with_update` for `waits`."""
        optimizer, forward = self._model.optimizer, self._forward
        weights = [tf.convert_to_tensor(v.value) for v in forward.trainable]
        state = [tf.convert_to_tensor(v.value) for v in forward.state]
        loss_scale = optimizer.scale_loss(tf.constant(1.0))
        gradients, new_state = self._forward_backward(weights, state, data, loss_scale)
        changes = map(Change, forward.state, state, new_state)
        changed = [change for change in changes if id(change.variable) in forward.assigned]
        with self._check.with_update(changed, waits=waits):
            optimizer.apply_gradients(zip(gradients, forward.trainable, strict=True))

    def _passes(
        self, weights: Tensors, state: Tensors, data: tuple, loss_scale: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], Tensors]:
        """Part after part; means of the gradients, and the state after the last."""
        parts = tf.nest.map_structure(self._split, data)
        without_gradient: set[int] = set()

        def body(index: tf.Tensor, sums: Tensors, state: Tensors) -> tuple[tf.Tensor, Tensors, Tensors]:
            part = tf.nest.map_structure(lambda tensor: tensor[index], parts)
            gradients, state = self._one_pass(weights, state, part, loss_scale)
            without_gradient.update(i for i, gradient in enumerate(gradients) if gradient is None)
            added = [s if g is None else s + tf.convert_to_tensor(g) for s, g in zip(sums, gradients, strict=True)]
            return index + 1, added, state

        start = (tf.constant(0), [tf.zeros_like(weight) for weight in weights], state)
        _, sums, state = tf.while_loop(
            lambda index, *_: index < self._microbatches,
            body,
            start,
            parallel_iterations=1,
            maximum_iterations=self._microbatches,
        )
        means = [None if i in without_gradient else total / self._microbatches for i, total in enumerate(sums)]
        return means, state

    def _split(self, tensor: tf.Tensor) -> tf.Tensor:
        size, *rest = tensor.shape
        return tf.reshape(tensor, [self._microbatches, size // self._microbatches, *rest])

    def _one_pass(
        self, weights: Tensors, state: Tensors, data: tuple, loss_scale: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], Tensors]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            scaled, state = self._forward(weights, state, data, loss_scale)
        return tape.gradient(scaled, weights), state
