"""A step of a model lowered to the program that XLA compiles, or what stands in the way, with the user's own line.

TensorFlow lowers it for XLA in general, not for a TPU's set of operations; what only XLA:TPU refuses is found when it
is compiled. In 15 cases the verdicts of the two registries agreed.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer import diagnose, operations, places

INPUT = "input/"  # how names of parameters begin that are data, not state
CONSTANT = "constant/"  # those of tensors that were made outside of the step
FOREIGN = "foreign/"  # and of variables that are none of the run's state
_UNSUPPORTED = re.compile(r"(\w+) \(No registered '\w+' OpKernel[^{]*\{\{node ([^}]+)\}\}")
_NODE_OF_OPERATION = re.compile(r"node `([^`]+)` with op (\w+)")
_NOT_CONSTANT = re.compile(r"Input (\d+) to node .* must be a compile-time constant")
_GRADIENT = "gradient_tape/"
_NODE = re.compile(r"\{\{node ([^}]+)\}\}|node `([^`]+)`")
_NOISE = re.compile(r"^Failed getting HLO text: '?|\s*\[\[.*|tf2xla conversion failed.*|\(No registered.*", re.DOTALL)
_REASON_CHARS = 300


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why a step cannot be compiled.

    operation: type of TensorFlow's operation, "" where it is none.
    node: its name, which tells the layer; "" where there is none.
    place: the user's own line, `file:line (text)`; "" where none is known.
    reason: in a line.
    instead: what to do, a sentence without its full stop.
    """

    operation: str
    node: str
    place: str
    reason: str
    instead: str

    def is_like(self, other: "Obstacle") -> bool:
        """Whether another step fails on the same: nodes are called differently in each."""
        return (self.place, self.operation, self.reason) == (other.place, other.operation, other.reason)

    def __str__(self) -> str:
        what = f"{self.operation} of {self.node}: " if self.operation else ""
        where = f" At {self.place}." if self.place else ""
        return f"{what}{self.reason}.{where} {self.instead}"


class LoweringError(Exception):
    """Raised with the `Obstacle`."""

    def __init__(self, obstacle: Obstacle):
        super().__init__(str(obstacle))
        self.obstacle = obstacle


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program for one replica.

    hlo: serialized HloModuleProto.
    parameters: names in the order of the program's parameters: `input/0`, ..., then names of `Replicated.variables`,
        `foreign/NAME` of other variables and `constant/NAME` of tensors.
    """

    hlo: bytes
    parameters: tuple[str, ...]
    graph: tf.Graph

    def foreign(self) -> dict[str, str]:
        """The variables that the step uses and no checkpoint of the run has -> the user's line that uses each."""
        captured = self.graph.internal_captures
        found = zip(self.parameters[-len(captured) :], captured, strict=True)
        return {n.removeprefix(FOREIGN): _place_of_use(tensor) for n, tensor in found if n.startswith(FOREIGN)}

    def obstacle(self, reason: str, name: str | None, kind: str | None) -> Obstacle | None:
        """What the compiler refuses, in TensorFlow's words; None where that cannot be told.

        Args:
            reason: the compiler's.
            name: of the operation in TensorFlow's graph, where the compiler knows it.
            kind: of XLA's operation, such as `fft`; the first of TensorFlow's that is called alike is taken for it.
        """
        alike = (operation.name for operation in self.graph.get_operations() if operation.type.lower() == kind)
        name = name or next(alike, None)
        if name is None:
            return None
        operation = _type(self.graph, name)
        return Obstacle(operation, name, _place(self.graph, name), reason, operations.instead_of(operation))


