"""The replicated step: one Keras model, trained and evaluated the same under every strategy.

Separation of concerns:
    this file: what one step does on one replica, what the replicas exchange, how many steps one call runs, and the
               state of it all as arrays.
    finite.py: whether a step's numbers are finite, and what becomes of one whose are not.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import internals, refusals
from trainer.errors import ConfigError
from trainer.finite import FiniteCheck
from trainer.functional import FunctionalTrainStep
from trainer.precision import GradientFit
from trainer.remat import rematerialise

# A loop is (begin, end): the steps begin..end-1 run in one call.
Loop = tuple[int, int]
Logs = dict[str, float]
# From what the input yields for one replica to `(x, y)`.
Prepare = Callable[[Any], tuple]
GRADIENT_NORM = "gradient_norm"
# Groups of state, as the names of `state` begin.
MODEL, AVERAGES, METRICS = "model/", "average/", "metrics/"


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one call of the train loop did.

    logs: metrics since their last reset, and the mean norm of the gradients of the global batch before clipping.
    input_wait_secs: that the devices waited for their batches.
    halted_at: index within the call of the first step whose loss or gradients were not finite. It and all steps after
        it have changed nothing. None: there was none.
    """

    logs: Logs
    input_wait_secs: float
    halted_at: int | None


class Replicated:
    """Trains and evaluates a compiled Keras model on every replica of a strategy.

    Args:
        model: compiled `keras.Model`, made under `strategy.scope()`; a `train_step`, `test_step` or `compute_loss` of
            its own is written as for a single device.
        strategy: the strategy of `cluster.connect`.
        batch_spec: `(x, y)` of `keras.KerasTensor`, the shapes and dtypes of one replica's batch.
        xla: compile forward and backward pass of each replica with XLA (CPU and GPU; a TPU always does).
        microbatches: parts of a replica's share that are computed one after the other, see `functional.py`.
        remat: patterns of the names of layers that keep no activations, see `remat.py`.
        prepare: makes what `batch_spec` describes of what the training input yields for one replica: augmentation.

    Raises:
        ConfigError: `xla` with a model whose `train_step` cannot be split into a compiled and an exchanging part, or a
            loss that sums over the batch (its gradient would depend on the number of replicas).
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        batch_spec: tuple,
        *,
        xla: bool = False,
        microbatches: int = 1,
        remat: Sequence[str] = (),
        prepare: Prepare | None = None,
    ):
        self.model = model
        self.strategy = strategy
        self._prepare = prepare
        self._num_replicas = strategy.num_replicas_in_sync
        refusals.check_losses(model.loss, num_replicas=self._num_replicas)
        for optimizer in internals.optimizers(model):
            refusals.check_optimizer(optimizer, num_replicas=self._num_replicas)
        with strategy.scope():
            internals.build(model, batch_spec)
            self._global_seed = internals.global_seed()
            self._state = internals.float_state(model)
            self._finite = FiniteCheck(model, [*internals.step_state(model), *model.metrics_variables])
            rematerialise(model, remat)
            self._fit = GradientFit(model)
        # What train_step returned when it was traced: symbolic tensors, of which only the names are used.
        self._returned: Any = None
        self._train_step = self._pick_train_step(xla, microbatches)
        self._train_loop = tf.function(self._make_loop(self.train_step), autograph=False)
        self._test_loop = tf.function(self._make_loop(self.test_step), autograph=False)

    def _pick_train_step(self, xla: bool, microbatches: int) -> Callable:
        reason = refusals.reason_against_xla(self.model, self.strategy) if xla else None
        if reason:
            raise ConfigError(f"--xla=on cannot be had: {reason}. Use --xla=off or one replica")
        reason = refusals.reason_against_microbatches(self.model, self.strategy) if microbatches > 1 else None
        if reason:
            raise ConfigError(f"--microbatches={microbatches} cannot be had: {reason}")
        if xla:
            internals.swallow_first_xla_notice()
        if internals.overrides(self.model, "train_step"):
            step = self.model.train_step
            return tf.function(step, jit_compile=True, autograph=False) if xla else step
        if xla or microbatches > 1:
            return FunctionalTrainStep(self.model, microbatches=microbatches, xla=xla)
        return self.model.train_step

    # One step on one replica, in its context and within `tracing`.

    def train_step(self, data: Any) -> tf.Tensor:
        """Trains on this replica's share of a batch; returns the number of steps done so far, int64."""
        if self._prepare is not None:
            data = self._prepare(data)
        self._finite.undone_unless_finite(lambda: self._step(data))
        return tf.convert_to_tensor(self.model.optimizer.iterations)

    def _step(self, data: Any) -> None:
        self._returned = self._train_step(data)
        replica = tf.distribute.get_replica_context()
        if self._state and self._num_replicas > 1:
            means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [v.value.read_value() for v in self._state])
            for variable, mean in zip(self._state, means, strict=True):
                variable.assign(mean)

    def test_step(self, data: Any) -> tf.Tensor:
        """Evaluates this replica's `(x, y, mask)`, mask [b] float32 with 0 for padding; returns how many are real."""
        internals.test_step(self.model, data)
        return tf.reduce_sum(data[-1])

    # Many steps in one call.

    def _make_loop(self, step_fn: Callable) -> Callable:
        """The host loop: fetch, run on every replica, repeat; on a TPU the device never waits for Python."""

        def loop(iterator: Iterator, steps: tf.Tensor) -> dict[str, Any]:
            def body(done: tf.Tensor, waited: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                # The clock starts when the step before has been issued, so what it shows is time lost to the input.
                with tf.control_dependencies([done]):
                    asked = tf.timestamp()
                with tf.control_dependencies([asked]):
                    batch = next(iterator)
                with tf.control_dependencies(_local_tensors(self.strategy, batch)):
                    waited += tf.timestamp() - asked
                out = self.strategy.run(step_fn, args=(batch,))
                with tf.control_dependencies(_local_tensors(self.strategy, out)):
                    return done + 1, waited

            start = (tf.constant(0), tf.constant(0.0, tf.float64))
            _, waited = tf.while_loop(lambda done, _: done < steps, body, start, parallel_iterations=1)
            return {
                "logs": self.model.get_metrics_result(),
                "counts": {m.name: tf.convert_to_tensor(m.count) for m in internals.means(self.model)},
                "waited": waited,
                "halted_at": self._finite.end_of_call(),
                "gradient_norm": self._finite.gradient_norm(),
                "precision": self._fit.values(self._finite.overflow()),
            }

        return loop

    def run_train_loop(self, iterator: Iterator, steps: int) -> Trained:
        """Trains `steps` steps, or those before one whose loss or gradients are not finite.

        Raises:
            ConfigError: `train_step` returns a value that no metric of the model keeps, so that what it is over steps
                and replicas cannot be told.
        """
        out = self._run(self._train_loop, iterator, steps)
        logs = _logs(out)
        lost = [name for name in self._returned or () if name not in logs and f"{name}_0" not in logs]
        norm, halted_at = float(out["gradient_norm"]), int(out["halted_at"])
        if lost and halted_at != 0:  # where no step counts, no metric has been kept
            raise ConfigError(
                f"the train_step of {type(self.model).__name__} returns {', '.join(lost)}, which no metric of the "
                "model keeps over steps and replicas. Make it a keras.metrics.Mean attribute of the model of that "
                "name, update it in train_step and return its result()"
            )
        gradients = {GRADIENT_NORM: norm} | {name: float(value) for name, value in out["precision"].items()}
        for name, value in gradients.items():
            if np.isfinite(value):
                logs.setdefault(name, value)
        # The clock of the machine may be set while a loop runs.
        return Trained(logs, max(0.0, float(out["waited"])), None if halted_at < 0 else halted_at)

    def _run(self, loop: Callable, iterator: Iterator, steps: int) -> dict[str, Any]:
        with self.tracing():
            return loop(iterator, tf.constant(steps))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Where a step may be traced: Keras then scales no loss, and replicas draw random numbers of their own."""
        with self.strategy.scope(), internals.as_if_alone(), internals.masks_of_their_own(self._num_replicas):
            yield

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
                logs = _logs(self._run(self._test_loop, iterator, end - begin))
                if end < loops[-1][1] and not goes_on():
                    logs = None
                    break
        self.reset_metrics()
        return logs

    def reset_metrics(self) -> None:
        """Starts all means anew."""
        self.model.reset_metrics()
        with self.strategy.scope():
            self._finite.reset()
            self._fit.reset()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Where weights are their moving averages, if an optimizer keeps any: what is evaluated and exported.

        Keras' `fit` writes them over the weights, at the end or every so often; a run could not go on from there.
        """
        pairs = internals.averages(self.model)
        with self.strategy.scope():
            before = [variable.value.read_value() for variable, _ in pairs]
            for variable, average in pairs:
                variable.assign(average.value)
        try:
            yield  # outside of the scope: what is made there, such as the model of an export, is not of the strategy
        finally:
            with self.strategy.scope():
                for (variable, _), value in zip(pairs, before, strict=True):
                    variable.assign(value)

    def pass_over(self, step: int, end: int) -> None:
        """Counts the steps `step`..`end`-1 as done, so that what depends on the step goes on with the data."""
        with self.strategy.scope():
            for optimizer in internals.optimizers(self.model):
                if int(optimizer.iterations.numpy()) == step:
                    optimizer.iterations.assign(end)
            if step == 0:  # Keras begins averages at the first step only, and with zeros
                for variable, average in internals.averages(self.model):
                    average.assign(variable.value)

    @property
    def halts_exactly(self) -> bool:
        """Whether a step that is not finite changes nothing at all: of several optimizers one may have been applied."""
        return len(internals.optimizers(self.model)) == 1

    def learning_rate(self) -> float:
        """Of the next step."""
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    # State of a run, for checkpoints.

    def state(self) -> dict[str, np.ndarray]:
        """All that a resumed run needs, by name: weights, state, optimizer, random state, metrics in the making.

        The arrays are those of now: what trains on does not change them. All workers have to ask for them together.
        """
        arrays = {}
        with self.strategy.scope():
            for name, variable in self.variables().items():
                if name.startswith(METRICS):  # each replica has its own share of these
                    arrays[name] = variable.read_value().numpy()
                else:
                    # Shares the buffer, which TensorFlow copies before it writes to it; `numpy()` of a variable copies.
                    arrays[name] = np.asarray(self.strategy.experimental_local_results(variable)[0].value())
        return arrays

    def signature(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of `state`."""
        return {name: (tuple(v.shape), v.dtype.name) for name, v in self.variables().items()}

    def num_bytes(self) -> int:
        """Of all arrays of `state`."""
        return sum(v.dtype.size * v.shape.num_elements() for v in self.variables().values())

    def restore(self, arrays: Mapping[str, np.ndarray], path: str) -> None:
        """Puts back all of `state`.

        Metrics in the making are put back only if all of them are as they were: others may be asked for today.

        Raises:
            ConfigError: arrays of weights, optimizer or random state are missing, unknown, or of another form; names
                all of them. Nothing is put back then.
        """
        wanted = self.signature()
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
        with self.strategy.scope():
            for name, array in arrays.items():
                variables[name].assign(array)

    def variables(self) -> dict[str, tf.Variable]:
        """What holds each array of `state`."""
        averages = internals.averages(self.model)
        named = {f"{AVERAGES}{variable.path}": average.value for variable, average in averages}
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
                if name in named and named[name] is not variable.value:
                    name = f"{name}#{len(named)}"
                named[name] = variable.value
        counts = {GRADIENT_NORM: self._finite.state} | self._fit.state
        return named | {f"{METRICS}{name}": variable for name, variable in counts.items()}

    def check_integer_state(self) -> None:
        """Counters cannot be averaged, so they have to agree already; better an error than replica 0's view of it."""
        for variable in self.model.non_trainable_variables:
            copies = self.strategy.experimental_local_results(variable.value)
            if keras.backend.is_float_dtype(variable.dtype) or variable.aggregation != "none" or len(copies) < 2:
                continue
            if any((copy.numpy() != copies[0].numpy()).any() for copy in copies[1:]):
                raise ConfigError(
                    f"the replicas hold different values of {variable.path}, and only float state can be averaged. "
                    f"Received: dtype {variable.dtype} with aggregation='none'. Give the weight "
                    "aggregation='sum' or 'only_first_replica' in add_weight."
                )


def best_weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights and state of the model among arrays of `Replicated.state`: averages where there are any."""
    weights = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    return {name: arrays.get(f"{AVERAGES}{name.removeprefix(MODEL)}", array) for name, array in weights.items()}


def _form(signature: Mapping[str, tuple], name: str) -> str:
    return "none" if name not in signature else "{1} {0}".format(*signature[name])


def _local_tensors(strategy: tf.distribute.Strategy, values: Any) -> list[tf.Tensor]:
    return [t for v in tf.nest.flatten(values) for t in strategy.experimental_local_results(v)]


def _logs(out: Mapping[str, Any]) -> Logs:
    """Scalars as floats; a metric with one value a class becomes `<name>_<class>`."""
    # A mean that nobody updated has no value, least of all 0.
    unused = {name for name, count in out["counts"].items() if float(count) == 0}
    plain: Logs = {}
    for name, value in out["logs"].items():
        array = value.numpy()
        if name in unused:
            continue
        if array.ndim == 0:
            plain[name] = float(array)
        else:
            plain |= {f"{name}_{index}": float(v) for index, v in enumerate(array.ravel())}
    return plain
