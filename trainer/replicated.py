"""The replicated loop: one Keras model, trained and evaluated the same under every strategy.

Separation of concerns:
    this file: what one step does on one replica, what the replicas exchange, how many steps one call runs, and when
               Keras' callbacks hear of it.
    internals.py: all that touches private names of Keras.
    plan.py:   where loops and segments begin and end.
    cluster.py: which devices there are.

Every replica computes on its share of the global batch *as if it were alone*: losses are means over its own examples
and nothing is scaled by the number of replicas. What must agree is then averaged over the replicas, once a step:

    gradients        one all-reduce (mean) of the whole list, before anything clips, checks, decays or applies them
    float state      moving statistics of batch norm and the like, after the step (Keras leaves each replica its own)
    metrics          summed over replicas when read, once a loop

Equal shares make the mean of means the mean over the global batch, so 1, 2 or N replicas train alike. What Keras 3 does
instead, and the upstream issues, stand in the table of the README ("Why not keras.Model.fit").
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer import internals
from trainer.errors import ConfigError

# A loop is (begin, end): the steps begin..end-1 run in one call. A segment is the loops up to one evaluation.
Loop = tuple[int, int]
Logs = dict[str, float]


class Replicated:
    """Trains and evaluates a compiled Keras model on every replica of a strategy.

    Args:
        model: compiled `keras.Model`, made under `strategy.scope()`; a `train_step`, `test_step` or `compute_loss` of
            its own is written as for a single device.
        strategy: the strategy of `cluster.connect`.
        batch_spec: `(x, y)` of `keras.KerasTensor`, the shapes and dtypes of one replica's batch.
        xla: compile forward and backward pass of each replica with XLA (CPU and GPU; a TPU always does).

    Raises:
        ConfigError: `xla` with a model whose `train_step` cannot be split into a compiled and an exchanging part, or a
            loss that sums over the batch (its gradient would depend on the number of replicas).
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy, batch_spec: tuple, *, xla: bool = False):
        self.model = model
        self.strategy = strategy
        # How far the run is, for callbacks: steps done, and seconds the last loop waited for input.
        self.step = 0
        self.input_wait_secs = 0.0
        self._num_replicas = strategy.num_replicas_in_sync
        check_losses(model.loss, num_replicas=self._num_replicas)
        for optimizer in internals.optimizers(model):
            check_optimizer(optimizer, num_replicas=self._num_replicas)
        with strategy.scope():
            internals.build(model, batch_spec)
            self._global_seed = internals.global_seed()
        self._state = internals.float_state(model)
        # What train_step returned when it was traced: symbolic tensors, of which only the names are used.
        self._returned: Any = None
        for optimizer in internals.optimizers(model):
            internals.average_gradients_first(optimizer)
        self._train_step = self._pick_train_step(xla)
        self._train_loop = tf.function(self._make_loop(self._train_one), autograph=False)
        self._test_loop = tf.function(self._make_loop(self._test_one), autograph=False)

    def _pick_train_step(self, xla: bool) -> Callable:
        if not xla:
            return self.model.train_step
        reason = reason_against_xla(self.model, self.strategy)
        if reason:
            raise ConfigError(f"--xla=on cannot be had: {reason}. Use --xla=off or one replica")
        internals.swallow_first_xla_notice()
        if internals.overrides(self.model, "train_step"):
            return tf.function(self.model.train_step, jit_compile=True, autograph=False)
        return internals.CompiledTrainStep(self.model)

    # One step on one replica.

    def _train_one(self, data: Any) -> tf.Tensor:
        self._returned = self._train_step(data)
        replica = tf.distribute.get_replica_context()
        if self._state and self._num_replicas > 1:
            means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [v.value.read_value() for v in self._state])
            for variable, mean in zip(self._state, means, strict=True):
                variable.assign(mean)
        return tf.convert_to_tensor(self.model.optimizer.iterations)

    def _test_one(self, data: Any) -> tf.Tensor:
        """Evaluates `(x, y, mask)`, mask [b] float32 with 0 for padding, so that each real example counts once."""
        internals.test_step(self.model, data)
        return tf.reduce_sum(data[-1])

    # Many steps in one call.

    def _make_loop(self, step_fn: Callable) -> Callable:
        """The host loop: fetch, run on every replica, repeat; on a TPU the device never waits for Python."""

        def loop(iterator: Iterator, steps: tf.Tensor) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
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
            counts = {m.name: tf.convert_to_tensor(m.count) for m in internals.means(self.model)}
            return self.model.get_metrics_result(), counts, waited

        return loop

    def run_train_loop(self, iterator: Iterator, steps: int) -> tuple[Logs, float]:
        """Trains `steps` steps; returns the metrics since their last reset and the seconds spent waiting for input.

        Raises:
            ConfigError: `train_step` returns a value that no metric of the model keeps, so that what it is over steps
                and replicas cannot be told.
        """
        logs, waited = self._run(self._train_loop, iterator, steps)
        lost = [name for name in self._returned or () if name not in logs and f"{name}_0" not in logs]
        if lost:
            raise ConfigError(
                f"the train_step of {type(self.model).__name__} returns {', '.join(lost)}, which no metric of the "
                "model keeps over steps and replicas. Make it a keras.metrics.Mean attribute of the model of that "
                "name, update it in train_step and return its result()"
            )
        return logs, waited

    def _run(self, loop: Callable, iterator: Iterator, steps: int) -> tuple[Logs, float]:
        with self.strategy.scope(), internals.as_if_alone(), internals.masks_of_their_own(self._num_replicas):
            logs, counts, waited = loop(iterator, tf.constant(steps))
        # A mean that nobody updated has no value, least of all 0.
        unused = {name for name, count in counts.items() if float(count) == 0}
        return _plain({name: value for name, value in logs.items() if name not in unused}), float(waited)

    def evaluate(self, iterator: Iterator, loops: Sequence[Loop]) -> Logs:
        """Metrics over all examples of `iterator`, which yields `(x, y, mask)`; resets them before and after."""
        self.model.reset_metrics()
        logs: Logs = {}
        for begin, end in loops:
            logs, _ = self._run(self._test_loop, iterator, end - begin)
        self.model.reset_metrics()
        return logs

    def fit(
        self,
        iterator: Iterator,
        segments: Sequence[Sequence[Loop]],
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        evaluate: Callable[[], Logs] | None = None,
        verbose: int = 1,
    ) -> None:
        """Trains through `segments`, speaking to callbacks as `keras.Model.fit` does, a segment being its epoch.

        Keras' own `fit` strides over an epoch in equal steps and makes a new iterator for each call; here a loop ends
        exactly where something is due, and the iterator is the caller's.

        Args:
            iterator: yields the global batches, starting with the first step's.
            segments: loops of consecutive steps; `evaluate` runs after each segment.
            callbacks: `on_train_batch_end` gets the index of the last step done, once a loop.
            evaluate: its logs reach `on_epoch_end` as `val_<name>`.
            verbose: 0 silent, 1 progress bar, 2 one line a segment.
        """
        model = self.model
        container = keras.callbacks.CallbackList(
            list(callbacks), add_progbar=verbose > 0, verbose=verbose, epochs=len(segments), model=model, steps=None
        )
        model.stop_training = False
        model.reset_metrics()
        if segments:
            self.step = segments[0][0][0]
        container.on_train_begin()
        last_step = segments[-1][-1][1] if segments else 0
        logs: Logs = {}
        for number, segment in enumerate(segments):
            first = segment[0][0]
            container.set_params({"verbose": verbose, "epochs": len(segments), "steps": segment[-1][1] - first})
            container.on_epoch_begin(number)
            for begin, end in segment:
                container.on_train_batch_begin(begin - first)
                logs, self.input_wait_secs = self.run_train_loop(iterator, end - begin)
                self.step = end
                if end == last_step:
                    self._finalize()
                container.on_train_batch_end(end - first - 1, logs)
                if model.stop_training:
                    break
            if evaluate is not None and not model.stop_training:
                logs |= {f"val_{name}": value for name, value in evaluate().items()}
            container.on_epoch_end(number, logs)
            if model.stop_training:
                break
        container.on_train_end(logs)

    def _finalize(self) -> None:
        """Lets an optimizer that keeps a moving average of the weights write it back, as Keras' `fit` does."""
        with self.strategy.scope():
            for optimizer in internals.optimizers(self.model):
                optimizer.finalize_variable_values(self.model.trainable_variables)

    # State of a run, for checkpoints.

    def variables(self) -> dict[str, tf.Variable]:
        """All that a resumed run needs: weights, state, optimizer and random state, by name."""
        named: dict[str, tf.Variable] = {}
        groups = {"model": self.model.variables, "random": [self._global_seed]}
        for index, optimizer in enumerate(internals.optimizers(self.model)):
            groups[f"optimizer_{index}" if index else "optimizer"] = optimizer.variables
        for group, variables in groups.items():
            for variable in variables:
                name = f"{group}/{variable.path}"
                if name in named and named[name] is not variable.value:
                    name = f"{name}#{len(named)}"
                named[name] = variable.value
        return named

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


