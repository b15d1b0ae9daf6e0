"""The replicated step on JAX: one compiled call a step, issued ahead of the devices.

step.py: what one replica does. state.py: where the state is between two calls. batches.py: what puts batches on the
devices. internals.py: private names.

A call takes the arrays of the state, donates them to its first step, and keeps those of the last.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from trainer import assignments, finite, internals, precision, refusals
from trainer.backends.jax import batches as placing
from trainer.backends.jax import internals as own_internals
from trainer.backends.jax.batches import PlacedIterator
from trainer.backends.jax.cluster import MeshCluster
from trainer.backends.jax.state import APART, SAME, MeshState, State
from trainer.backends.jax.step import Step
from trainer.remat import rematerialise
from trainer.replicated import Outcome, Prepare

# Steps that are issued and not done: enough for the devices never to wait for Python, few enough for memory.
_IN_FLIGHT = 2
_LOOK_SECS = 5e-5  # between two looks whether a batch or the devices come first


class Engine(MeshState):
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
        rematerialise(model, remat)
        self.step = Step(model, devices.num_replicas, microbatches, prepare)
        super().__init__(model, devices, self.step.groups, counts_gradients=bool(self.step.smallest))

    # Programs. They are traced when they are first called, within `tracing`.

    @functools.cached_property
    def train_program(self) -> Any:
        """(state, batch) -> (state, something to wait for); the state that it is given is gone."""

        def step(state: State, batch: Any) -> tuple[State, jax.Array]:
            new = self.step.train(state, batch)
            return new, new["kept"][0] + 0  # not that of the state, which the next step is given

        specs = self.specs()
        return self._program(step, (specs, APART), (specs, SAME))

    @functools.cached_property
    def test_program(self) -> Any:
        """(metrics, the rest of the state, batch) -> (metrics, something to wait for); metrics it is given are gone."""

        def step(metrics: list, state: State, batch: Any) -> tuple[list, jax.Array]:
            return self.step.test(state | {"metrics": metrics}, batch), jnp.sum(batch[-1])[None]

        state = {group: spec for group, spec in self.specs().items() if group != "metrics"}
        return self._program(step, (APART, state, APART), (APART, APART))

    @functools.cached_property
    def _predict_program(self) -> Any:
        """(weights and state, x) -> outputs."""

        def predict(state: State, x: Any) -> list[jax.Array]:
            with keras.StatelessScope(self._mapping(state), collect_losses=True):
                return internals.outputs(self.model, x)

        mapped = jax.shard_map(predict, mesh=self.mesh, in_specs=(SAME, APART), out_specs=APART, check_vma=False)
        return jax.jit(mapped)

    def _mapping(self, state: State) -> list[tuple[keras.Variable, jax.Array]]:
        return [pair for group in state for pair in zip(self.step.groups[group], state[group], strict=True)]

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
                logs = internals.metrics_result(self.model)
                learning_rate = keras.ops.convert_to_tensor(self.model.optimizer.learning_rate)
                counts = {m.name: keras.ops.convert_to_tensor(m.count) for m in internals.means(self.model)}
                sums = [jnp.sum(count, axis=0) for count in state["counts"]]
                found = precision.values(self.model, sums[0], finite.overflow(kept)) if sums else {}
            halted_at, after = finite.end_of_call(kept)
            values = {
                "halted_at": halted_at,
                "gradient_norm": finite.gradient_norm(kept),
                "learning_rate": learning_rate,
            }
            return {"logs": logs, "counts": counts, "precision": found, "kept": after, **values}

        return jax.jit(report, out_shardings=NamedSharding(self.mesh, SAME))

    # Loops.

    def train(self, batches: PlacedIterator, steps: int, again: Callable[[], PlacedIterator] | None = None) -> Outcome:
        """Every step waits for its judgement, which is a part of what XLA compiles: makes no use of `again`."""
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

    def predict(self, x: Any) -> list[list[np.ndarray]]:
        state = {group: self._values(group) for group in ("weights", "state")}
        with self.tracing():
            outputs = self._predict_program(state, x)
        shares = [[np.asarray(shard.data) for shard in output.addressable_shards] for output in outputs]
        return [list(of_replica) for of_replica in zip(*shares, strict=True)]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Where a program may be traced: each replica is one of many."""
        lost = assignments.refusing_lost_assignments()
        with own_internals.as_one_of(self.mesh.size), own_internals.whole_errors(), lost:
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
            learning_rate=float(out["learning_rate"]),
        )

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
            with keras.StatelessScope(self._mapping(state), collect_losses=True):
                return [jnp.asarray(value)[None] for value in function(share)]

        mapped = jax.shard_map(on_replica, mesh=self.mesh, in_specs=(SAME, APART), out_specs=APART, check_vma=False)
        with self.tracing():
            found = [np.asarray(value) for value in jax.jit(mapped)(state, placing.place(self.mesh, shares))]
        return [[value[index] for value in found] for index in range(self.mesh.size)]

    def keep_gradients(self) -> Callable[[], dict[str, np.ndarray]]:
        self.step.keeps_gradients = True
        weights = self.step.groups["weights"]
        self._held["gradients"] = [self._same(np.zeros(v.shape, np.float32)) for v in weights]
        return lambda: {v.path: np.array(g) for v, g in zip(weights, self._held["gradients"], strict=True)}


class _Running:
    """A call of many steps: fetches their batches, and keeps Python from running too far ahead of the devices."""

    def __init__(self, batches: PlacedIterator):
        self.waited = 0.0  # seconds that the devices had nothing to do for want of a batch
        self._batches = batches
        self._in_flight: collections.deque[Any] = collections.deque()  # arrays

    def next(self) -> Any:
        """The next batch."""
        # What the devices still have to do is no waiting; and they are not to run out of steps for being asked.
        while self._in_flight and not (self._batches.is_ready or self._in_flight[-1].is_ready()):
            time.sleep(_LOOK_SECS)
        if self._batches.is_ready:
            return next(self._batches)
        asked = time.monotonic()
        batch = next(self._batches)
        self.waited += time.monotonic() - asked
        return batch

    def issued(self, done: jax.Array) -> None:
        """A step has been issued."""
        self._in_flight.append(done)
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
