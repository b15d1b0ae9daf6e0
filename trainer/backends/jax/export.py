"""A function of a model as a SavedModel: a program of JAX within a graph of TensorFlow.

Keras' own archive assigns to the model's state at every call that is served, converts for the devices of this machine
only, and asks jax2tf for what is deprecated. What it does beside is here: variables that TensorFlow knows, the function
of them that jax2tf converts, a signature.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import tensorflow as tf
from jax.experimental import jax2tf

from trainer import diagnose
from trainer.backends.jax import internals
from trainer.errors import ConfigError

# Whatever trained it: a TPU is seldom what serves.
_PLATFORMS = ("cpu", "cuda", "tpu")
_BATCH = "batch"


def write(model: keras.Model, serve: Callable, signature: Sequence[tf.TensorSpec], directory: str) -> None:
    """Writes `serve`, which calls `model`, to `directory`, as the signature `serving_default`.

    Raises:
        ConfigError: the model cannot be traced for a batch size that is not known.
    """
    variables = model.variables

    def function(values: Sequence[Any], *tensors: Any) -> dict[str, Any]:
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return serve(*tensors)

    shapes = [", ".join(_BATCH if size is None else str(size) for size in spec.shape) for spec in signature]
    converted = jax2tf.convert(
        function,
        polymorphic_shapes=[None, *(f"({shape})" for shape in shapes)],
        native_serialization_platforms=_PLATFORMS,
        with_gradient=False,
    )
    held = [tf.Variable(keras.ops.convert_to_numpy(v.value), name=v.path, trainable=False) for v in variables]
    served = tf.function(
        lambda *tensors: converted(list(held), *tensors), input_signature=list(signature), autograph=False
    )
    try:
        with internals.portable_attention():
            traced = served.get_concrete_function()
    except (jax.errors.InconclusiveDimensionOperation, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"JAX cannot export {model.name} for any platform and batch size: {diagnose.short(error)}. Nothing of the "
            "run is lost: --mode=export --backend=tensorflow exports its checkpoint"
        ) from error
    # Under the name that Keras' own archive has for them, for who loads it to look at.
    module = tf.train.Checkpoint(variables=held)
    tf.saved_model.save(module, directory, signatures={"serving_default": traced})
