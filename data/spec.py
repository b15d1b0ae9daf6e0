"""What a model may know of the data: shapes, dtypes, number of classes. Plain Python, imports in no time."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Array:
    """One tensor of an example.

    shape: without the batch dimension, fully static, e.g. (28, 28, 1).
    dtype: a NumPy name, e.g. "uint8".
    """

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Spec:
    """An example as it reaches the device.

    inputs: one `Array` for a dataset with one input, else input name -> `Array`, in the dataset's order.
    label: int32 for classes and other integers, float32 for real numbers.
    num_classes: of a class label; None where the label is not a class.
    """

    inputs: Array | Mapping[str, Array]
    label: Array
    num_classes: int | None
