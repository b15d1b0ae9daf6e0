"""The state of a run on JAX between two calls: on every device of the mesh, by group.

Keras' variables hold what is the same on all replicas. What each replica has a share of, and what no variable holds, is
held here.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import finite, precision
from trainer.backends.jax.cluster import MeshCluster
from trainer.backends.jax.internals import REPLICAS
from trainer.replicated import GRADIENT_NORM

# Lists of arrays by group, see `step.Step`.
State = dict[str, list[jax.Array]]
# Groups of which each replica has its own share, and those that no variable of Keras holds between two calls.
SHARES = ("metrics", "counts")
HELD = ("metrics", "kept", "counts", "gradients")
SAME, APART = PartitionSpec(), PartitionSpec(REPLICAS)


class Own:
    """What a run keeps beside Keras' variables; made of `nothing` anew with every report."""

    def __init__(self, group: str, nothing: np.ndarray):
        self.group, self.nothing = group, nothing
        self.shape, self.dtype = nothing.shape, nothing.dtype.name


class MeshState:
    """Takes, keeps, reads and writes it; the engine adds what computes with it.

    Args:
        model: built and compiled.
        devices: whose mesh may be the outline of one, as in a preflight; then nothing is put on devices.
        groups: variables by group of the state.
        counts_gradients: whether the counts of `precision` are kept.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: MeshCluster,
        groups: Mapping[str, list[keras.Variable]],
        *,
        counts_gradients: bool,
    ):
        self.model, self.mesh, self.groups = model, devices.mesh, groups
        self._own = {GRADIENT_NORM: Own("kept", np.asarray(finite.NOTHING, np.float32))}
        if counts_gradients:
            self._own[precision.UNDERFLOW] = Own("counts", np.asarray(precision.NOTHING, np.float32))
        self._held: State = {group: [] for group in HELD}
        if isinstance(self.mesh, Mesh):
            if devices.num_workers > 1:
                self._begin_as_the_chief()
            self.reset_metrics()

    def specs(self) -> dict[str, PartitionSpec]:
        """How each group of the state lies on the mesh."""
        return {group: APART if group in SHARES else SAME for group in dict.fromkeys((*self.groups, *HELD))}

    def _take(self) -> State:
        """All of it, for a call that donates it."""
        return self._held | {group: self._values(group) for group in self.groups if group not in HELD}

    def _keep(self, state: State) -> None:
        for group, variables in self.groups.items():
            if group not in HELD:
                for variable, value in zip(variables, state[group], strict=True):
                    variable.assign(value)
        self._held = {group: state[group] for group in HELD}

    def _values(self, group: str) -> list[jax.Array]:
        """On every device, whoever assigned them."""
        same = NamedSharding(self.mesh, SAME)
        values = [variable.value for variable in self.groups[group]]
        return [value if value.sharding == same else self._same(np.asarray(value)) for value in values]

    def _begin_as_the_chief(self) -> None:
        """The weights of the chief, whatever the others' initializers drew."""
        variables = [v for group, held in self.groups.items() if group not in HELD for v in held]
        values = multihost_utils.broadcast_one_to_all([np.asarray(variable.value) for variable in variables])
        for variable, value in zip(variables, values, strict=True):
            self.write(variable, value)

    def _same(self, array: np.ndarray) -> jax.Array:
        """`array` on every device of the mesh, those of other processes too, which do the same."""
        sharding = NamedSharding(self.mesh, SAME)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or (...,)])

    def _apart(self, array: np.ndarray, aggregation: str = "sum") -> jax.Array:
        """Shares of the replicas [N, ...] that come to `array` over all of them."""
        zeros = np.zeros_like(array) if aggregation == "sum" else array

        def share(index: Any) -> np.ndarray:
            return (array if (index[0].start or 0) == 0 else zeros)[None]

        sharding = NamedSharding(self.mesh, APART)
        return jax.make_array_from_callback((self.mesh.size, *array.shape), sharding, share)

    def _over_replicas(self, shares: Sequence[jax.Array]) -> list[jax.Array]:
        """What the shares of metrics come to."""
        over = {"sum": jnp.sum, "mean": jnp.mean}
        pairs = zip(self.groups["metrics"], shares, strict=True)
        return [over[v.aggregation](s, axis=0) if v.aggregation in over else s[0] for v, s in pairs]

    @functools.cached_property
    def _all_shares(self) -> Any:
        def all_shares(metrics: list, counts: list) -> tuple[list, list]:
            return self._over_replicas(metrics), [jnp.sum(count, axis=0) for count in counts]

        return jax.jit(all_shares, out_shardings=NamedSharding(self.mesh, SAME))

    def reset_metrics(self) -> None:
        variables = self.groups["metrics"]
        with keras.StatelessScope(list(zip(variables, [v.value for v in variables], strict=True))) as scope:
            self.model.reset_metrics()
        begun = [(np.asarray(scope.get_current_value(variable)), variable.aggregation) for variable in variables]
        self._held["metrics"] = [self._apart(array, aggregation) for array, aggregation in begun]
        self._held |= {"kept": [], "counts": []}
        for own in self._own.values():
            self.write(own, own.nothing)

    def own(self) -> dict[str, "Own"]:
        return self._own

    def read(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        places = {id(variable): index for index, variable in enumerate(self.groups["metrics"])}
        metrics: list[jax.Array] = []
        counts: list[jax.Array] = []
        if any(isinstance(v, Own) or id(v) in places for v in variables.values()):  # all processes ask together
            metrics, counts = self._all_shares(self._held["metrics"], self._held["counts"])
        held = {"kept": self._held["kept"], "counts": counts}
        arrays: dict[str, jax.Array] = {
            name: held[v.group][0] if isinstance(v, Own) else metrics[places[id(v)]] if id(v) in places else v.value
            for name, v in variables.items()
        }
        for array in arrays.values():
            array.copy_to_host_async()
        return {name: np.array(array) for name, array in arrays.items()}  # of its own: steps donate their arrays

    def write(self, variable: Any, value: Any) -> None:
        array = np.asarray(value)
        metrics = {id(v): index for index, v in enumerate(self.groups["metrics"])}
        if isinstance(variable, Own) and variable.group in SHARES:
            self._held[variable.group] = [self._apart(array / self.mesh.size, "mean")]  # each knows that it has counted
        elif isinstance(variable, Own):
            self._held[variable.group] = [self._same(array)]
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
