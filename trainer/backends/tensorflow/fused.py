"""Updates of Keras' SGD and Adam in fewer operations, which small models are made of.

Of SGD by the kernel that TensorFlow has for it. That of Adam rounds 1 - beta_2 otherwise than Keras does, which in the
course of a run shows; so of Adam only what is the same for all variables is computed once a step, and no bit changes.
"""

from typing import Any

import keras
import tensorflow as tf

from trainer.backends.tensorflow import internals


def fuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Replaces the update of float32 variables, where there is another one for it.

    Not where something else has replaced it already, as learning rates by layer do.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    update = _UPDATES.get(type(inner).update_step)
    if update is None or "update_step" in vars(inner):
        return
    update_step = inner.update_step

    def fused(gradient: tf.Tensor, variable: tf.Variable, of_step: list[tf.Tensor]) -> None:
        if variable.dtype == tf.float32:
            update(inner, tf.cast(gradient, tf.float32), variable, of_step)
        else:
            update_step(gradient, variable, of_step[0])

    def once(learning_rate: Any) -> list[tf.Tensor]:
        rate = tf.cast(learning_rate, tf.float32)
        return [rate, _adams_rate(inner, rate)] if update is _adam else [rate]

    inner.update_step = fused
    internals.once_a_step(inner, once)


def _sgd(optimizer: keras.optimizers.SGD, gradient: tf.Tensor, variable: tf.Variable, of_step: list[tf.Tensor]) -> None:
    [rate] = of_step
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient, use_locking=True)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=internals.slot(optimizer, optimizer.momentums, variable).handle,
        lr=rate,
        grad=gradient,
        momentum=optimizer.momentum,
        use_nesterov=optimizer.nesterov,
        use_locking=True,
    )


def _adams_rate(optimizer: keras.optimizers.Adam, learning_rate: tf.Tensor) -> tf.Tensor:
    """With the correction of the moments' bias at the start (arXiv:1412.6980, end of section 2)."""
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
    return learning_rate * tf.sqrt(1 - tf.pow(optimizer.beta_2, step)) / (1 - tf.pow(optimizer.beta_1, step))


def _adam(
    optimizer: keras.optimizers.Adam, gradient: tf.Tensor, variable: tf.Variable, of_step: list[tf.Tensor]
) -> None:
    _, rate = of_step
    mean = internals.slot(optimizer, optimizer._momentums, variable)
    square = internals.slot(optimizer, optimizer._velocities, variable)
    mean.assign_add((gradient - mean) * (1 - optimizer.beta_1))
    square.assign_add((tf.square(gradient) - square) * (1 - optimizer.beta_2))
    if optimizer.amsgrad:
        largest = internals.slot(optimizer, optimizer._velocity_hats, variable)
        largest.assign(tf.maximum(largest, square))
        square = largest
    variable.assign_sub(mean * rate / (tf.sqrt(square) + optimizer.epsilon))


_UPDATES: dict[Any, Any] = {keras.optimizers.SGD.update_step: _sgd, keras.optimizers.Adam.update_step: _adam}
