"""The replicated step: one Keras model, trained and evaluated the same on every replica of every backend.

Separation of concerns:
    this file: what the run wants of it: loops with their logs, evaluation, and the state of it all as arrays.
    backends/*/engine.py: what one step does on one replica, what the replicas exchange, and many steps in one call.
    internals.py: all that touches private names of Keras.
    training.py: which call comes next, and what happens in between.
    cluster.py: which devices there are.

Every replica computes on its share of the global batch *as if it were alone*: losses are means over its own examples
and nothing is scaled by the number of replicas. What must agree is then averaged over the replicas, once a step:

    gradients        one all-reduce (mean) of the whole list, before anything clips, checks, decays or applies them
    float state      moving statistics of batch norm and the like, after the step (Keras leaves each replica its own)
    metrics          summed over replicas when read, once a loop

Equal shares make the mean of means the mean over the global batch, so 1, 2 or N replicas train alike. What Keras 3 does
instead, and the upstream issues, stand in the table of the README ("Why not keras.Model.fit").
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from trainer import backend, internals, refusals
from trainer.cluster import Cluster
from trainer.errors import ConfigError

# A loop is (begin, end): the steps begin..end-1 run in one call.
Loop = tuple[int, int]
Logs = dict[str, float]
# From what the input yields for one replica to `(x, y)`.
Prepare = Callable[[Any], tuple]
GRADIENT_NORM = "gradient_norm"
# Groups of state, as the names of `state` begin.
MODEL, AVERAGES, METRICS = "model/", "average/", "metrics/"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call of the engine came to, over all replicas; scalars unless a shape is said.

    logs: metrics since their last reset, of any shape. counts: by the name of a mean, what it has been over. waited:
    seconds that the devices waited for batches. halted_at: index within the call of the first step that was not
    finite, -1 where there was none. gradient_norm: mean since the last reset, NaN where no step counted. precision: see
    `precision.py`. returned: names of what a `train_step` of the model's own returned. learning_rate: of the next step.
    """

    logs: Mapping[str, np.ndarray]
    counts: Mapping[str, float]
    waited: float
    halted_at: int = -1
    gradient_norm: float = float("nan")
    precision: Mapping[str, float] = dataclasses.field(default_factory=dict)
    returned: Sequence[str] = ()
    learning_rate: float = float("nan")


def names_of(returned: Mapping[str, Any]) -> list[str]:
    """Of what a `train_step` returned; a metric that is several, as those of `compile` together are, gives a dict."""
    return [n for name, value in returned.items() for n in (value if isinstance(value, Mapping) else (name,))]


