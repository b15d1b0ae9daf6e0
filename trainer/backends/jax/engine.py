"""The replicated step on JAX: one compiled call a step, issued ahead of the devices, and the state of it all.

step.py: what one replica does. batches.py: what puts batches on the devices. internals.py: private names.

Between two calls Keras' variables hold the state, on every device of the mesh; what each replica has a share of, and
what no variable holds, is held here. A call takes the arrays, donates them to its first step, and keeps those of the
last.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import finite, internals, precision, refusals
from trainer.backends.jax import batches as placing
from trainer.backends.jax import internals as own_internals
from trainer.backends.jax.batches import PlacedIterator
from trainer.backends.jax.cluster import MeshCluster
from trainer.backends.jax.internals import REPLICAS
from trainer.backends.jax.step import SHARES, State, Step
from trainer.remat import rematerialise
from trainer.replicated import GRADIENT_NORM, Outcome, Prepare

# Steps that are issued and not done: enough for the devices never to wait for Python, few enough for memory.
_IN_FLIGHT = 2
_SAME, _APART = PartitionSpec(), PartitionSpec(REPLICAS)
# Groups of the state that no variable of Keras holds between two calls.
_HELD = ("metrics", "kept", "counts", "gradients")


class Engine:
    """See `trainer.replicated.Engine`. JAX compiles in any case, so `xla` says nothing."""

    def __init__(
        self,
        model: keras.Model,
        devices: MeshCluster,
        *,
        xla: bool,
        microbatches: int,
        remat: Sequence[str],
        prepare: Prepare | None,
    ):
        refusals.check_parts(model, devices.num_replicas, microbatches)
        own_internals.check_steps(model)
        self.model, self.mesh = model, devices.mesh
        rematerialise(model, remat)
        self.step = Step(model, devices.num_replicas, microbatches, prepare)
        self._own = {GRADIENT_NORM: _Own("kept", np.asarray(finite.NOTHING, np.float32))}
        if self.step.smallest:
            self._own[precision.UNDERFLOW] = _Own("counts", np.asarray(precision.NOTHING, np.float32))
        self._held: State = {group: [] for group in _HELD}
        if isinstance(self.mesh, Mesh):  # and not only the outline of one, as in a preflight
            if devices.num_workers > 1:
                self._begin_as_the_chief()
            self.reset_metrics()

    # Programs. They are traced when they are first called, within `tracing`.

    @functools.cached_property
    def train_program(self) -> Any:
        """(state, batch) -> (state, something to wait for); the state that it is given is gone."""

        def step(state: State, batch: Any) -> tuple[State, jax.Array]:
            new = self.step.train(state, batch)
            return new, new["kept"][0] + 0  # not that of the state, which the next step is given

        specs = self.specs()
        return self._program(step, (specs, _APART), (specs, _SAME))

    @functools.cached_property
    def test_program(self) -> Any:
        """(metrics, the rest of the state, batch) -> (metrics, something to wait for); metrics it is given are gone."""

        def step(metrics: list, state: State, batch: Any) -> tuple[list, jax.Array]:
            return self.step.test(state | {"metrics": metrics}, batch), jnp.sum(batch[-1])[None]

        state = {group: spec for group, spec in self.specs().items() if group != "metrics"}
        return self._program(step, (_APART, state, _APART), (_APART, _APART))

    def _program(self, step: Callable, in_specs: Any, out_specs: Any) -> Any:
        # Not checked: that what all replicas have is alike on all. Tests do.
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=0)

    @functools.cached_property
    def _report(self) -> Any:
        def report(state: State) -> dict[str, Any]:
            [kept], metrics = state["kept"], self._over_replicas(state["metrics"])
            mapping = [
                *zip(self.step.groups["metrics"], metrics, strict=True),
                *zip(self.step.groups["optimizer"], state["optimizer"], strict=True),
            ]
            with keras.StatelessScope(mapping):
                logs = self.model.get_metrics_result()
                counts = {m.name: keras.ops.convert_to_tensor(m.count) for m in internals.means(self.model)}
                sums = [jnp.sum(count, axis=0) for count in state["counts"]]
                found = precision.values(self.model, sums[0], finite.overflow(kept)) if sums else {}
            halted_at, after = finite.end_of_call(kept)
            values = {"halted_at": halted_at, "gradient_norm": finite.gradient_norm(kept)}
            return {"logs": logs, "counts": counts, "precision": found, "kept": after, **values}

        return jax.jit(report, out_shardings=NamedSharding(self.mesh, _SAME))

    def specs(self) -> dict[str, PartitionSpec]:
        """How each group of the state lies on the mesh."""
        return {group: _APART if group in SHARES else _SAME for group in dict.fromkeys((*self.step.groups, *_HELD))}

    # Loops.

    def train(self, batches: PlacedIterator, steps: int) -> Outcome:
        state, running = self._take(), _Running(batches)
        try:
            with self.tracing():
                for _ in range(steps):
                    state, done = self.train_program(state, running.next())
                    running.issued(done)
        finally:
            self._keep(state)
        return self._outcome(running.waited)

    def test(self, batches: PlacedIterator, steps: int) -> Outcome:
        state, running = self._take(), _Running(batches)
        metrics = state.pop("metrics")
        try:
            with self.tracing():
                for _ in range(steps):
                    metrics, done = self.test_program(metrics, state, running.next())
                    running.issued(done)
        finally:
            self._held["metrics"] = metrics
        return self._outcome(running.waited)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Where a program may be traced: each replica is one of many."""
        with own_internals.as_one_of(self.mesh.size), own_internals.whole_errors():
            yield

    def _outcome(self, waited: float) -> Outcome:
        out = self._report(self._held | {"optimizer": self._values("optimizer")})
        self._held["kept"] = [out["kept"]]
        return Outcome(
            logs={name: np.asarray(value) for name, value in out["logs"].items()},
            counts={name: float(count) for name, count in out["counts"].items()},
            waited=waited,
            halted_at=int(out["halted_at"]),
            gradient_norm=float(out["gradient_norm"]),
            precision={name: float(value) for name, value in out["precision"].items()},
            returned=self.step.returned,
        )

    # State.

    def _take(self) -> State:
        """All of it, for a call that donates it."""
        return self._held | {group: self._values(group) for group in self.step.groups if group not in _HELD}

    def _keep(self, state: State) -> None:
        for group, variables in self.step.groups.items():
            if group not in _HELD:
                for variable, value in zip(variables, state[group], strict=True):
                    variable.assign(value)
        self._held = {group: state[group] for group in _HELD}

    def _values(self, group: str) -> list[jax.Array]:
        """On every device, whoever assigned them."""
        same = NamedSharding(self.mesh, _SAME)
        values = [variable.value for variable in self.step.groups[group]]
        return [value if value.sharding == same else self._same(np.asarray(value)) for value in values]

    def _begin_as_the_chief(self) -> None:
        """The weights of the chief, whatever the others' initializers drew."""
        variables = [v for group, held in self.step.groups.items() if group not in _HELD for v in held]
        values = multihost_utils.broadcast_one_to_all([np.asarray(variable.value) for variable in variables])
        for variable, value in zip(variables, values, strict=True):
            self.write(variable, value)

    def _same(self, array: np.ndarray) -> jax.Array:
        """`array` on every device of the mesh, those of other processes too, which do the same."""
        sharding = NamedSharding(self.mesh, _SAME)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or (...,)])

    def _apart(self, array: np.ndarray, aggregation: str = "sum") -> jax.Array:
        """Shares of the replicas [N, ...] that come to `array` over all of them."""
        zeros = np.zeros_like(array) if aggregation == "sum" else array

        def share(index: Any) -> np.ndarray:
            return (array if (index[0].start or 0) == 0 else zeros)[None]

        sharding = NamedSharding(self.mesh, _APART)
        return jax.make_array_from_callback((self.mesh.size, *array.shape), sharding, share)

    def _over_replicas(self, shares: Sequence[jax.Array]) -> list[jax.Array]:
        """What the shares of metrics come to."""
        over = {"sum": jnp.sum, "mean": jnp.mean}
        pairs = zip(self.step.groups["metrics"], shares, strict=True)
        return [over[v.aggregation](s, axis=0) if v.aggregation in over else s[0] for v, s in pairs]

    @functools.cached_property
    def _all_shares(self) -> Any:
        def all_shares(metrics: list, counts: list) -> tuple[list, list]:
            return self._over_replicas(metrics), [jnp.sum(count, axis=0) for count in counts]

        return jax.jit(all_shares, out_shardings=NamedSharding(self.mesh, _SAME))

    def reset_metrics(self) -> None:
        variables = self.step.groups["metrics"]
        with keras.StatelessScope(list(zip(variables, [v.value for v in variables], strict=True))) as scope:
            self.model.reset_metrics()
        begun = [(np.asarray(scope.get_current_value(variable)), variable.aggregation) for variable in variables]
        self._held["metrics"] = [self._apart(array, aggregation) for array, aggregation in begun]
        self._held |= {"kept": [], "counts": []}
        for own in self._own.values():
            self.write(own, own.nothing)

    def own(self) -> dict[str, "_Own"]:
        return self._own

    def read(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        places = {id(variable): index for index, variable in enumerate(self.step.groups["metrics"])}
        metrics: list[jax.Array] = []
        counts: list[jax.Array] = []
        if any(isinstance(v, _Own) or id(v) in places for v in variables.values()):  # all processes ask together
            metrics, counts = self._all_shares(self._held["metrics"], self._held["counts"])
        held = {"kept": self._held["kept"], "counts": counts}
        arrays: dict[str, jax.Array] = {
            name: held[v.group][0] if isinstance(v, _Own) else metrics[places[id(v)]] if id(v) in places else v.value
            for name, v in variables.items()
        }
        for array in arrays.values():
            array.copy_to_host_async()
        return {name: np.array(array) for name, array in arrays.items()}  # of its own: steps donate their arrays

    def write(self, variable: Any, value: Any) -> None:
        array = np.asarray(value)
        metrics = {id(v): index for index, v in enumerate(self.step.groups["metrics"])}
        if isinstance(variable, _Own):
            # Each replica has to know that it has counted.
            counts = functools.partial(self._apart, array / self.mesh.size, "mean")
            self._held[variable.group] = [self._same(array) if variable.group == "kept" else counts()]
        elif id(variable) in metrics:
            self._held["metrics"][metrics[id(variable)]] = self._apart(array, variable.aggregation)
        else:
            variable.assign(self._same(array.astype(variable.dtype)))

    @contextlib.contextmanager
    def holding(self, values: Sequence[tuple[keras.Variable, keras.Variable]]) -> Iterator[None]:
        before = [variable.value for variable, _ in values]
        for variable, other in values:
            variable.assign(other.value)
        try:
            yield
        finally:
            for (variable, _), value in zip(values, before, strict=True):
                variable.assign(value)

    def copies(self, variable: keras.Variable) -> list[np.ndarray]:
        return [np.asarray(shard.data) for shard in variable.value.addressable_shards]

    def learning_rate(self) -> float:
        optimizer = self.model.optimizer
        scalars = [variable for variable in optimizer.variables if variable.ndim == 0]
        # On this host alone: a computation on the devices is one of all processes.
        with keras.StatelessScope([(v, jnp.asarray(np.asarray(v.value))) for v in scalars]):
            return float(optimizer.learning_rate)

    # For `--mode=parity`.

    def run(
        self, function: Callable[[Any], list[jax.Array]], shares: Sequence[Any], *, xla: bool
    ) -> list[list[np.ndarray]]:
        state = {group: self._values(group) for group in ("weights", "state")}

        def on_replica(state: State, share: Any) -> list[jax.Array]:
            mapping = [p for group in state for p in zip(self.step.groups[group], state[group], strict=True)]
            with keras.StatelessScope(mapping, collect_losses=True):
                return [jnp.asarray(value)[None] for value in function(share)]

        mapped = jax.shard_map(on_replica, mesh=self.mesh, in_specs=(_SAME, _APART), out_specs=_APART, check_vma=False)
        with self.tracing():
            found = [np.asarray(value) for value in jax.jit(mapped)(state, placing.place(self.mesh, shares))]
        return [[value[index] for value in found] for index in range(self.mesh.size)]

    def keep_gradients(self) -> Callable[[], dict[str, np.ndarray]]:
        self.step.keeps_gradients = True
        weights = self.step.groups["weights"]
        self._held["gradients"] = [self._same(np.zeros(v.shape, np.float32)) for v in weights]
        return lambda: {v.path: np.array(g) for v, g in zip(weights, self._held["gradients"], strict=True)}


class _Own:
    """What a run keeps beside Keras' variables; made of `nothing` anew with every report."""

    def __init__(self, group: str, nothing: np.ndarray):
        self.group, self.nothing = group, nothing
        self.shape, self.dtype = nothing.shape, nothing.dtype.name


class _Running:
    """A call of many steps: fetches their batches, and keeps Python from running too far ahead of the devices."""

    def __init__(self, batches: PlacedIterator):
        self.waited = 0.0  # seconds that the devices had nothing to do for want of a batch
        self._batches = batches
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def next(self) -> Any:
        """The next batch."""
        if self._batches.is_ready:
            return next(self._batches)
        if self._in_flight:  # what is still to be done is no waiting
            self._in_flight[-1].block_until_ready()
        asked = time.monotonic()
        batch = next(self._batches)
        self.waited += time.monotonic() - asked
        return batch

    def issued(self, done: jax.Array) -> None:
        """A step has been issued."""
        self._in_flight.append(done)
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
