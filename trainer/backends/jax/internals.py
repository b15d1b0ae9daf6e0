"""Every name that JAX, and Keras for it alone, keep private; all else of Keras is in `trainer.internals`.

`tests/backends/test_jax_internals.py` names what has moved when a version changes. The supported ranges stand in
setup.cfg.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
from keras.src.backend.jax import nn as keras_nn
from keras.src.random import seed_generator as keras_seed_generator

from trainer import internals as keras_internals
from trainer import places
from trainer.errors import ConfigError

# The axis of the mesh along which replicas are.
REPLICAS = "replica"

# From the gradients of a replica to those of the global batch.
Exchange = Callable[[Sequence], list]


def before_apply(optimizer: keras.optimizers.Optimizer, exchange: Exchange) -> None:
    """Gives the optimizer what `exchange` makes of the gradients of a replica, before it clips or checks anything.

    `exchange` sees the optimizer's variables as they are in the step.
    """
    apply = optimizer.stateless_apply

    def exchanged(optimizer_variables: Sequence, grads: Sequence, trainable_variables: Sequence) -> Any:
        with keras.StatelessScope(list(zip(optimizer.variables, optimizer_variables, strict=True))):
            means = exchange(grads)
        return apply(optimizer_variables, means, trainable_variables)

    optimizer.stateless_apply = exchanged


@contextlib.contextmanager
def as_one_of(num_replicas: int) -> Iterator[None]:
    """While a step is traced, each replica draws random numbers of its own, and synchronized batch norm exchanges.

    As on TensorFlow. The stored random state stays the same on all replicas and moves on as ever; only what is drawn
    from it depends on the replica.
    """
    generator, moments = keras_seed_generator.SeedGenerator, keras_nn.moments
    following = generator.next

    def next_of_replica(self: Any, ordered: bool = True) -> jax.Array:
        return jax.random.fold_in(following(self, ordered), jax.lax.axis_index(REPLICAS))  # [2] uint32, a raw key

    def moments_of_all(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> tuple:
        mean, variance = moments(x, axes, keepdims)
        if not synchronized:
            return mean, variance
        mean_of_all, square = jax.lax.pmean((mean, variance + mean**2), REPLICAS)
        return mean_of_all, square - mean_of_all**2

    if num_replicas > 1:
        generator.next = next_of_replica
    keras_nn.moments = moments_of_all
    try:
        yield
    finally:
        generator.next, keras_nn.moments = following, moments


@contextlib.contextmanager
def whole_errors() -> Iterator[None]:
    """Where errors of JAX' own classes come out of layers as they are.

    Keras 3.15 makes every error anew, with the arguments of the layer in its text. For these that fails, and what is
    told is an AttributeError of Keras, without the user's line.
    """
    filtered = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtered:
            keras.config.enable_traceback_filtering()


@contextlib.contextmanager
def noting_foreign_reads() -> Iterator[dict[str, str]]:
    """While a step is traced: paths of variables that it reads and is not handed -> the user's line that reads each.

    What they hold then is part of the program, and what is assigned to them is lost.
    """
    foreign: dict[str, str] = {}
    current = keras.StatelessScope.get_current_value

    def noted(self: keras.StatelessScope, variable: keras.Variable) -> Any:
        value = current(self, variable)
        if value is None:
            foreign.setdefault(variable.path, places.users_line())
        return value

    keras.StatelessScope.get_current_value = noted
    try:
        yield foreign
    finally:
        keras.StatelessScope.get_current_value = current


def check_steps(model: keras.Model) -> None:
    """Raises ConfigError for a `train_step` or `test_step` of the model's own that is not written for JAX.

    And for a second optimizer: the state that Keras hands a `train_step` there holds that of `model.optimizer` alone.
    """
    names = [optimizer.name for optimizer in keras_internals.optimizers(model)]
    if len(names) > 1:
        raise ConfigError(
            f"Keras on JAX trains a model by one optimizer. Received: {', '.join(names)}. Use --backend=tensorflow"
        )
    for method in ("train_step", "test_step"):
        given = list(inspect.signature(getattr(model, method)).parameters)
        if len(given) == 1:
            raise ConfigError(
                f"the {method} of {type(model).__name__} is written for TensorFlow: on JAX Keras calls "
                f"{method}(state, data), which returns (logs, state). Received: {method}({', '.join(given)}). Write it "
                "so, leave it to Keras and write compute_loss, or use --backend=tensorflow"
            )


@contextlib.contextmanager
def portable_attention() -> Iterator[None]:
    """Where attention is traced for any platform. Keras would choose the kernels of the device that is here."""
    chosen = keras_nn._can_use_flash_attention
    keras_nn._can_use_flash_attention = lambda *args, **kwargs: False
    try:
        yield
    finally:
        keras_nn._can_use_flash_attention = chosen
