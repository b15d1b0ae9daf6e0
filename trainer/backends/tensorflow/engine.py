"""The replicated step on TensorFlow: what one replica does, what the replicas exchange, and loops of it in one call.

functional.py: the step of tensors. once.py: traced once for all replicas. finite.py: whether a step's numbers are
finite, and what becomes of one whose are not. tried.py: not waiting for that. fused.py: updates in few operations.
internals.py: private names.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import internals, refusals
from trainer.backends.tensorflow import internals as own_internals
from trainer.backends.tensorflow import tried
from trainer.backends.tensorflow.cluster import StrategyCluster
from trainer.backends.tensorflow.finite import FiniteCheck
from trainer.backends.tensorflow.functional import FunctionalTrainStep
from trainer.backends.tensorflow.fused import fuse
from trainer.backends.tensorflow.precision import GradientFit
from trainer.errors import ConfigError
from trainer.remat import rematerialise
from trainer.replicated import GRADIENT_NORM, Outcome, Prepare, names_of


class Engine:
    """See `trainer.replicated.Engine`."""

    def __init__(
        self,
        model: keras.Model,
        devices: StrategyCluster,
        *,
        xla: bool,
        microbatches: int,
        remat: Sequence[str],
        prepare: Prepare | None,
    ):
        refusals.check_parts(model, devices.num_replicas, microbatches)
        self.model = model
        self.strategy = devices.strategy
        self._num_replicas = devices.num_replicas
        self._prepare = prepare
        if prepare is not None and xla:
            self._prepare = tf.function(prepare, jit_compile=True, autograph=False)
        with self.strategy.scope():
            self._state = internals.float_state(model)
            self._finite = FiniteCheck(model)
            rematerialise(model, remat)
            self._fit = GradientFit(model)
        for optimizer in internals.optimizers(model):
            fuse(optimizer)
        # What a train_step of the model's own returned when it was traced: of the tensors only the names are used.
        self._returned: Any = None
        self._step = self._pick_step(xla, microbatches)
        self._train_loop = tf.function(self._make_loop(self.train_step), autograph=False)
        tried_loop = self._make_loop(functools.partial(self.train_step, waits=False))
        self._tried_loop = tf.function(tried.keeping(tried_loop, self._local_variables), autograph=False)
        # Not on a TPU, where the waiting is part of what XLA compiles and memory is dear.
        self._tries = devices.kind != "tpu" and self._can_try()
        self._test_loop = tf.function(self._make_loop(self.test_step), autograph=False)
        self._predict = tf.function(self._outputs, autograph=False)

    def _pick_step(self, xla: bool, microbatches: int) -> Callable[..., None]:
        reason = refusals.reason_against_xla(self.model, self._num_replicas) if xla else None
        if reason:
            raise ConfigError(f"--xla=on cannot be had: {reason}. Use --xla=off or one replica")
        if xla:
            own_internals.swallow_first_xla_notice()
        if not internals.overrides(self.model, "train_step"):
            return FunctionalTrainStep(self.model, self._finite, microbatches=microbatches, xla=xla)
        step = self.model.train_step
        compiled = tf.function(step, jit_compile=True, autograph=False) if xla else step
        return lambda data, waits: self._finite.undone_unless_finite(lambda: self._own_step(compiled, data))

    def _can_try(self) -> bool:
        """Whether calls may be tried, and undone if a step is not finite, as scaled gradients are now and then."""
        is_functional = isinstance(self._step, FunctionalTrainStep)
        return is_functional and not internals.scales(self.model.optimizer) and tried.is_small(self._local_variables())

    def _local_variables(self) -> list[tf.Variable]:
        """All that steps change, of each replica of this process."""
        model, optimizers = self.model, internals.optimizers(self.model)
        of_optimizers = [variable for optimizer in optimizers for variable in optimizer.variables]
        of_keras = [*model.variables, *model.metrics_variables, *of_optimizers, internals.global_seed()]
        found = {id(v): v for v in (*map(_value, of_keras), *self.own().values())}
        return [v for each in found.values() for v in self.strategy.experimental_local_results(each)]

    # One step on one replica, in its context and within `tracing`.

    def train_step(self, data: Any, *, waits: bool = True) -> tf.Tensor:
        """Trains on this replica's share of a batch; returns the number of steps done so far, int64.

        Unless it waits for its judgement it has its effect even where its numbers are not finite.
        """
        self._step(data if self._prepare is None else self._prepare(data), waits=waits)
        return tf.convert_to_tensor(self.model.optimizer.iterations)

    def _own_step(self, train_step: Callable, data: Any) -> None:
        self._returned = train_step(data)
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
            def body(waited: tf.Tensor) -> list[tf.Tensor]:
                # An iteration begins when the step before has been issued, and the clock with it, so what it shows is
                # time lost to the input. Nothing waits for the clock.
                asked = tf.timestamp()
                batch = next(iterator)
                with tf.control_dependencies(_local_tensors(self.strategy, batch)):
                    waited += tf.timestamp() - asked
                out = self.strategy.run(step_fn, args=(batch,))
                with tf.control_dependencies(_local_tensors(self.strategy, out)):
                    return [tf.identity(waited)]

            # TensorFlow counts the iterations in any case.
            start = [tf.constant(0.0, tf.float64)]
            [waited] = tf.while_loop(lambda _: True, body, start, parallel_iterations=1, maximum_iterations=steps)
            return {
                "logs": internals.metrics_result(self.model),
                "counts": {m.name: tf.convert_to_tensor(m.count) for m in internals.means(self.model)},
                "waited": waited,
                "halted_at": self._finite.end_of_call(),
                "gradient_norm": self._finite.gradient_norm(),
                "precision": self._fit.values(self._finite.overflow()),
                "learning_rate": tf.convert_to_tensor(self.model.optimizer.learning_rate),
            }

        return loop

    def train(self, batches: Iterator, steps: int, again: Callable[[], Iterator] | None = None) -> Outcome:
        """Also a step that is traced only then may raise what the model's code does."""
        if again is None or not self._tries:
            out = self._run(self._train_loop, batches, steps)
        else:
            out = self._run(self._tried_loop, batches, steps)
            if out["halted_at"] >= 0:
                tried.undo(self._local_variables(), out)
                self._tries = False  # one will not be the last, and each would have its call done twice
                out = self._run(self._train_loop, again(), steps)
        return Outcome(
            **_measured(out),
            halted_at=int(out["halted_at"]),
            gradient_norm=float(out["gradient_norm"]),
            precision={name: float(value) for name, value in out["precision"].items()},
            returned=names_of(self._returned or {}),
            learning_rate=float(out["learning_rate"]),
        )

    def test(self, batches: Iterator, steps: int) -> Outcome:
        return Outcome(**_measured(self._run(self._test_loop, batches, steps)))

    def predict(self, x: Any) -> list[list[np.ndarray]]:
        with self.tracing():
            outputs = [self.strategy.experimental_local_results(output) for output in self._predict(x)]
        return [[tensor.numpy() for tensor in of_replica] for of_replica in zip(*outputs, strict=True)]

    def _outputs(self, x: Any) -> list[tf.Tensor]:
        return self.strategy.run(lambda share: internals.outputs(self.model, share), args=(x,))

    def _run(self, loop: Callable, iterator: Iterator, steps: int) -> dict[str, Any]:
        with self.tracing():
            return loop(iterator, tf.constant(steps))

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Where a step may be traced: Keras then scales no loss, and replicas draw random numbers of their own."""
        masks = own_internals.masks_of_their_own(self._num_replicas)
        as_tensors = own_internals.tapes_of_tensors()
        with self.strategy.scope(), internals.as_if_alone(), masks, own_internals.plain_argmax(), as_tensors:
            yield

    # State.

    def reset_metrics(self) -> None:
        self.model.reset_metrics()
        with self.strategy.scope():
            self._finite.reset()
            self._fit.reset()

    def own(self) -> dict[str, tf.Variable]:
        return {GRADIENT_NORM: self._finite.state} | self._fit.state

    def read(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        summed = {id(variable) for variable in (*self.model.metrics_variables, *self.own().values())}
        arrays = {}
        with self.strategy.scope():
            for name, variable in variables.items():
                value = _value(variable)
                if id(variable) in summed:  # each replica has its own share of these
                    arrays[name] = value.read_value().numpy()
                else:
                    # Shares the buffer, which TensorFlow copies before it writes to it; `numpy()` of a variable copies.
                    arrays[name] = np.asarray(self.strategy.experimental_local_results(value)[0].value())
        return arrays

    def write(self, variable: Any, value: Any) -> None:
        with self.strategy.scope():
            _value(variable).assign(value)

    @contextlib.contextmanager
    def holding(self, values: Sequence[tuple[keras.Variable, keras.Variable]]) -> Iterator[None]:
        with self.strategy.scope():
            before = [variable.value.read_value() for variable, _ in values]
            for variable, other in values:
                variable.assign(other.value)
        try:
            yield  # outside of the scope: what is made there, such as the model of an export, is not of the strategy
        finally:
            with self.strategy.scope():
                for (variable, _), value in zip(values, before, strict=True):
                    variable.assign(value)

    def copies(self, variable: keras.Variable) -> list[np.ndarray]:
        return [copy.numpy() for copy in self.strategy.experimental_local_results(variable.value)]

    def learning_rate(self) -> float:
        return float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def handles(self, variables: Mapping[str, Any]) -> dict[str, tf.Variable]:
        """TensorFlow's own variables behind those of Keras and of the engine."""
        return {name: _value(variable) for name, variable in variables.items()}

    # For `--mode=parity`.

    def run(
        self, function: Callable[[Any], list[tf.Tensor]], shares: Sequence[Any], *, xla: bool
    ) -> list[list[np.ndarray]]:
        step = tf.function(function, jit_compile=True, autograph=False) if xla else function
        given = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.nest.map_structure(tf.constant, shares[context.replica_id_in_sync_group])
        )
        with self.strategy.scope(), internals.as_if_alone():
            found = self.strategy.run(step, args=(given,))
        by_replica = zip(*(self.strategy.experimental_local_results(value) for value in found), strict=True)
        return [[tensor.numpy() for tensor in tensors] for tensors in by_replica]

    def keep_gradients(self) -> Callable[[], dict[str, np.ndarray]]:
        kept: dict[int, tuple[str, tf.Variable]] = {}
        with self.strategy.scope():
            for variable in self.model.trainable_variables:
                mean = tf.Variable(
                    tf.zeros(variable.shape),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.MEAN,
                )
                kept[id(variable)] = (variable.path, mean)

        def keep(optimizer: keras.optimizers.Optimizer, gradients: Sequence, variables: Sequence) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and id(variable) in kept:
                    dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                    kept[id(variable)][1].assign(dense / internals.scale(optimizer))

        for optimizer in internals.optimizers(self.model):
            internals.watch_gradients(optimizer, functools.partial(keep, optimizer))

        def read() -> dict[str, np.ndarray]:
            with self.strategy.scope():
                return {name: mean.read_value().numpy() for name, mean in kept.values()}

        return read


def _value(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _measured(out: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logs": {name: value.numpy() for name, value in out["logs"].items()},
        "counts": {name: float(count) for name, count in out["counts"].items()},
        "waited": float(out["waited"]),
    }


def _local_tensors(strategy: tf.distribute.Strategy, values: Any) -> list[tf.Tensor]:
    return [t for v in tf.nest.flatten(values) for t in strategy.experimental_local_results(v)]
