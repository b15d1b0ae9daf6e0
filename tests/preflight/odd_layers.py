"""What people put into a layer, a line each: some of it no TPU takes. The tests look for these very lines."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def eig(x):
    return x + tf.math.real(tf.linalg.eig(tf.matmul(x, x, transpose_a=True))[0])


def py_function(x):
    return tf.ensure_shape(tf.py_function(lambda t: t * 2.0, [x], x.dtype), x.shape)


def numpy_function(x):
    return tf.ensure_shape(tf.numpy_function(lambda t: t * 2.0, [x], x.dtype), x.shape)


def decode_jpeg(x):
    return x + tf.reduce_mean(tf.cast(tf.io.decode_jpeg(tf.constant(b"\xff\xd8\xff")), x.dtype))


def as_string(x):
    return x + tf.cast(tf.strings.length(tf.strings.as_string(x[0, 0])), x.dtype)


def printed(x):
    with tf.control_dependencies([tf.print("x", x[0, 0])]):
        return tf.identity(x)


def dynamic_reshape(x):
    return x + tf.reduce_sum(tf.reshape(x, [tf.cast(tf.reduce_sum(x), tf.int32), -1]))


def dynamic_range(x):
    return x + tf.cast(tf.reduce_sum(tf.range(tf.cast(tf.reduce_max(x), tf.int32))), x.dtype)


def growing_array(x):
    return x + tf.TensorArray(x.dtype, size=0, dynamic_size=True).write(0, x[0]).stack()[0]


def table(x):
    made = tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4], tf.int32, tf.int32)
    return x + tf.cast(tf.lookup.StaticHashTable(made, 0).lookup(tf.cast(x, tf.int32)), x.dtype)


def python_if(x):
    return x + (1.0 if x[0, 0] > 0 else 2.0)


def complex128(x):
    return x + tf.cast(tf.math.real(tf.signal.fft(tf.cast(x, tf.complex128))), x.dtype)


def complex64(x):
    return x + tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64)))


def boolean_mask(x):
    return x + tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0), axis=0)


def unique(x):
    return x + tf.cast(tf.reduce_sum(tf.unique(tf.cast(x[:, 0], tf.int32))[0]), x.dtype)


def float64(x):
    return x + tf.cast(tf.cast(x, tf.float64) ** 2, x.dtype)


def svd(x):
    return x + tf.linalg.svd(x, compute_uv=False)[0]


def centred(x):
    return x - tf.reduce_mean(x, axis=0)


def plain(x):
    return x


def looped(x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, py_function(y)), (0, x))[1]


def branched(x):
    return tf.cond(x[0, 0] > 0, lambda: py_function(x), lambda: x)


def float64_constant(x):
    return x + tf.cast(tf.reduce_sum(tf.constant(np.linspace(0, 1, 8)) * 2.0), x.dtype)


def large_argmax(x):
    return x + tf.cast(tf.reduce_sum(tf.argmax(tf.reshape(tf.repeat(x, 64, axis=1), (-1, 64)), axis=1)), x.dtype)


def noisy(x):
    return x + tf.random.normal(tf.shape(x))


def fails_eagerly(x):
    return tf.debugging.assert_greater(x, 1e9) or x if tf.executing_eagerly() else x


def foreign_variable(x):
    return x * _variable()


def foreign_generator(x):
    return x + _generator().normal(x.shape)


def foreign_constant(x):
    return x + _constant()


@functools.cache
def _variable() -> tf.Variable:
    return tf.Variable(2.0, name="lonely")


@functools.cache
def _generator() -> tf.random.Generator:
    return tf.random.Generator.from_seed(1)


@functools.cache
def _constant() -> tf.Tensor:
    return tf.ones((1,))


class Odd(keras.layers.Layer):
    """A layer that does one of these."""

    def __init__(self, does: Callable):
        super().__init__(name="odd")
        self.does = does

    def call(self, x):
        """[B, 16] -> the same shape."""
        return self.does(x)

    def compute_output_shape(self, shape):
        """Unchanged."""
        return shape
