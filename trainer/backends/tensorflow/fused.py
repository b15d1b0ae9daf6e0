"""Updates of Keras' SGD and Adam in fewer operations and passes over memory: what small models' steps are made of.

Of SGD by the kernel that TensorFlow has for it. That of Adam rounds 1 - beta_2 otherwise than Keras does, which in the
course of a run shows. So of Adam what is the same for all variables is computed once a step, and what is left goes by
the kernel that subtracts a multiple; nothing is rounded otherwise but, in the last bit, what is subtracted of weights.
"""

from typing import Any

import keras
import tensorflow as tf

from trainer import internals
from trainer.backends.tensorflow import internals as own_internals


def fuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Replaces the update of float32 variables, where there is another one for it, and their weight decay.

    Not where something else has replaced it already, as learning rates by layer do.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    update = _UPDATES.get(type(inner).update_step)
    if update is None or "update_step" in vars(inner):
        return
    update_step = inner.update_step

    def fused(gradient: tf.Tensor, variable: tf.Variable, of_step: list[tf.Tensor]) -> None:
        if not is_fused(variable):
            update_step(gradient, variable, of_step[0])
            return
        _, *decay, rate = of_step
        if decay and internals.is_decayed(inner, variable):
            variable.assign_sub(variable * decay[0])
        update(inner, tf.cast(gradient, tf.float32), variable, rate)

    def once(learning_rate: Any) -> list[tf.Tensor]:
        rate = tf.cast(learning_rate, tf.float32)
        decay = [] if inner.weight_decay is None else [rate * inner.weight_decay]
        return [rate, *decay, _adams_rate(inner, rate) if update is _adam else rate]

    def is_fused(variable: Any) -> bool:
        return tf.as_dtype(variable.dtype) == tf.float32  # of Keras or of TensorFlow

    inner.update_step = fused
    own_internals.once_a_step(inner, once)
    own_internals.decay_others(inner, is_fused)


def _sgd(optimizer: keras.optimizers.SGD, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
    if optimizer.momentum == 0:
        _subtract(variable, rate, gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=own_internals.slot(optimizer, optimizer.momentums, variable).handle,
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


def _adam(optimizer: keras.optimizers.Adam, gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
    mean = own_internals.slot(optimizer, optimizer._momentums, variable)
    square = own_internals.slot(optimizer, optimizer._velocities, variable)
    _subtract(mean, 1 - optimizer.beta_1, mean - gradient)
    _subtract(square, 1 - optimizer.beta_2, square - tf.square(gradient))
    if optimizer.amsgrad:
        largest = own_internals.slot(optimizer, optimizer._velocity_hats, variable)
        largest.assign(tf.maximum(largest, square))
        square = largest
    _subtract(variable, rate, mean / (tf.sqrt(square) + optimizer.epsilon))


def _subtract(variable: tf.Variable, factor: Any, tensor: tf.Tensor) -> None:
    """`variable -= factor * tensor` in one pass."""
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=factor, delta=tensor, use_locking=True)


_UPDATES: dict[Any, Any] = {keras.optimizers.SGD.update_step: _sgd, keras.optimizers.Adam.update_step: _adam}
