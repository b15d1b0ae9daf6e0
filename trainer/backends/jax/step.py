"""The step on JAX: what one replica does, and what the replicas exchange. Functions of arrays, within `jax.shard_map`.

The state of a run is one dictionary of lists of arrays, see `Step.groups`. What is the same on all replicas goes in and
comes out as it is; metrics and counts, of which each replica has its own share, with an axis of length 1 in front.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from trainer import finite, internals, precision
from trainer.backends.jax import internals as own_internals
from trainer.backends.jax.internals import REPLICAS
from trainer.backends.jax.state import SHARES, State
from trainer.errors import ConfigError
from trainer.forward import Forward
from trainer.replicated import Prepare, names_of


class Step:
    """The train and the test step of a built and compiled model.

    groups: the variables of each group of the state that has any; in the state stand beside them

        kept        [[5]] of `trainer.finite`
        counts      [[2]] of `trainer.precision`, or none
        gradients   those of the last step, float32, before anything scales or clips them; only if `keeps_gradients`

    returned: names of what a `train_step` of the model's own returned when it was traced.
    """

    def __init__(self, model: keras.Model, num_replicas: int, microbatches: int, prepare: Prepare | None):
        self._model, self._num_replicas, self._microbatches = model, num_replicas, microbatches
        self._prepare = prepare
        self.forward = Forward(model)
        self.groups: dict[str, list[keras.Variable]] = {
            "weights": list(model.trainable_variables),
            "state": list(model.non_trainable_variables),
            "optimizer": list(model.optimizer.variables),
            "metrics": list(model.metrics_variables),
        }
        self.smallest = precision.smallest_normal(model)
        self.keeps_gradients = False
        self.returned: Sequence[str] = ()
        self._averaged = {id(variable) for variable in internals.float_state(model)}
        self._loss_total = internals.loss_total(model)
        # Filled while a step is traced, by what the optimizer is given.
        self._noted: dict[str, Any] = {}
        own_internals.before_apply(model.optimizer, self._exchange)

    def train(self, state: State, data: Any) -> State:
        """Trains on this replica's share; a step that is not finite, and all behind it, change nothing else."""
        data = data if self._prepare is None else self._prepare(data)
        self._noted = {"counts": state["counts"]}
        alone = _without_axis(state)
        new = self._own(alone, data) if internals.overrides(self._model, "train_step") else self._keras(alone, data)
        loss = jax.lax.pmean(self._loss_so_far(new["metrics"]), REPLICAS)
        noted, self._noted = self._noted, {}
        if "half_square" not in noted:
            raise ConfigError(
                f"the train_step of {type(self._model).__name__} does not call self.optimizer.stateless_apply, where "
                "gradients are averaged over the replicas and checked. Update the weights by it"
            )
        goes_on, change = finite.judge(state["kept"][0], noted["half_square"], loss, noted["scale"])
        new = _with_axis(new | {"state": self._agreed(alone["state"], new["state"])})
        chosen = {
            group: [jnp.where(goes_on, after, before) for before, after in zip(state[group], new[group], strict=True)]
            for group in self.groups
        }
        return chosen | {
            "kept": [state["kept"][0] + change],
            "counts": noted["counts"],
            "gradients": noted.get("gradients", []),
        }

    def test(self, state: State, data: tuple) -> list[jax.Array]:
        """Evaluates this replica's `(x, y, mask)`, mask [b] float32 with 0 for padding; returns its metrics."""
        alone, model = _without_axis(state), self._model
        if internals.overrides(model, "test_step"):
            _, (_, _, metrics) = model.test_step((alone["weights"], alone["state"], alone["metrics"]), data)
            return _expanded(metrics)
        with keras.StatelessScope(self.mapping(alone), collect_losses=True) as scope:
            internals.test_step(model, data)
        return _expanded([scope.get_current_value(variable) for variable in self.groups["metrics"]])

    def mapping(self, state: State) -> list[tuple[keras.Variable, jax.Array]]:
        """Variables with their values in a state without the axis of shares."""
        return [pair for group, variables in self.groups.items() for pair in zip(variables, state[group], strict=True)]

    # One step, with a train_step of Keras or of the model's own.

    def _keras(self, state: State, data: tuple) -> State:
        optimizer, num_state = self._model.optimizer, len(state["state"])
        with keras.StatelessScope(list(zip(self.groups["optimizer"], state["optimizer"], strict=True))):
            scale = keras.ops.convert_to_tensor(optimizer.scale_loss(1.0), "float32")
        passes = self._one_pass if self._microbatches == 1 else self._passes
        gradients, after = passes(state["weights"], state["state"] + state["metrics"], data, scale)
        weights, of_optimizer = optimizer.stateless_apply(state["optimizer"], gradients, state["weights"])
        return {
            "weights": weights,
            "state": after[:num_state],
            "optimizer": of_optimizer,
            "metrics": after[num_state:],
        }

    def _own(self, state: State, data: tuple) -> State:
        logs, new = self._model.train_step(tuple(state[group] for group in self.groups), data)
        self.returned = names_of(logs)
        return dict(zip(self.groups, map(list, new), strict=True))

    def _one_pass(self, weights: list, state: list, data: tuple, scale: jax.Array) -> tuple[list, list]:
        return jax.grad(self.forward, has_aux=True)(weights, state, data, scale)

    def _passes(self, weights: list, state: list, data: tuple, scale: jax.Array) -> tuple[list, list]:
        """Part after part; means of the gradients, and the state after the last."""

        def split(array: jax.Array) -> jax.Array:
            return array.reshape(self._microbatches, -1, *array.shape[1:])

        def body(carry: tuple, part: tuple) -> tuple[tuple, None]:
            sums, state = carry
            gradients, state = self._one_pass(weights, state, part, scale)
            return ([total + gradient for total, gradient in zip(sums, gradients, strict=True)], state), None

        start = ([jnp.zeros_like(weight) for weight in weights], state)
        (sums, state), _ = jax.lax.scan(body, start, keras.tree.map_structure(split, data))
        return [total / self._microbatches for total in sums], state

    # What the replicas exchange.

    def _exchange(self, gradients: Sequence) -> list:
        """Notes what is to be known of the gradients, and averages them."""
        optimizer = self._model.optimizer
        if self.smallest:
            self._noted["counts"] = [self._counted(self._noted["counts"][0][0], gradients)[None]]
        means = jax.lax.pmean(list(gradients), REPLICAS)
        scale = internals.scale(optimizer)
        squares = [jnp.sum(jnp.square(mean.astype(jnp.float32))) for mean in means]
        self._noted |= {"half_square": 0.5 * sum(squares), "scale": scale}
        if self.keeps_gradients:
            self._noted["gradients"] = [mean.astype(jnp.float32) / scale for mean in means]
        return means

    def _counted(self, counts: jax.Array, gradients: Sequence) -> jax.Array:
        pairs = zip(gradients, self.groups["weights"], strict=True)
        chosen = [(g, self.smallest[id(v)]) for g, v in pairs if id(v) in self.smallest]
        return jax.lax.cond(precision.is_counted(counts), lambda: counts, lambda: precision.counted(chosen))

    def _loss_so_far(self, metrics: Sequence[jax.Array]) -> jax.Array:
        """Of this replica, float32: the sum over steps turns NaN or infinite with the loss of the step."""
        totals = [m for m, v in zip(metrics, self.groups["metrics"], strict=True) if v is self._loss_total]
        return totals[0].astype(jnp.float32) if totals else jnp.zeros(())

    def _agreed(self, before: Sequence[jax.Array], after: Sequence[jax.Array]) -> list[jax.Array]:
        """The model's state, the same on all replicas: what steps make of it is averaged, or as its variable says."""
        if self._num_replicas == 1:
            return list(after)
        own = internals.overrides(self._model, "train_step") is not None
        agreed = list(after)
        for index, variable in enumerate(self.groups["state"]):
            changes = own or id(variable) in self.forward.assigned
            if changes and (id(variable) in self._averaged or variable.aggregation == "mean"):
                agreed[index] = jax.lax.pmean(after[index], REPLICAS)
            elif changes and variable.aggregation == "sum":
                agreed[index] = before[index] + jax.lax.psum(after[index] - before[index], REPLICAS)
            elif changes and variable.aggregation == "only_first_replica":
                agreed[index] = jax.lax.all_gather(after[index], REPLICAS)[0]
        return agreed


def _without_axis(state: State) -> State:
    return state | {group: [array[0] for array in state[group]] for group in SHARES}


def _with_axis(state: State) -> State:
    return state | {"metrics": _expanded(state["metrics"])}


def _expanded(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [array[None] for array in arrays]
