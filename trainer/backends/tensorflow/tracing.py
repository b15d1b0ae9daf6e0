"""What TensorFlow's graph of a function says of its operations: which a TPU takes badly, and which layer made them."""

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer import operations, places

_HALVES = ("bfloat16", "float16")
_SOFTMAX = ("Softmax", "LogSoftmax")
_WIDE = (tf.float64, tf.complex128, tf.int64)
_LARGE = 1024  # elements of an int64 tensor that cost something: an index or a counter does not
_NOT_ON_DEVICE = (tf.resource, tf.variant)
_GIVEN = ("Const", "Placeholder")


class Tracing:
    """A function, traced as a graph while layers take turns.

    Args:
        first: name of the layer that runs at the beginning.
    """

    def __init__(self, first: str):
        self._begins = [0]  # number of operations from which on the layer beside it runs
        self._layers = [first]

    def run(self, function: Callable, *symbolic: Any) -> None:
        """Traces `function` of tensors like these of Keras."""
        specs = keras.tree.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), symbolic)
        self._graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph

    def turn(self, layer: str) -> None:
        """The layer of this name runs from now on."""
        self._begins.append(len(tf.compat.v1.get_default_graph().get_operations()))
        self._layers.append(layer)

    def remarks(self) -> Iterator[tuple[str, str, str]]:
        """Of what a TPU takes badly: layer, what it is, and the user's line, "" where none is known."""
        traced = self._graph.get_operations()
        for index, operation in enumerate(traced):
            if what := _about_operation(operation):
                yield self._layer_of(index), what, places.of_operation(operation)
        callers = _callers(self._graph)
        for function in self._graph.as_graph_def().library.function:
            caller = callers.get(function.signature.name, 0)
            for node in function.node_def:
                if operations.is_never_compiled(node.op):
                    yield self._layer_of(caller), _never(node.op), places.of_operation(traced[caller])

    def _layer_of(self, index: int) -> str:
        """Name of the layer that made an operation, by its place among all."""
        return self._layers[bisect.bisect_right(self._begins, index) - 1]


def _callers(graph: tf.Graph) -> dict[str, int]:
    """Name of each function within a graph (bodies of loops, branches) -> index of the operation it runs in."""
    library = {function.signature.name: function.node_def for function in graph.as_graph_def().library.function}
    callers: dict[str, int] = {}

    def call(node: Any, index: int) -> None:
        for value in node.attr.values():
            for name in (value.func.name, *(function.name for function in value.list.func)):
                if name in library and name not in callers:
                    callers[name] = index
                    for inner in library[name]:
                        call(inner, index)

    for index, operation in enumerate(graph.get_operations()):
        call(operation.node_def, index)
    return callers


def _about_operation(operation: tf.Operation) -> str:
    """What a TPU takes badly about an operation, where it begins with this one."""
    if operations.is_never_compiled(operation.type):
        return _never(operation.type)
    if operation.type in _SOFTMAX and operation.outputs[0].dtype.name in _HALVES:
        dtype = operation.outputs[0].dtype.name
        return f"softmax in {dtype}: sums of many small numbers lose digits; compute it in float32"
    if operation.type in _GIVEN:
        return ""
    inputs = _on_device(tensor for tensor in operation.inputs if tensor.op.type != "Const")
    outputs = _on_device(operation.outputs)
    if any(not t.shape.is_fully_defined() for t in outputs) and all(t.shape.is_fully_defined() for t in inputs):
        return f"a shape that depends on values ({operation.type}): XLA takes the largest, or refuses what follows"
    for tensor in outputs:
        begins = tensor.dtype in _WIDE and all(t.dtype != tensor.dtype for t in inputs)
        if begins and (tensor.dtype != tf.int64 or _is_large_of_the_users(tensor)):
            return f"{tensor.dtype.name} ({operation.type}): TPUs have 32 bits, more are emulated or refused"
    return ""


def _is_large_of_the_users(tensor: tf.Tensor) -> bool:
    """Of int64 tensors those that cost something and that the user can change: Keras makes its labels int64."""
    return (tensor.shape.num_elements() or _LARGE) >= _LARGE and bool(places.of_operation(tensor.op))


def _never(operation: str) -> str:
    return f"{operation} cannot be compiled. {operations.instead_of(operation)}"


def _on_device(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    return [tensor for tensor in tensors if tensor.dtype not in _NOT_ON_DEVICE]
