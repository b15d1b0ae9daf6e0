"""A step lowered to StableHLO by JAX, of all replicas as one program: see `trainer.lowered`.

JAX lowers for TPUs on any machine; what only XLA:TPU refuses is found when it is compiled.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import keras
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from trainer import operations, places
from trainer.backends.jax import internals as own_internals
from trainer.backends.jax.cluster import MeshCluster
from trainer.backends.jax.engine import Engine
from trainer.backends.jax.internals import REPLICAS
from trainer.backends.jax.state import SHARES
from trainer.lowered import INPUT, Lowered, LoweringError, Obstacle, about_foreign, untraceable
from trainer.replicated import MODEL

_MIB = 2**20
_LARGE = _MIB  # bytes of a constant that is worth a line
_TPU = "tpu"
LINES = "jax_traceback_in_locations_limit"
# Primitives that call Python on the host.
_ON_HOST = re.compile(r"(pure|io|debug)_callback|debug_print")
_NO_RULE = re.compile(r"MLIR translation rule for primitive '(\w+)' not found")


@dataclasses.dataclass(frozen=True)
class Equation:
    """An operation of a traced step.

    primitive: what JAX calls it. node: the layers it is within, outermost first, and its primitive. traceback: of where
    it was made.
    """

    primitive: str
    node: str
    traceback: Any

    def likeness(self, name: str) -> int:
        """How much of its node is in `name`, which the compiler has from JAX too, with other parts in it."""
        return len(set(self.node.split("/")) & set(name.split("/")))

    def obstacle(self, reason: str) -> Obstacle:
        """It keeps the step from being compiled."""
        frames = reversed(self.traceback.frames) if self.traceback else ()  # from the innermost on
        place = places.innermost((frame.file_name, frame.line_num) for frame in frames)
        where = place.quoted() if place else ""
        return Obstacle(self.primitive, self.node, where, reason, operations.instead_of(self.primitive))


@dataclasses.dataclass(frozen=True)
class LoweredJaxpr(Lowered):
    """A program of all replicas: a portable artifact of StableHLO, partitioned over a mesh.

    foreign: variables that the step reads and the engine does not hand it -> the user's line.
    """

    jaxpr: ClosedJaxpr
    foreign: Mapping[str, str]

    def remarks(self) -> list[str]:
        found = [about_foreign(name, place) for name, place in self.foreign.items()]
        large = [constant for constant in _constants(self.jaxpr) if constant.nbytes >= _LARGE]
        return found + [
            f"a constant {constant.dtype}{list(constant.shape)} of {constant.nbytes / _MIB:,.1f} MiB, made outside of "
            "the step, is part of the program: no step changes it, and each device keeps it"
            for constant in large
        ]

    def obstacle(self, reason: str, name: str | None, kind: str | None) -> Obstacle | None:
        found = list(_equations(self.jaxpr.jaxpr))
        if name is not None:
            primitive = name.rpartition("/")[2]
            alike = [equation for equation in found if equation.primitive == primitive]
            if alike:
                return max(alike, key=lambda equation: equation.likeness(name)).obstacle(reason)
        return next((e.obstacle(reason) for e in found if kind and e.primitive.startswith(kind)), None)


def cluster_of(num_replicas: int) -> MeshCluster:
    """A slice of a TPU with that many replicas; call it first, before anything asks JAX for devices."""
    jax.config.update("jax_platforms", "cpu")  # variables are made here, whatever else this machine has
    outline: Any = AbstractMesh((num_replicas,), (REPLICAS,))
    return MeshCluster(
        mesh=outline, kind="tpu", num_replicas=num_replicas, description=f"{num_replicas} replicas of a TPU"
    )


def train_step(engine: Engine, variables: Mapping[str, Any], data: tuple) -> LoweredJaxpr:
    """A step of training, of all replicas."""
    state, names = _state(engine, variables)
    return _on_mesh(engine, engine.train_program, (state, _batch(engine, data)), (names, _inputs(data)))


def test_step(engine: Engine, variables: Mapping[str, Any], data: tuple) -> LoweredJaxpr:
    """One of evaluation."""
    state, names = _state(engine, variables)
    arguments, named = (state.pop("metrics"), state, _batch(engine, data)), (names.pop("metrics"), names, _inputs(data))
    return _on_mesh(engine, engine.test_program, arguments, named)


def function(engine: Engine, variables: Mapping[str, Any], serve: Callable[..., Any], data: tuple) -> LoweredJaxpr:
    """What an export serves, on one device."""
    of_model = {name: v for name, v in variables.items() if isinstance(v, keras.Variable) and name.startswith(MODEL)}

    def stateless(values: dict[str, Any], data: tuple) -> Any:
        with keras.StatelessScope([(of_model[name], value) for name, value in values.items()]):
            return serve(*data)

    def outline(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, keras.backend.standardize_dtype(array.dtype))

    arguments = jax.tree.map(outline, (of_model, data))
    return lower(jax.jit(stateless), arguments, ({name: name for name in of_model}, _inputs(data)))


def _on_mesh(engine: Engine, program: Any, arguments: tuple, names: tuple) -> LoweredJaxpr:
    with engine.tracing():
        return lower(program, arguments, names)


def _state(engine: Engine, variables: Mapping[str, Any]) -> tuple[dict[str, list], dict[str, list[str]]]:
    """The state of a run as a step is given it, its arrays' outlines and their names."""
    named = {id(variable): name for name, variable in variables.items()}
    state, names = {}, {}
    for group, spec in engine.specs().items():
        held = engine.step.groups.get(group) or [own for own in engine.own().values() if own.group == group]
        axis = (engine.mesh.size,) if group in SHARES else ()
        sharding = NamedSharding(engine.mesh, spec)
        state[group] = [jax.ShapeDtypeStruct((*axis, *v.shape), v.dtype, sharding=sharding) for v in held]
        names[group] = [named[id(variable)] for variable in held]
    return state, names


