"""The replicated loop: one Keras model, trained and evaluated the same under every strategy.

Separation of concerns:
    this file: what one step does on one replica, what the replicas exchange, how many steps one call runs, and when
               Keras' callbacks hear of it. All private names of Keras are touched here and nowhere else.
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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import losses as keras_losses
from keras.src.random import seed_generator as keras_seed_generator

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
        for optimizer in _optimizers(model):
            check_optimizer(optimizer, num_replicas=self._num_replicas)
        self._build(batch_spec)
        self._state = _float_state(model)
        # What train_step returned when it was traced: symbolic tensors, of which only the names are used.
        self._returned: Any = None
        for optimizer in _optimizers(model):
            _average_gradients_first(optimizer)
        self._train_step = self._pick_train_step(xla)
        self._train_loop = tf.function(self._make_loop(self._train_one), autograph=False)
        self._test_loop = tf.function(self._make_loop(self._test_one), autograph=False)

    def _build(self, batch_spec: tuple) -> None:
        """Creates every variable from static shapes; `fit` of Keras would eat a batch for it."""
        with self.strategy.scope():
            self.model._symbolic_build(data_batch=batch_spec)
            for optimizer in _optimizers(self.model):
                if not optimizer.built:
                    optimizer.build(self.model.trainable_variables)
            self._global_seed = keras_seed_generator.global_seed_generator()

    def _pick_train_step(self, xla: bool) -> Callable:
        if not xla:
            return self.model.train_step
        reason = reason_against_xla(self.model, self.strategy)
        if reason:
            raise ConfigError(f"--xla=on cannot be had: {reason}. Use --xla=off or one replica")
        if _overrides(self.model, "train_step"):
            return tf.function(self.model.train_step, jit_compile=True, autograph=False)
        return _CompiledTrainStep(self.model)

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
        model = self.model
        if _overrides(model, "test_step"):
            model.test_step(data)
        else:
            x, y, mask = data
            y_pred = model(x, training=False)
            real = tf.reduce_sum(mask)
            # Keras divides by the batch size; these weights make it the mean over the real examples, whatever the rank
            # of the loss, and leave regularisation losses alone.
            weights = mask * tf.math.divide_no_nan(tf.cast(tf.size(mask), mask.dtype), real)
            loss = model._compute_loss(x, y, y_pred, weights, training=False)
            model._loss_tracker.update_state(loss, sample_weight=real)
            model.compute_metrics(x, y, y_pred, sample_weight=mask)
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
            counts = {m.name: tf.convert_to_tensor(m.count) for m in _means(self.model)}
            return self.model.get_metrics_result(), counts, waited

        return loop

    def run_train_loop(self, iterator: Iterator, steps: int) -> tuple[Logs, float]:
        """Trains `steps` steps; returns the metrics since their last reset and the seconds spent waiting for input.

        Raises:
            ConfigError: `train_step` returns a value that no metric of the model keeps, so that what it is over steps
                and replicas cannot be told.
        """
        logs, waited = self._run(self._train_loop, iterator, steps)
        lost = [name for name in self._returned or () if not any(log.startswith(name) for log in logs)]
        if lost:
            raise ConfigError(
                f"the train_step of {type(self.model).__name__} returns {', '.join(lost)}, which no metric of the "
                "model keeps over steps and replicas. Make it a keras.metrics.Mean attribute of the model of that "
                "name, update it in train_step and return its result()"
            )
        return logs, waited

    def _run(self, loop: Callable, iterator: Iterator, steps: int) -> tuple[Logs, float]:
        with self.strategy.scope(), _as_if_alone(), _masks_of_their_own(self._num_replicas):
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
            for optimizer in _optimizers(self.model):
                optimizer.finalize_variable_values(self.model.trainable_variables)

    # State of a run, for checkpoints.

    def variables(self) -> dict[str, tf.Variable]:
        """All that a resumed run needs: weights, state, optimizer and random state, by name."""
        named: dict[str, tf.Variable] = {}
        groups = {"model": self.model.variables, "random": [self._global_seed.state]}
        for index, optimizer in enumerate(_optimizers(self.model)):
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
            if variable.dtype.startswith("float") or variable.aggregation != "none" or len(copies) < 2:
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
    own = _overrides(model, "train_step")
    if own:
        return f"the train_step of {own} exchanges gradients inside the step, which XLA cannot do on CPU and GPU"
    exchanging = [layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False)]
    if exchanging:
        return f"the layer {exchanging[0]} is synchronized: it exchanges statistics inside the step, as XLA cannot"
    return None


class _CompiledTrainStep:
    """Keras' train step with forward and backward pass as one XLA program of tensors only.

    XLA cannot compile a step that reads the variables of another replica's device or exchanges gradients (keras 19005,
    tensorflow 53140): so variables go in and come out as tensors, and the optimizer runs outside.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._trainable = model.trainable_variables
        self._state = model.non_trainable_variables + model.metrics_variables
        self._compiled = tf.function(self._forward_backward, jit_compile=True, autograph=False)

    def __call__(self, data: tuple) -> dict[str, tf.Tensor]:
        optimizer = self._model.optimizer
        weights = [tf.convert_to_tensor(v.value) for v in self._trainable]
        state = [tf.convert_to_tensor(v.value) for v in self._state]
        loss_scale = optimizer.scale_loss(tf.constant(1.0))
        gradients, new_state = self._compiled(weights, state, data, loss_scale)
        for variable, value in zip(self._state, new_state, strict=True):
            variable.assign(value)
        optimizer.apply_gradients(zip(gradients, self._trainable, strict=True))
        return self._model.get_metrics_result()

    def _forward_backward(self, weights: list, state: list, data: tuple, loss_scale: tf.Tensor) -> tuple[list, list]:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        mapping = [*zip(self._trainable, weights, strict=True), *zip(self._state, state, strict=True)]
        with tf.GradientTape() as tape, keras.StatelessScope(mapping, collect_losses=True) as scope:
            tape.watch(weights)
            y_pred = model(x, training=True)
            loss = model._compute_loss(x, y, y_pred, sample_weight, training=True)
            model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            scaled = loss * tf.cast(loss_scale, loss.dtype)
        gradients = tape.gradient(scaled, weights)
        return gradients, [scope.get_current_value(v) for v in self._state]