def lower(step: Callable, specs: Sequence[Any], variables: Mapping[str, tf.Variable]) -> Lowered:
    """Lowers a function of one replica.

    Args:
        step: called with `specs` as symbolic tensors.
        specs: nested structures of `tf.TensorSpec`, fully static, one for each argument.
        variables: the state of the run, by name.

    Raises:
        LoweringError: it cannot be traced, or not be compiled by XLA.
    """

    def flat_step(*tensors: tf.Tensor) -> Any:  # the compiler's text is to be had for flat arguments only
        return step(*tf.nest.pack_sequence_as(list(specs), tensors))

    flat = tf.nest.flatten(list(specs))
    function = tf.function(flat_step, jit_compile=True, autograph=False)
    try:
        concrete = function.get_concrete_function(*flat)
    except Exception as error:  # whatever the user's code raises
        raise LoweringError(untraceable(error)) from error
    graph = concrete.graph
    captured = [*_captured(graph, concrete.captured_inputs, variables)]
    try:
        hlo = function.experimental_get_compiler_ir(*flat)(stage="hlo_serialized")
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise LoweringError(_refused(str(error), graph)) from error
    return Lowered(hlo, (*(f"{INPUT}{index}" for index, _ in enumerate(flat)), *captured), graph)


def _captured(graph: tf.Graph, tensors: Sequence[Any], variables: Mapping[str, tf.Variable]) -> Iterator[str]:
    """Names of what a step takes from outside of it, beside its arguments."""
    names = {id(variable.handle): f"{FOREIGN}{variable.name.removesuffix(':0')}" for variable in graph.variables}
    names |= {id(variable.handle): name for name, variable in variables.items()}
    for inside, tensor in zip(graph.internal_captures, tensors, strict=True):
        name = names.get(id(tensor))
        if name is None and inside.dtype in (tf.resource, tf.variant):
            raise LoweringError(_foreign(inside))
        yield name or f"{CONSTANT}{inside.op.name}"


def untraceable(error: BaseException) -> Obstacle:
    """Of an exception that user code raised while a model was built or traced."""
    *_, cause = places.chain(error)
    reason = f"{type(cause).__name__}: {diagnose.short(cause)}".rstrip(".")
    place = _quoted(places.of_error(error))
    known = diagnose.find(error)
    instead = known.remedy if known else "It would not train on any hardware either"
    return Obstacle("", "", place, f"the step cannot be traced: {reason}", instead)


def _foreign(tensor: tf.Tensor) -> Obstacle:
    """A resource that is no variable: a table, a dataset."""
    user = _user(tensor)
    reason = "it uses a resource of the host that is no variable"
    return Obstacle(user.type, user.name, _place_of_use(tensor), reason, operations.instead_of(user.type))


def _user(tensor: tf.Tensor) -> tf.Operation:
    return next(iter(tensor.consumers()), tensor.op)


def _place_of_use(tensor: tf.Tensor) -> str:
    return places.of_operation(_user(tensor))


def _refused(text: str, graph: tf.Graph) -> Obstacle:
    operation, node = "", ""
    if found := _UNSUPPORTED.search(text):
        operation, node = found.groups()
        reason = "XLA has no such operation"
    else:
        if found := _NODE_OF_OPERATION.search(text):
            node, operation = found.groups()
        elif found := _NODE.search(text):
            node = found[1] or found[2]
        operation = operation or _type(graph, node)
        reason = _line(_NOISE.sub("", text)).rstrip(".'")
        if found := _NOT_CONSTANT.search(text):
            reason = f"its input {found[1]} must be a constant when it is compiled"
    place = _place(graph, node) or _quoted(places.innermost(places.named_in(text)))
    return Obstacle(operation, node, place, reason, operations.instead_of(operation))


def _type(graph: tf.Graph, node: str) -> str:
    return next((operation.type for operation in graph.get_operations() if operation.name == node), "")


def _place(graph: tf.Graph, name: str) -> str:
    """The user's line behind an operation; that of the forward pass for one of its gradient."""
    name = name.removeprefix(_GRADIENT)
    operations_of_graph = graph.get_operations()
    while name:
        made = [o for o in operations_of_graph if o.name == name or o.name.startswith(f"{name}/")]
        if made and (place := places.of_operation(made[0])):
            return place
        name = name.rpartition("/")[0]
    return ""


def _quoted(place: places.Place | None) -> str:
    return place.quoted() if place else ""


def _line(text: str) -> str:
    """The first paragraph in one line."""
    return " ".join(text.strip().split("\n\n")[0].split())[:_REASON_CHARS]