class Engine(Protocol):
    """A model on the devices of a backend: all that a backend does for a run, beside its `Cluster`.

    Made by the backend's `engine.Engine(model, devices, xla=, microbatches=, remat=, prepare=)`, see
    `Replicated`. What it calls a variable is one of Keras or one of `own`.
    """

    def train(self, batches: Iterator, steps: int, again: Callable[[], Iterator] | None = None) -> Outcome:
        """Runs that many steps, one that is not finite and those after it without effect.

        With `again`, see `Replicated.run_train_loop`, it need not know while it runs which these are.
        """

    def test(self, batches: Iterator, steps: int) -> Outcome:
        """Adds that many batches `(x, y, mask)`, mask [b] float32 with 0 for padding, to the metrics."""

    def predict(self, x: Any) -> list[list[np.ndarray]]:
        """The outputs, as in evaluation, of each replica of this process for its share; all workers call it together.

        Halves as float32.
        """

    def reset_metrics(self) -> None:
        """Starts all means anew."""

    def own(self) -> Mapping[str, Any]:
        """By name, what the engine adds to the means in the making; each has a shape and a dtype."""

    def read(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Arrays as they are now, which no later step changes. Metrics and what is `own` are sums over the replicas."""

    def write(self, variable: Any, value: Any) -> None:
        """Assigns to a variable on every replica."""

    def holding(
        self, values: Sequence[tuple[keras.Variable, keras.Variable]]
    ) -> contextlib.AbstractContextManager[None]:
        """Where each first variable has the value of the second one, and its own again afterwards."""

    def copies(self, variable: keras.Variable) -> list[np.ndarray]:
        """The value that each replica of this process has."""

    def learning_rate(self) -> float:
        """Of the next step."""

    def run(self, function: Callable[[Any], list], shares: Sequence[Any], *, xla: bool) -> list[list[np.ndarray]]:
        """What `function`, which may call the model, returns on each replica of its share."""

    def keep_gradients(self) -> Callable[[], dict[str, np.ndarray]]:
        """From now on keeps what the returned function gives: the gradients of the last step, by name.

        Averaged over the replicas, before anything clips or scales them.
        """


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one call of the train loop did.

    logs: metrics since their last reset, and the mean norm of the gradients of the global batch before clipping.
    input_wait_secs: that the devices waited for their batches.
    halted_at: index within the call of the first step whose loss or gradients were not finite. It and all steps after
        it have changed nothing. None: there was none.
    learning_rate: of the next step.
    """

    logs: Logs
    input_wait_secs: float
    halted_at: int | None
    learning_rate: float


class Replicated:
    """Trains and evaluates a compiled Keras model on every replica of a cluster.

    Args:
        model: compiled `keras.Model`, made under `devices.scope()`; a `train_step`, `test_step` or `compute_loss` of
            its own is written as for a single device, for the backend that is in use.
        devices: from `cluster.connect`.
        batch_spec: `(x, y)` of `keras.KerasTensor`, the shapes and dtypes of one replica's batch.
        xla: compile forward and backward pass of each replica with XLA (a TPU always does, and JAX).
        microbatches: parts of a replica's share that are computed one after the other.
        remat: patterns of the names of layers that keep no activations, see `remat.py`.
        prepare: makes what `batch_spec` describes of what the training input yields for one replica: augmentation.

    Raises:
        ConfigError: `xla` or `microbatches` with a model whose `train_step` cannot be split, or a loss that sums over
            the batch (its gradient would depend on the number of replicas).
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Cluster,
        batch_spec: tuple,
        *,
        xla: bool = False,
        microbatches: int = 1,
        remat: Sequence[str] = (),
        prepare: Prepare | None = None,
    ):
        self.model = model
        self.devices = devices
        refusals.check_layers(model)
        refusals.check_losses(model.loss, num_replicas=devices.num_replicas)
        for optimizer in internals.optimizers(model):
            refusals.check_optimizer(optimizer, num_replicas=devices.num_replicas)
        with devices.scope():
            internals.build(model, batch_spec)
            self._global_seed = internals.global_seed()
        self.engine: Engine = backend.part("engine").Engine(
            model, devices, xla=xla, microbatches=microbatches, remat=remat, prepare=prepare
        )

    def run_train_loop(self, iterator: Iterator, steps: int, again: Callable[[], Iterator] | None = None) -> Trained:
        """Trains `steps` steps, or those before one whose loss or gradients are not finite.

        Args:
            iterator: yields the global batches.
            steps: at least one.
            again: makes an iterator that begins with the same batches. With it small steps are faster: they do not wait
                for each other's judgement, and a call that held a step that is not finite is undone and run again.

        Raises:
            ConfigError: `train_step` returns a value that no metric of the model keeps, so that what it is over steps
                and replicas cannot be told.
        """
        out = self.engine.train(iterator, steps, again)
        logs = _logs(out)
        lost = [name for name in out.returned if name not in logs and f"{name}_0" not in logs]
        if lost and out.halted_at != 0:  # where no step counts, no metric has been kept
            raise ConfigError(
                f"the train_step of {type(self.model).__name__} returns {', '.join(lost)}, which no metric of the "
                "model keeps over steps and replicas. Make it a keras.metrics.Mean attribute of the model of that "
                "name, update it in train_step and return its result()"
            )
        for name, value in {GRADIENT_NORM: out.gradient_norm, **out.precision}.items():
            if np.isfinite(value):
                logs.setdefault(name, value)
        # The clock of the machine may be set while a loop runs.
        waited = max(0.0, out.waited)
        return Trained(logs, waited, None if out.halted_at < 0 else out.halted_at, out.learning_rate)

    def evaluate(
        self, iterator: Iterator, loops: Sequence[Loop], goes_on: Callable[[], bool] = lambda: True
    ) -> Logs | None:
        """Metrics over all examples of `iterator`, which yields `(x, y, mask)`; resets them before and after.

        Of the moving average of the weights, where an optimizer keeps one.

        Args:
            iterator: yields the global batches.
            loops: calls to make.
            goes_on: asked after each call; None is returned once it says no.
        """
        self.reset_metrics()
        logs: Logs | None = {}
        with self.averaged():
            for begin, end in loops:
                logs = _logs(self.engine.test(iterator, end - begin))
                if end < loops[-1][1] and not goes_on():
                    logs = None
                    break
        self.reset_metrics()
        return logs

    def reset_metrics(self) -> None:
        """Starts all means anew."""
        self.engine.reset_metrics()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Where weights are their moving averages, if an optimizer keeps any: what is evaluated and exported.

        Keras' `fit` writes them over the weights, at the end or every so often; a run could not go on from there.
        """
        with self.engine.holding(internals.averages(self.model)):
            yield

    def pass_over(self, step: int, end: int) -> None:
        """Counts the steps `step`..`end`-1 as done, so that what depends on the step goes on with the data."""
        for optimizer in internals.optimizers(self.model):
            if int(self.engine.read({"": optimizer.iterations})[""]) == step:
                self.engine.write(optimizer.iterations, end)
        if step == 0:  # Keras begins averages at the first step only, and with zeros
            for variable, average in internals.averages(self.model):
                self.engine.write(average, self.engine.read({"": variable})[""])

    @property
    def halts_exactly(self) -> bool:
        """Whether a step that is not finite changes nothing at all: of several optimizers one may have been applied."""
        return len(internals.optimizers(self.model)) == 1

    def learning_rate(self) -> float:
        """Of the next step."""
        return self.engine.learning_rate()

    # State of a run, for checkpoints.

    def state(self) -> dict[str, np.ndarray]:
        """All that a resumed run needs, by name: weights, state, optimizer, random state, metrics in the making.

        The arrays are those of now: what trains on does not change them. All workers have to ask for them together.
        """
        return self.engine.read(self.variables())

    def signature(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of `state`."""
        variables = self.variables()
        return {name: (tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for name, v in variables.items()}

    def num_bytes(self) -> int:
        """Of all arrays of `state`."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.signature().values())

    def restore(self, arrays: Mapping[str, np.ndarray], path: str) -> None:
        """Puts back all of `state`.

        Metrics in the making are put back only if all of them are as they were: others may be asked for today.

        Raises:
            ConfigError: arrays of weights, optimizer or random state are missing, unknown, or of another form; names
                all of them. Nothing is put back then.
        """
        wanted = self.signature()
        arrays = as_counted(arrays, wanted)
        saved = {name: (tuple(array.shape), array.dtype.name) for name, array in arrays.items()}
        wrong = [name for name in sorted(wanted.keys() | saved.keys()) if wanted.get(name) != saved.get(name)]
        fatal = [name for name in wrong if not name.startswith(METRICS)]
        if fatal:
            listed = "".join(f"\n  {name}: {_form(saved, name)} saved, {_form(wanted, name)} wanted" for name in fatal)
            raise ConfigError(
                "the checkpoint does not fit this model in every variable, so nothing was restored. "
                f"Received: {path}. Use the options it was trained with, or another model_dir:{listed}"
            )
        self.load_state({n: array for n, array in arrays.items() if not (wrong and n.startswith(METRICS))})

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back arrays of `state`, by name, on every replica; what is not among them stays."""
        variables = self.variables()
        for name, array in arrays.items():
            self.engine.write(variables[name], array)

    def variables(self) -> dict[str, Any]:
        """What holds each array of `state`: variables of Keras, and of the engine."""
        averages = internals.averages(self.model)
        named: dict[str, Any] = {f"{AVERAGES}{variable.path}": average for variable, average in averages}
        groups = {
            MODEL: self.model.variables,
            "random/": [self._global_seed],
            METRICS: self.model.metrics_variables,
        }
        for index, optimizer in enumerate(internals.optimizers(self.model)):
            state = [v for v in optimizer.variables if not any(v is average for _, average in averages)]
            groups[f"optimizer_{index}/" if index else "optimizer/"] = state
        for group, variables in groups.items():
            for variable in variables:
                name = f"{group}{variable.path}"
                if name in named and named[name] is not variable:
                    name = f"{name}#{len(named)}"
                named[name] = variable
        return named | {f"{METRICS}{name}": variable for name, variable in self.engine.own().items()}

    def check_integer_state(self) -> None:
        """Counters cannot be averaged, so they have to agree already; better an error than replica 0's view of it."""
        for variable in self.model.non_trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype) or variable.aggregation != "none":
                continue
            first, *others = self.engine.copies(variable)
            if any((copy != first).any() for copy in others):
                raise ConfigError(
                    f"the replicas hold different values of {variable.path}, and only float state can be averaged. "
                    f"Received: dtype {variable.dtype} with aggregation='none'. Give the weight "
                    "aggregation='sum' or 'only_first_replica' in add_weight."
                )


def best_weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights and state of the model among arrays of `Replicated.state`: averages where there are any."""
    weights = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    return {name: arrays.get(f"{AVERAGES}{name.removeprefix(MODEL)}", array) for name, array in weights.items()}


def as_counted(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, tuple]) -> dict[str, np.ndarray]:
    """Arrays of `Replicated.state` with integers of the sizes that a signature wants, where the numbers fit.

    Backends count steps, examples and random numbers in integers of other sizes: what fits is the same state.
    """
    return {name: _as_counted(array, wanted.get(name)) for name, array in arrays.items()}


def _as_counted(array: np.ndarray, wanted: tuple | None) -> np.ndarray:
    if wanted is None or array.dtype.kind not in "iu" or not wanted[1].startswith(("int", "uint")):
        return array
    cast = array.astype(wanted[1])
    return cast if (cast == array).all() else array


def _form(signature: Mapping[str, tuple], name: str) -> str:
    return "none" if name not in signature else "{1} {0}".format(*signature[name])


def _logs(out: Outcome) -> Logs:
    """Scalars as floats; a metric with one value a class becomes `<name>_<class>`."""
    # A mean that nobody updated has no value, least of all 0.
    unused = {name for name, count in out.counts.items() if count == 0}
    plain: Logs = {}
    for name, array in out.logs.items():
        if name in unused:
            continue
        if array.ndim == 0:
            plain[name] = float(array)
        else:
            plain |= {f"{name}_{index}": float(v) for index, v in enumerate(array.ravel())}
    return plain