def _batch(engine: Engine, data: tuple) -> Any:
    """The outlines of a global batch, of those of a replica's share."""
    sharding = NamedSharding(engine.mesh, PartitionSpec(REPLICAS))

    def of_all(share: Any) -> jax.ShapeDtypeStruct:
        size, *rest = share.shape
        return jax.ShapeDtypeStruct((size * engine.mesh.size, *rest), share.dtype, sharding=sharding)

    return jax.tree.map(of_all, data)


def _inputs(data: tuple) -> Any:
    """Names of the arrays of a batch, in its structure."""
    leaves, structure = jax.tree.flatten(data)
    return jax.tree.unflatten(structure, [f"{INPUT}{index}" for index, _ in enumerate(leaves)])


def lower(step: Any, arguments: tuple, names: tuple) -> LoweredJaxpr:
    """Lowers a function of arrays.

    Args:
        step: of `jax.jit`.
        arguments: what it is called with: nested structures of `jax.ShapeDtypeStruct`, with shardings over a mesh.
        names: the same structures of the arrays' names.

    Raises:
        LoweringError: it cannot be traced, or not be lowered for a TPU.
    """
    with _without_lines(), own_internals.whole_errors(), own_internals.noting_foreign_reads() as foreign:
        try:
            jaxpr = step.trace(*arguments).jaxpr
        except Exception as error:  # whatever the user's code raises
            raise LoweringError(untraceable(error)) from error
        on_host = next((e for e in _equations(jaxpr.jaxpr) if _ON_HOST.fullmatch(e.primitive)), None)
        if on_host is not None:
            reason = "it calls Python on the host, for which a TPU waits at each step, and cannot be compiled here"
            raise LoweringError(on_host.obstacle(reason))
        try:
            lowered = export.export(step, platforms=(_TPU,))(*arguments)
        except (NotImplementedError, ValueError) as error:
            raise LoweringError(_refused(error, jaxpr)) from error
    flat = jax.tree.leaves(names)
    kept = tuple(flat[index] for index in lowered.module_kept_var_idx)
    return LoweredJaxpr(lowered.mlir_module_serialized, kept, jaxpr, foreign)


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """Programs without the lines of Python that made them: a comment more is no other program to compile."""
    before = jax.config.values[LINES]
    jax.config.update(LINES, 0)
    try:
        yield
    finally:
        jax.config.update(LINES, before)


def _refused(error: Exception, jaxpr: ClosedJaxpr) -> Obstacle:
    """What JAX does not lower for a TPU."""
    found = _NO_RULE.search(str(error))
    alike = (e for e in _equations(jaxpr.jaxpr) if found and e.primitive == found[1])
    equation = next(alike, None)
    return untraceable(error) if equation is None else equation.obstacle("JAX has no such operation for a TPU")


def _equations(jaxpr: Jaxpr, within: str = "") -> Iterator[Equation]:
    """All operations, those of functions, loops and branches too."""
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        node = "/".join(filter(None, (within, str(equation.source_info.name_stack))))
        yield Equation(primitive, f"{node}/{primitive}".lstrip("/"), equation.source_info.traceback)
        for inner in _inner(equation.params):
            yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, node)


def _inner(parameters: Mapping[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    for value in jax.tree.leaves(list(parameters.values()), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)):
        if isinstance(value, Jaxpr | ClosedJaxpr):
            yield value


def _constants(jaxpr: ClosedJaxpr) -> Iterator[Any]:
    """Arrays that are part of the program."""
    yield from jaxpr.consts
    for equation in jaxpr.jaxpr.eqns:
        for inner in _inner(equation.params):
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            yield from _constants(closed)
