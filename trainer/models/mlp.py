"""A multilayer perceptron over everything an example holds: columns of a table, vectors, small images."""

import dataclasses
from collections.abc import Mapping

import keras

from data.spec import Array, Spec
from trainer.models import _inputs

# fastai's rule for the embedding of a category, found by trials on tables: min(600, round(1.6 n^0.56)) for n values.
# https://github.com/fastai/fastai/blob/master/fastai/tabular/model.py
EMBEDDING_FACTOR, EMBEDDING_POWER, EMBEDDING_MAX = 1.6, 0.56, 600


@dataclasses.dataclass(frozen=True)
class Options:
    """units: width of each hidden layer; dropout: rate after each; l2: factor of the kernels' L2 loss."""

    units: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    l2: float = 0.0


def build(options: Options, spec: Spec) -> keras.Model:
    """Inputs of any number and shape -> [B, num_outputs of the task] float32.

    Categories are embedded, numbers normalised by mean and variance of the training data (see `trainer/adapting.py`),
    arrays of uint8 scaled to 0..1.
    """
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {"image": spec.inputs}
    inputs = {name: keras.Input(array.shape, dtype=array.dtype, name=name) for name, array in arrays.items()}
    # In float32: of 2,026 and 2,027, bfloat16 makes the same number. All at once, for a table has many columns.
    numbers = [_flat(inputs[name], "float32") for name, array in arrays.items() if _is_number(array)]
    others = [_flat(_prepared(name, inputs[name], array)) for name, array in arrays.items() if not _is_number(array)]
    if numbers:
        others.insert(0, keras.layers.Normalization(dtype="float32", name="numbers")(_joined(numbers, "float32")))
    x = _joined(others)  # [B, D]
    for units in options.units:
        regularizer = keras.regularizers.L2(options.l2) if options.l2 else None
        x = keras.layers.Dense(units, activation="relu", kernel_regularizer=regularizer)(x)
        if options.dropout:
            x = keras.layers.Dropout(options.dropout)(x)
    single = isinstance(spec.inputs, Array)
    return keras.Model(next(iter(inputs.values())) if single else inputs, _inputs.logits(x, spec), name="mlp")


def embedding_size(num_values: int) -> int:
    """Width of the embedding of a category with so many values."""
    return min(EMBEDDING_MAX, round(EMBEDDING_FACTOR * num_values**EMBEDDING_POWER))


def _is_number(array: Array) -> bool:
    """A quantity, of which nothing is known but the data; a scalar of uint8 is one too: false or true of a table."""
    return array.below is None and not (array.dtype == "uint8" and array.shape)


def _prepared(name: str, tensor: keras.KerasTensor, array: Array) -> keras.KerasTensor:
    """An embedded category [B, *shape, E], or bytes scaled to 0..1."""
    if array.below is None:
        return _inputs.normalised(tensor, array)
    return keras.layers.Embedding(array.below, embedding_size(array.below), name=f"{name}_embedding")(tensor)


def _flat(tensor: keras.KerasTensor, dtype: str | None = None) -> keras.KerasTensor:
    """[B, ...] -> [B, D]; [B] -> [B, 1]. Computed in `dtype`, or as the policy says."""
    return keras.layers.Flatten(dtype=dtype)(tensor)


def _joined(tensors: list[keras.KerasTensor], dtype: str | None = None) -> keras.KerasTensor:
    """[B, D] each -> [B, sum of D]."""
    return tensors[0] if len(tensors) == 1 else keras.layers.Concatenate(dtype=dtype)(tensors)