def _average_gradients_first(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `optimizer` see the gradients of the global batch before it does anything with them.

    Keras clips and checks each replica's own gradients and sums them afterwards, so what it clips depends on how many
    replicas share the batch; and it refuses to accumulate over steps on more than one replica.
    """
    apply = optimizer.apply

    def averaged_apply(gradients: Sequence, trainable_variables: Sequence | None = None) -> None:
        replica = tf.distribute.get_replica_context()
        # Dense: on a TPU they are so anyway, and slices of several replicas do not add up elsewhere.
        present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        means = iter(replica.all_reduce(tf.distribute.ReduceOp.MEAN, present) if present else [])
        apply([None if g is None else next(means) for g in gradients], trainable_variables)

    optimizer.apply = averaged_apply
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner._all_reduce_sum_gradients = list


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """While a step is traced, Keras does not scale losses by the number of replicas.

    Keras scales only what passes through its own reductions, and expects a SUM of gradients; a loss function that
    returns a scalar, or a `compute_loss` or `train_step` of the user's own, is then wrong by a factor of N, silently.
    """
    module = keras_losses.loss
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    saved = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, lambda value: value)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


@contextlib.contextmanager
def _masks_of_their_own(num_replicas: int) -> Iterator[None]:
    """While a step is traced, each replica draws its own random numbers (keras 20612).

    The stored state stays the same on all replicas and moves on as ever; only what is drawn from it depends on the
    replica. State and replica decide, so a run that restores the state draws what it would have drawn.
    """
    generator = keras_seed_generator.SeedGenerator
    following = generator.next

    def next_of_replica(self: Any, ordered: bool = True) -> tf.Tensor:
        seed = following(self, ordered)
        replica = tf.distribute.get_replica_context()
        if replica is None:
            return seed
        return tf.random.experimental.stateless_fold_in(seed, replica.replica_id_in_sync_group)  # [2] int64

    if num_replicas > 1:
        generator.next = next_of_replica
    try:
        yield
    finally:
        generator.next = following


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizer, then any others it holds (a GAN's second one)."""
    held = [model.optimizer, *(v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer))]
    return list({id(o): o for o in held if o is not None}.values())


def _float_state(model: keras.Model) -> list[keras.Variable]:
    """State that steps update and no aggregation keeps alike: batch norm's statistics, not frozen weights."""
    found = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    unique = {id(v): v for v in found if v.dtype.startswith(("float", "bfloat")) and v.aggregation == "none"}
    return list(unique.values())


def _overrides(model: keras.Model, method: str) -> str | None:
    """Name of the class that replaces a method of `keras.Model`, if one does."""
    replaced = getattr(type(model), method) is not getattr(keras.Model, method)
    return type(model).__name__ if replaced else None


def _local_tensors(strategy: tf.distribute.Strategy, values: Any) -> list[tf.Tensor]:
    return [t for v in tf.nest.flatten(values) for t in strategy.experimental_local_results(v)]


def _means(model: keras.Model) -> list[keras.metrics.Mean]:
    """All metrics that are means, those given to `compile` among them."""
    metrics = [inner for outer in model.metrics for inner in (outer, *getattr(outer, "metrics", []))]
    return list({id(m): m for m in metrics if isinstance(m, keras.metrics.Mean)}.values())


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
