"""A step lowered to HLO by TensorFlow: see `trainer.lowered`.

TensorFlow lowers it for XLA in general, not for a TPU's set of operations; what only XLA:TPU refuses is found when it
is compiled. In 15 cases the verdicts of the two registries agreed.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer import operations, places
from trainer.backends.tensorflow.cluster import StrategyCluster
from trainer.backends.tensorflow.engine import Engine
from trainer.backends.tensorflow.stand_in import StandInStrategy
from trainer.lowered import CONSTANT, FOREIGN, INPUT, Lowered, LoweringError, Obstacle, about_foreign, untraceable

_UNSUPPORTED = re.compile(r"(\w+) \(No registered '\w+' OpKernel[^{]*\{\{node ([^}]+)\}\}")
_NODE_OF_OPERATION = re.compile(r"node `([^`]+)` with op (\w+)")
_NOT_CONSTANT = re.compile(r"Input (\d+) to node .* must be a compile-time constant")
_GRADIENT = "gradient_tape/"
_NODE = re.compile(r"\{\{node ([^}]+)\}\}|node `([^`]+)`")
_NOISE = re.compile(r"^Failed getting HLO text: '?|\s*\[\[.*|tf2xla conversion failed.*|\(No registered.*", re.DOTALL)
_REASON_CHARS = 300


@dataclasses.dataclass(frozen=True)
class LoweredGraph(Lowered):
    """A program for one replica: a serialized HloModuleProto."""

    graph: tf.Graph

    def remarks(self) -> list[str]:
        captured = self.graph.internal_captures
        found = zip(self.parameters[-len(captured) :], captured, strict=True)
        foreign = [(name.removeprefix(FOREIGN), tensor) for name, tensor in found if name.startswith(FOREIGN)]
        return [about_foreign(name, _place_of_use(tensor)) for name, tensor in foreign]

    def obstacle(self, reason: str, name: str | None, kind: str | None) -> Obstacle | None:
        alike = (operation.name for operation in self.graph.get_operations() if operation.type.lower() == kind)
        name = name or next(alike, None)
        if name is None:
            return None
        operation = _type(self.graph, name)
        return Obstacle(operation, name, _place(self.graph, name), reason, operations.instead_of(operation))


def cluster_of(num_replicas: int) -> StrategyCluster:
    """A slice of a TPU with that many replicas."""
    description = f"{num_replicas} replicas of a TPU"
    return StrategyCluster(
        strategy=StandInStrategy(num_replicas), kind="tpu", num_replicas=num_replicas, description=description
    )


def train_step(engine: Engine, variables: Mapping[str, Any], data: tuple) -> LoweredGraph:
    """A step of training, as one of the replicas runs it."""
    return _on_replica(engine, variables, engine.train_step, data)


def test_step(engine: Engine, variables: Mapping[str, Any], data: tuple) -> LoweredGraph:
    """One of evaluation."""
    return _on_replica(engine, variables, engine.test_step, data)


def function(engine: Engine, variables: Mapping[str, Any], serve: Callable[..., Any], data: tuple) -> LoweredGraph:
    """What an export serves."""
    return _on_replica(engine, variables, lambda data: serve(*data), data)


def _on_replica(engine: Engine, variables: Mapping[str, Any], step: Callable[[Any], Any], data: tuple) -> LoweredGraph:
    """Lowers `step` as one of the replicas would run it."""
    specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), data)

    def on_replica(*data: Any) -> Any:
        return engine.strategy.run(step, args=(data,))

    with engine.tracing():
        return lower(on_replica, specs, engine.handles(variables))


def lower(step: Callable, specs: Sequence[Any], variables: Mapping[str, tf.Variable]) -> LoweredGraph:
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
    return LoweredGraph(hlo, (*(f"{INPUT}{index}" for index, _ in enumerate(flat)), *captured), graph)


def _captured(graph: tf.Graph, tensors: Sequence[Any], variables: Mapping[str, tf.Variable]) -> Iterator[str]:
    """Names of what a step takes from outside of it, beside its arguments."""
    names = {id(variable.handle): f"{FOREIGN}{variable.name.removesuffix(':0')}" for variable in graph.variables}
    names |= {id(variable.handle): name for name, variable in variables.items()}
    for inside, tensor in zip(graph.internal_captures, tensors, strict=True):
        name = names.get(id(tensor))
        if name is None and inside.dtype in (tf.resource, tf.variant):
            raise LoweringError(_foreign(inside))
        yield name or f"{CONSTANT}{inside.op.name}"


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
