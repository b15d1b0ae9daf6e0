"""What a model may know of the data: shapes, dtypes, number of classes. Plain Python, imports in no time."""

import dataclasses
from collections.abc import Mapping

_SHOWN = 4  # inputs that a message names; a table may have hundreds


@dataclasses.dataclass(frozen=True)
class Array:
    """One tensor of an example.

    shape: without the batch dimension, fully static, e.g. (28, 28, 1).
    dtype: a NumPy name, e.g. "uint8".
    below: for whole numbers that stand for categories or tokens: each is in [0, below); 2 for zeros and ones.
    """

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """An example as it reaches the device.

    inputs: one `Array` for a dataset with one input, else input name -> `Array`, in the dataset's order.
    label: int32 for classes and other integers, float32 for real numbers and for zeros and ones of several classes.
    num_classes: of a class label; None where the label is not a class.
    task: what is learned about the label, a name of `trainer.tasks`; "" where none fits, and a model brings a loss.
    """

    inputs: Array | Mapping[str, Array]
    label: Array
    num_classes: int | None
    task: str = "classification"

    @property
    def described(self) -> str:
        """The inputs, for messages: `age () float32, sex () int32`; a single one is called `input`."""
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {"input": self.inputs}
        shown = [f"{name} {array.shape} {array.dtype}" for name, array in [*inputs.items()][:_SHOWN]]
        return ", ".join(shown) + (f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else "")

    @property
    def sequence_length(self) -> int | None:
        """Positions of an example of tokens; None of data that is none."""
        arrays = [self.inputs] if isinstance(self.inputs, Array) else self.inputs.values()
        return next((array.shape[0] for array in arrays if array.below is not None and len(array.shape) == 1), None)
