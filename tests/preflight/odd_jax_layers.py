"""What people put into a layer on JAX, a line each: some of it no TPU takes. The tests look for these very lines."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np

LARGE = np.zeros((512, 1024), np.float32)  # 2 MiB


def plain(x):
    return x


def eig(x):
    return x + jnp.real(jnp.linalg.eig(jax.lax.stop_gradient(x.T @ x))[0])


def pure_callback(x):
    return x + jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))


def debug_print(x):
    return jax.debug.print("{}", x[0, 0]) or x


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: debug_print(y), x)


def derivative_of_callback(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def python_if(x):
    return x + (1.0 if x[0, 0] > 0 else 2.0)


def boolean_mask(x):
    return x + x[x[:, 0] > 0].sum(axis=0)


def to_numpy(x):
    return x + np.cos(np.asarray(x))


def unseeded(x):
    return x + keras.random.normal(x.shape)


def product_of_int64(x):
    with jax.enable_x64(True):
        whole = x.astype(jnp.int64)
        return x + (whole.T @ whole).sum().astype(x.dtype)


def foreign_variable(x):
    return x * _variable()


def large_constant(x):
    return x + jnp.asarray(LARGE)[:16, 0] * x.sum()


@functools.cache
def _variable() -> keras.Variable:
    return keras.Variable(2.0, name="lonely", trainable=False)


class Odd(keras.layers.Layer):
    """A layer that does one of these."""

    def __init__(self, does):
        super().__init__(name="odd")
        self.does = does

    def call(self, x):
        """[B, 16] -> the same shape."""
        return self.does(x)

    def compute_output_shape(self, shape):
        """Unchanged."""
        return shape
