"""What of a model a TPU takes badly, told before it runs: looked up in its layers and in the graph of a training step's
forward pass, on this machine, without a compiler.

What cannot be compiled at all is told here too, as far as the type of an operation says so; the compiler has the last
word (`--mode=preflight`). Tiles: https://docs.cloud.google.com/tpu/docs/performance-guide
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from trainer import backend, internals

# A matrix unit multiplies tiles of this many inputs by as many outputs; what does not fill them is filled with zeros.
_LANES = 128
_ROWS = 8  # of examples in a tile
_WORTH_A_LINE = 0.05  # of all multiplications of the model: a layer that wastes less is not named
_TINY = 1e9  # multiplications a step, with the padding: some microseconds, where padding is not what takes the time
_NAMED = 3  # layers of one and the same remark
_HALVES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Remark:
    """One thing to look at.

    layer: its name.
    place: the user's own line, "" where none is known.
    """

    layer: str
    what: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}" + (f". At {self.place}" if self.place else "")


def lint(model: keras.Model, batch_spec: tuple) -> list[Remark]:
    """Looks over a model that has been built and compiled, for one replica's batch `(x, y)` of `keras.KerasTensor`."""
    traced = _Traced(model, *batch_spec)
    found = [*_about_inputs(batch_spec), *_about_layers(model), *_about_outputs(traced), *_about_padding(traced)]
    batch = keras.tree.flatten(batch_spec[0])[0].shape[0]
    if batch % _ROWS:
        found.append(Remark("batch", f"{batch:,} examples a replica do not fill tiles of {_ROWS}"))
    return list(dict.fromkeys(found))


def grouped(remarks: Sequence[Remark]) -> list[str]:
    """A line for each thing to look at, with the layers it is about."""
    layers: dict[tuple[str, str], list[str]] = {}
    for remark in remarks:
        layers.setdefault((remark.what, remark.place), []).append(remark.layer)
    lines = []
    for (what, place), names in layers.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(str(Remark(", ".join(names[:_NAMED]) + more, what, place)))
    return lines


class _Traced:
    """The forward pass of a training step, traced: what each layer makes, and what the backend says of it."""

    def __init__(self, model: keras.Model, x: Any, y: Any):
        self.model = model
        self.outputs: list[tuple[keras.layers.Layer, Any]] = []  # of each call of a layer, in their order
        self.tracing = backend.part("tracing").Tracing(model.name)
        running = [model.name]

        def begin(layer: keras.layers.Layer) -> None:
            running.append(layer.name)
            self.tracing.turn(layer.name)

        def end(layer: keras.layers.Layer, output: Any) -> None:
            self.outputs.append((layer, output))
            running.pop()
            self.tracing.turn(running[-1])

        def forward(x: Any, y: Any) -> Any:
            # Nothing is assigned: statistics and random state would need a replica.
            with keras.StatelessScope(), internals.watching_layers(end, begin=begin, nested=True):
                predicted = model(x, training=True)
                if not internals.overrides(model, "train_step"):
                    internals.compute_loss(model, x, y, predicted)
            return predicted

        self.tracing.run(forward, x, y)


def _about_inputs(batch_spec: tuple) -> Iterator[Remark]:
    for tensor in keras.tree.flatten(batch_spec):
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            yield Remark(tensor.name, "a string: XLA knows none. Turn it into ids in the input pipeline")
        elif dtype in ("float64", "int64"):
            yield Remark(tensor.name, f"{dtype} crosses to the device, where 32 bits are native")


def _about_layers(model: keras.Model) -> Iterator[Remark]:
    for layer in internals.layers(model):
        if not getattr(layer, "supports_jit", True):
            yield Remark(layer.name, "Keras says that XLA cannot compile this layer (supports_jit=False)")
        if hasattr(layer, "kernel") and getattr(layer, "groups", 1) not in (None, 1):
            yield Remark(layer.name, "a convolution in groups: each fills the matrix unit with its own channels only")


def _about_outputs(traced: _Traced) -> Iterator[Remark]:
    yield from (Remark(*said) for said in traced.tracing.remarks())
    for layer, output in traced.outputs:
        if layer is traced.model:
            yield from _about_predictions(traced, output)


def _about_predictions(traced: _Traced, predicted: Any) -> Iterator[Remark]:
    """Of logits in half precision the loss is computed in float32, but from what they have lost."""
    for tensor in keras.tree.flatten(predicted):
        if (dtype := keras.backend.standardize_dtype(tensor.dtype)) in _HALVES:
            made = [layer.name for layer, output in traced.outputs if output is tensor and layer is not traced.model]
            name = made[0] if made else traced.model.name
            yield Remark(name, f"the loss is computed from {dtype}; give the last layer dtype='float32'")


def _about_padding(traced: _Traced) -> Iterator[Remark]:
    """Layers that multiply mostly zeros, where that is a good part of what the model multiplies."""
    sizes: dict[str, tuple[int, int, str]] = {}
    for layer, output in traced.outputs:
        if (size := _multiplied(layer, output)) is not None:
            rows, inputs, outputs = size
            used = rows * inputs * outputs
            padded = rows * _tiled(inputs) * _tiled(outputs)
            before = sizes.get(layer.name, (0, 0, ""))
            sizes[layer.name] = (before[0] + used, before[1] + padded, f"{inputs:,} inputs x {outputs:,} outputs")
    total = sum(padded for _, padded, _ in sizes.values())
    for name, (used, padded, shape) in sizes.items():
        if total >= _TINY and padded - used >= _WORTH_A_LINE * total:
            yield Remark(
                name,
                f"{shape} fill tiles of {_LANES} x {_LANES} to {used / padded:.1%} at best: {1 - used / padded:.0%} of "
                f"its multiplications are by zeros, {(padded - used) / total:.0%} of the model's. Prefer multiples of "
                f"{_LANES}",
            )


def _multiplied(layer: keras.layers.Layer, output: Any) -> tuple[int, int, int] | None:
    """(rows, inputs, outputs) of the matrix product that a layer is; None for those that are none."""
    kernel = getattr(layer, "kernel", None)
    if kernel is None or not ops.is_tensor(output) or "Depthwise" in type(layer).__name__:
        return None
    shape = tuple(kernel.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        _, _, after = layer.equation.replace("...", "").partition("->")
        letters = layer.equation.replace("...", "").partition("->")[0].partition(",")[2]
        kept = math.prod(size for letter, size in zip(letters, shape, strict=True) if letter in after)
        contracted = math.prod(shape) // kept
        return math.prod(output.shape) // kept, contracted, kept
    *window, channels, outputs = shape
    return math.prod(output.shape) // output.shape[-1], math.prod(window) * channels, outputs


def _tiled(size: int) -> int:
    return math.ceil(size / _LANES) * _LANES
