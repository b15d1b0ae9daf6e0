"""What made a step's loss or gradients NaN or infinite: the layer, and the records.

The step is done again on this machine, eagerly, layer by layer, with the state before it and the very records. Records
are found by halving: those without which the rest of the batch is finite.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainer import backend, internals

# Further ones tell nothing more, and each costs some passes over a part of the batch.
_MAX_RECORDS = 10

Share = tuple[Any, Any]  # (x, y) of one replica
Output = tuple[keras.layers.Layer, Any]  # a layer, and a tensor that it has made


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of the training split: file, and number in it."""

    shard: str
    index: int

    def __str__(self) -> str:
        return f"{self.shard}, record {self.index}"


@dataclasses.dataclass(frozen=True)
class Layers:
    """What a pass over some examples came to.

    first: what went bad first, as "the output of layer dense"; None where all is finite.
    gradients: by variable; empty where the forward pass is all there is (a `train_step` of the model's own).
    """

    first: str | None
    loss: float | None
    gradients: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The post-mortem of a step. `first` and `suspects` as far as they could be found."""

    step: int
    learning_rate: float
    first: str | None
    loss: float | None
    gradient_norms: dict[str, float]  # of the gradients of the global batch, by variable
    suspects: list[Record]
    records: list[Record]  # all of the batch; empty for made-up data

    def to_json(self) -> str:
        """One object; numbers that JSON has no word for as text."""
        values = dataclasses.asdict(self)
        values["loss"] = _number(self.loss)
        values["gradient_norms"] = {name: _number(norm) for name, norm in self.gradient_norms.items()}
        return json.dumps(values, indent=2) + "\n"

    def __str__(self) -> str:
        parts = [f"loss or gradients of step {self.step:,} are not finite (learning rate {self.learning_rate:.3g})."]
        parts.append(f"First to go bad: {self.first}." if self.first else "Done again on this machine it was finite.")
        if self.suspects:
            parts.append(f"Records at fault: {'; '.join(str(record) for record in self.suspects)}.")
        elif self.first and self.records:
            parts.append("No single record does it alone.")
        return " ".join(parts)


def examine(
    model: keras.Model,
    shares: Sequence[Share],
    records: Sequence[Record],
    names: dict[int, str],
    *,
    step: int,
    learning_rate: float,
) -> Finding:
    """Does a step again and looks where it goes bad.

    Args:
        model: a compiled copy outside any strategy, with the state before the step.
        shares: the global batch by replica, since each normalises its own share.
        records: of the rows of the global batch; or none.
        names: id of a layer or variable of `model` -> its name in the model that is trained.
        step, learning_rate: for the report.
    """
    shares = [keras.tree.map_structure(ops.convert_to_tensor, share) for share in shares]
    passes = [_pass(model, share, names) for share in shares]
    first = next((found.first for found in passes if found.first), None)
    losses = [found.loss for found in passes if found.loss is not None]
    gradients = [found.gradients for found in passes]
    means = {name: sum(each[name] for each in gradients) / len(gradients) for name in gradients[0]}
    norms = {name: float(ops.sqrt(ops.sum(ops.square(mean)))) for name, mean in means.items()}
    suspects: list[Record] = []
    rows = 0
    for share, found in zip(shares, passes, strict=True):
        size = int(share[1].shape[0])
        if found.first and records:
            bad = _bad_rows(functools.partial(_is_bad, model, share), np.arange(size))
            suspects += [records[rows + row] for row in bad]
        rows += size
    loss = float(np.mean(losses)) if losses else None
    return Finding(step, learning_rate, first, loss, norms, suspects[:_MAX_RECORDS], list(records))


def _is_bad(model: keras.Model, share: Share, rows: np.ndarray) -> bool:
    part = keras.tree.map_structure(lambda tensor: ops.take(tensor, rows, axis=0), share)
    return _pass(model, part, {}).first is not None


def _bad_rows(is_bad: Callable[[np.ndarray], bool], rows: np.ndarray) -> Iterator[int]:
    """Rows that are bad by themselves, of rows that are bad together; none where it takes several."""
    if len(rows) == 1:
        yield int(rows[0])
        return
    for half in np.array_split(rows, 2):
        if is_bad(half):
            yield from _bad_rows(is_bad, half)


def _pass(model: keras.Model, share: Share, names: dict[int, str]) -> Layers:
    """Forward and, but for a model with a `train_step` of its own, backward. The state of the model stays as it is."""
    x, y = share
    outputs: list[Output] = []
    with keras.StatelessScope(), internals.watching_layers(lambda *of_layer: _note(outputs, *of_layer)):
        model(x, training=True)
    first = _bad_forward(x, outputs, names)
    if internals.overrides(model, "train_step"):
        return Layers(first, None, {})
    weights = model.trainable_variables
    loss, found, of_outputs = _backward(model, share, [tensor for _, tensor in outputs])
    gradients = {names.get(id(w), w.path): g for w, g in zip(weights, found, strict=True) if g is not None}
    if first is None and not np.isfinite(loss):
        first = "the loss, of outputs that are finite"
    if first is None:
        first = _bad_backward(zip(outputs, of_outputs, strict=True), gradients, names)
    return Layers(first, loss, gradients)


def _note(outputs: list[Output], layer: keras.layers.Layer, output: Any) -> None:
    outputs += [(layer, tensor) for tensor in keras.tree.flatten(output) if _is_float(tensor)]


def _backward(model: keras.Model, share: Share, outputs: Sequence[Any]) -> tuple[float, list, list]:
    """Loss, its gradients by the trainable weights and by each of `outputs` of layers, in the order of their calls.

    The latter are the gradients by zeros that are added to the outputs: so it is the same with every backend.
    """
    x, y = share
    variables = model.trainable_variables

    def loss_of(*tensors: Any) -> tuple[Any, None]:
        weights, added = tensors[: len(variables)], iter(tensors[len(variables) :])

        def add(layer: keras.layers.Layer, output: Any) -> Any:
            return keras.tree.map_structure(lambda t: t + next(added) if _is_float(t) else t, output)

        mapping = list(zip(variables, weights, strict=True))
        with keras.StatelessScope(mapping, collect_losses=True), internals.watching_layers(add):
            loss = internals.compute_loss(model, x, y, model(x, training=True))
        return ops.cast(loss, "float32"), None

    weights = [ops.convert_to_tensor(variable.value) for variable in variables]
    zeros = [ops.zeros_like(tensor) for tensor in outputs]
    loss, _, found = backend.part("functions").value_and_gradients(loss_of, [*weights, *zeros])
    gradients = [None if gradient is None else ops.cast(gradient, "float32") for gradient in found]
    return float(loss), gradients[: len(weights)], gradients[len(weights) :]


def _bad_forward(x: Any, outputs: Sequence[Output], names: dict[int, str]) -> str | None:
    bad = [f"the output of layer {_name(layer, names)}" for layer, tensor in outputs if not _is_finite(tensor)]
    given = x if isinstance(x, dict) else {"": x}
    for name, tensor in given.items():
        if _is_float(tensor) and not _is_finite(tensor):
            return ", then ".join([f"the input {name}".rstrip(), *bad[:1]])
    return bad[0] if bad else None


def _bad_backward(outputs: Iterable[tuple], gradients: dict[str, Any], names: dict[int, str]) -> str | None:
    """Backwards from the loss: the first layer whose output has a bad gradient, else the first such variable."""
    for (layer, _), gradient in reversed(list(outputs)):
        if gradient is not None and not _is_finite(gradient):
            return f"the gradient of the output of layer {_name(layer, names)}"
    return next((f"the gradient of {name}" for name, gradient in gradients.items() if not _is_finite(gradient)), None)


def _name(layer: keras.layers.Layer, names: dict[int, str]) -> str:
    return f"{names.get(id(layer), layer.name)} ({type(layer).__name__})"


def _is_float(tensor: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))


def _is_finite(tensor: Any) -> bool:
    return bool(ops.all(ops.isfinite(tensor)))


def _number(value: float | None) -> float | str | None:
    return value if value is None or np.isfinite(value) else str(value)