def check_losses(losses: Any, *, num_replicas: int) -> None:
    """Raises ConfigError for a loss that sums over the batch, on several replicas."""
    for loss in keras.tree.flatten(losses):
        if num_replicas > 1 and getattr(loss, "reduction", None) == "sum":
            raise ConfigError(
                f"the loss {loss.name} sums over the batch, so its gradient would depend on the number of replicas. "
                f"Received: reduction='sum' on {num_replicas} replicas. Use the default reduction "
                "'sum_over_batch_size' and scale the learning rate"
            )


def check_optimizer(optimizer: keras.optimizers.Optimizer, *, num_replicas: int) -> None:
    """Raises ConfigError for an optimizer that accumulates gradients, which Keras cannot on several replicas."""
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
    if num_replicas > 1 and steps:
        raise ConfigError(
            f"Keras accumulates gradients on one replica only. Received: gradient_accumulation_steps={steps} on "
            f"{num_replicas} replicas. Use one replica, or more replicas with a smaller share each"
        )


def reason_against_xla(model: keras.Model, strategy: tf.distribute.Strategy) -> str | None:
    """Why the train step cannot be compiled on CPU and GPU, or None."""
    if strategy.num_replicas_in_sync == 1:
        return None
    own = internals.overrides(model, "train_step")
    if own:
        return f"the train_step of {own} exchanges gradients inside the step, which XLA cannot do on CPU and GPU"
    exchanging = [layer.name for layer in internals.layers(model) if getattr(layer, "synchronized", False)]
    if exchanging:
        return f"the layer {exchanging[0]} is synchronized: it exchanges statistics inside the step, as XLA cannot"
    return None


def _local_tensors(strategy: tf.distribute.Strategy, values: Any) -> list[tf.Tensor]:
    return [t for v in tf.nest.flatten(values) for t in strategy.experimental_local_results(v)]


def _plain(logs: dict[str, tf.Tensor]) -> Logs:
    """Scalars as floats; a metric with one value a class becomes `<name>_<class>`."""
    plain: Logs = {}
    for name, value in logs.items():
        array = value.numpy()
        if array.ndim == 0:
            plain[name] = float(array)
        else:
            plain |= {f"{name}_{index}": float(v) for index, v in enumerate(array.ravel())}
    return plain
