"""The contenders of `bench_loop`: each prepares a case and returns what trains it, loop by loop.

All use what their library documents, as one who knows it would. On more than one replica they train under
`tf.distribute.MirroredStrategy` on virtual CPU devices.
"""

import contextlib
import functools
import queue
import sys
import threading
from typing import Any

import tensorflow as tf

from scripts.benches import loop_work as work
from scripts.benches.turns import Run


def ours(case: work.Case, optimizer: str, replicas: int, steps: int, num_workers: int = 1) -> Run:
    """The loop of this project, also of several processes."""
    import keras

    from scripts.benches import ours as project

    share = case.batch // (replicas * num_workers)

    def compiled() -> keras.Model:
        model = work.model(keras, case)
        model.compile(
            work.optimizer(keras, optimizer),
            work.loss(keras),
            weighted_metrics=[work.accuracy(keras)],
            jit_compile=False,
        )
        return model

    spec = (keras.KerasTensor((share, *case.shape), "float32"), keras.KerasTensor((share,), "int32"))
    _, run = project.loop(
        compiled, project.connected(replicas if num_workers == 1 else None), spec, lambda: work.batches(case, share)
    )
    return run


@functools.cache
def _strategy(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.get_strategy()
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def _distributed(case: work.Case, strategy: tf.distribute.Strategy) -> Any:
    share = case.batch // strategy.num_replicas_in_sync
    return strategy.distribute_datasets_from_function(lambda _: work.batches(case, share))


def by_hand(case: work.Case, optimizer: str, replicas: int, steps: int) -> Run:
    """A loop in one `tf.function`, loss and accuracy summed in plain variables, no objects of Keras around the model.

    An optimizer of Keras 3 sums the gradients of the replicas itself, all in one call, so each replica divides by the
    global batch.
    """
    import keras

    strategy = _strategy(replicas)
    with strategy.scope():
        model = work.model(keras, case)
        update = work.optimizer(keras, optimizer)
        update.build(model.trainable_variables)
        kind = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        total, correct = (tf.Variable(0.0, trainable=False, **kind) for _ in range(2))

    def step(features: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / case.batch
        weights = model.trainable_variables
        update.apply(tape.gradient(loss, [variable.value for variable in weights]), weights)
        total.assign_add(loss)
        right = tf.equal(tf.argmax(logits, -1, output_type=tf.int32), labels)
        correct.assign_add(tf.reduce_sum(tf.cast(right, tf.float32)) / case.batch)

    @tf.function
    def loop(iterator: Any, steps: tf.Tensor) -> None:
        for _ in tf.range(steps):
            strategy.run(step, args=next(iterator))

    iterator = iter(_distributed(case, strategy))

    def run(steps: int) -> float:
        total.assign(0.0)
        correct.assign(0.0)
        loop(iterator, tf.constant(steps))
        correct.numpy()
        return float(total.numpy()) / steps

    return run


def keras_fit(case: work.Case, optimizer: str, replicas: int, steps: int) -> Run:
    """Keras 3: all steps of a loop in one execution; on replicas, where that fails (keras 19246), one."""
    import keras

    strategy = _strategy(replicas)
    batches = work.batches(case, case.batch)  # it splits them
    return _by_fit(keras, case, optimizer, strategy, batches, steps, steps if replicas == 1 else 1)


def tf_keras_fit(case: work.Case, optimizer: str, replicas: int, steps: int) -> Run:
    """Keras 2, as the package tf-keras keeps it."""
    import tf_keras

    strategy = _strategy(replicas)
    return _by_fit(tf_keras, case, optimizer, strategy, _distributed(case, strategy), steps, steps)


def _by_fit(
    keras: Any,
    case: work.Case,
    optimizer: str,
    strategy: tf.distribute.Strategy,
    batches: Any,
    steps: int,
    steps_per_execution: int,
) -> Run:
    """One `fit` of endless epochs, each a loop: a call of `fit` for each would be measured with it."""
    with strategy.scope():
        model = work.model(keras, case)
        model.compile(
            work.optimizer(keras, optimizer),
            work.loss(keras),
            metrics=[work.accuracy(keras)],
            jit_compile=False,
            steps_per_execution=steps_per_execution,
        )
    turns: queue.SimpleQueue = queue.SimpleQueue()
    found: queue.SimpleQueue = queue.SimpleQueue()

    class Turn(keras.callbacks.Callback):
        """An epoch begins when it is its turn."""

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            turns.get()

        def on_epoch_end(self, epoch: int, logs: dict) -> None:
            found.put(logs["loss"])

    def fit() -> None:
        try:
            model.fit(batches, steps_per_epoch=steps, epochs=sys.maxsize, verbose=0, callbacks=[Turn()])
        except BaseException as error:
            found.put(error)
            raise

    threading.Thread(target=fit, daemon=True).start()

    def run(_: int) -> float:
        turns.put(None)
        loss = found.get()
        if isinstance(loss, BaseException):
            raise loss
        return float(loss)

    return run


def orbit(case: work.Case, optimizer: str, replicas: int, steps: int) -> Run:
    """Model Garden's loop around a step as its tutorials write it, with tf-keras, which is what it is made for."""
    import orbit as library
    import tf_keras

    strategy = _strategy(replicas)

    class Trainer(library.StandardTrainer):
        """Loss and accuracy are metrics, read at the end of a loop."""

        def __init__(self) -> None:
            with strategy.scope():
                self.model = work.model(tf_keras, case)
                self.optimizer = work.optimizer(tf_keras, optimizer)
                self.loss = tf_keras.metrics.Mean("loss")
                self.accuracy = work.accuracy(tf_keras)
            super().__init__(_distributed(case, strategy))

        def train_loop_begin(self) -> None:
            self.loss.reset_states()
            self.accuracy.reset_states()

        def train_step(self, iterator: Any) -> None:
            strategy.run(self._step, args=next(iterator))

        def _step(self, features: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                logits = self.model(features, training=True)
                losses = tf_keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=case.batch)
            weights = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.loss.update_state(losses)
            self.accuracy.update_state(labels, logits)

        def train_loop_end(self) -> dict[str, tf.Tensor]:
            return {"loss": self.loss.result(), "accuracy": self.accuracy.result()}

    trainer = Trainer()
    controller = library.Controller(
        global_step=trainer.optimizer.iterations, trainer=trainer, strategy=strategy, steps_per_loop=steps
    )

    def run(steps: int) -> float:
        with contextlib.redirect_stdout(None):  # it prints every loop
            reached = int(trainer.optimizer.iterations.numpy())
            controller.train(reached + steps, checkpoint_at_completion=False)
        return float(trainer.loss.result())

    return run
