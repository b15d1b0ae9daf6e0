"""A multilayer perceptron over everything an example holds."""

import dataclasses
from collections.abc import Mapping

import keras

from data.spec import Array, Spec
from trainer.models import _inputs


@dataclasses.dataclass(frozen=True)
class Options:
    """units: width of each hidden layer; dropout: rate after each; l2: factor of the kernels' L2 loss."""

    units: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    l2: float = 0.0


def build(options: Options, spec: Spec) -> keras.Model:
    """Inputs of any number and shape -> [B, num_classes] float32 logits."""
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {"image": spec.inputs}
    inputs = {name: keras.Input(array.shape, dtype=array.dtype, name=name) for name, array in arrays.items()}
    flat = [keras.layers.Flatten()(_inputs.normalised(inputs[name], array)) for name, array in arrays.items()]
    x = flat[0] if len(flat) == 1 else keras.layers.Concatenate()(flat)  # [B, D]
    for units in options.units:
        regularizer = keras.regularizers.L2(options.l2) if options.l2 else None
        x = keras.layers.Dense(units, activation="relu", kernel_regularizer=regularizer)(x)
        if options.dropout:
            x = keras.layers.Dropout(options.dropout)(x)
    single = isinstance(spec.inputs, Array)
    return keras.Model(next(iter(inputs.values())) if single else inputs, _inputs.logits(x, spec), name="mlp")
