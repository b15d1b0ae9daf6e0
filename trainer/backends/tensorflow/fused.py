"""Updates of Keras' SGD and Adam by the kernels that TensorFlow has for them: one pass over a variable, not ten."""

from typing import Any

import keras
import tensorflow as tf

from trainer.backends.tensorflow import internals

# TensorFlow's kernel of Adam on a CPU wakes all threads even for a handful of numbers: it takes the cost of one for
# that of all. Elements from which on it is ahead of Keras' operations.
_WORTHWHILE = 2**16


def fuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets the optimizer update float32 variables by a kernel, where there is one of its very formula.

    Not where something else has replaced its update already, as learning rates by layer do.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kernel = _KERNELS.get(type(inner).update_step)
    if kernel is None or "update_step" in vars(inner):
        return
    update_step = inner.update_step

    def fused(gradient: tf.Tensor, variable: tf.Variable, of_step: list[tf.Tensor]) -> None:
        if kernel.is_worthwhile(variable):
            kernel.update(inner, tf.cast(gradient, tf.float32), variable, *of_step)
        else:
            update_step(gradient, variable, of_step[0])

    inner.update_step = fused
    internals.once_a_step(inner, lambda learning_rate: kernel.of_step(inner, tf.cast(learning_rate, tf.float32)))


class _Sgd:
    def is_worthwhile(self, variable: tf.Variable) -> bool:
        return variable.dtype == tf.float32

    def of_step(self, optimizer: keras.optimizers.SGD, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        """What is the same for all variables."""
        return [learning_rate]

    def update(
        self, optimizer: keras.optimizers.SGD, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        if optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=learning_rate, delta=gradient, use_locking=True
            )
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=internals.slot_handle(optimizer, optimizer.momentums, variable),
            lr=learning_rate,
            grad=gradient,
            momentum=optimizer.momentum,
            use_nesterov=optimizer.nesterov,
            use_locking=True,
        )


class _Adam:
    def is_worthwhile(self, variable: tf.Variable) -> bool:
        is_small = "CPU" in variable.device and variable.shape.num_elements() < _WORTHWHILE
        return variable.dtype == tf.float32 and not is_small

    def of_step(self, optimizer: keras.optimizers.Adam, learning_rate: tf.Tensor) -> list[tf.Tensor]:
        """What is the same for all variables."""
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
        return [learning_rate, tf.pow(optimizer.beta_1, step), tf.pow(optimizer.beta_2, step)]

    def update(
        self,
        optimizer: keras.optimizers.Adam,
        gradient: tf.Tensor,
        variable: tf.Variable,
        learning_rate: tf.Tensor,
        beta1_power: tf.Tensor,
        beta2_power: tf.Tensor,
    ) -> None:
        given = {
            "var": variable.handle,
            "m": internals.slot_handle(optimizer, optimizer._momentums, variable),
            "v": internals.slot_handle(optimizer, optimizer._velocities, variable),
            "beta1_power": beta1_power,
            "beta2_power": beta2_power,
            "lr": learning_rate,
            "beta1": optimizer.beta_1,
            "beta2": optimizer.beta_2,
            "epsilon": optimizer.epsilon,
            "grad": gradient,
            "use_locking": True,
        }
        if optimizer.amsgrad:
            largest = internals.slot_handle(optimizer, optimizer._velocity_hats, variable)
            tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=largest, **given)
        else:
            tf.raw_ops.ResourceApplyAdam(use_nesterov=False, **given)


_KERNELS: dict[Any, Any] = {keras.optimizers.SGD.update_step: _Sgd(), keras.optimizers.Adam.update_step: _Adam()}
