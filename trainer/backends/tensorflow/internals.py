"""Every name that TensorFlow, and Keras for it alone, keep private; all else of Keras is in `trainer.internals`.

`tests/test_internals.py` names what has moved when a version changes. The supported ranges stand in setup.cfg.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import stateless_scope as keras_stateless_scope
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.random import seed_generator as keras_seed_generator
from tensorflow.python.distribute import mirrored_run

from trainer import internals

Apply = Callable[[Sequence, Callable[[Sequence], None]], None]


def before_apply(optimizer: keras.optimizers.Optimizer, intervene: Apply) -> None:
    """Makes `intervene(gradients, apply)` take the place of the optimizer's `apply`, which it calls or not.

    Keras clips and checks each replica's own gradients and sums them afterwards, so what it clips depends on how many
    replicas share the batch; and it refuses to accumulate over steps on more than one replica. Whoever intervenes gives
    the optimizer gradients that are those of the global batch already.
    """
    apply = optimizer.apply

    def intervened(gradients: Sequence, trainable_variables: Sequence | None = None) -> None:
        intervene(gradients, lambda final: apply(final, trainable_variables))

    optimizer.apply = intervened
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner._all_reduce_sum_gradients = list


def once_a_step(optimizer: keras.optimizers.Optimizer, prepare: Callable[[Any], list[tf.Tensor]]) -> None:
    """Gives each `update_step` what `prepare(learning_rate)` returns in place of the learning rate.

    It is called once a step on each replica, not once a variable.
    """
    update = optimizer._backend_update_step

    def prepared(gradients: Sequence, variables: Sequence, learning_rate: Any) -> None:
        update(gradients, variables, prepare(learning_rate))

    optimizer._backend_update_step = prepared


def decay_others(optimizer: keras.optimizers.Optimizer, leaves: Callable[[Any], bool]) -> None:
    """Keeps Keras from decaying the variables that it `leaves` to their update."""
    decay = optimizer._apply_weight_decay

    def decay_rest(variables: Sequence) -> None:
        decay([variable for variable in variables if not leaves(variable)])

    optimizer._apply_weight_decay = decay_rest


def slot(optimizer: keras.optimizers.Optimizer, slots: Sequence[keras.Variable], variable: Any) -> tf.Variable:
    """What an optimizer keeps for `variable` in one of `slots`, as `update_step` is given the variable."""
    return internals.slot(optimizer, slots, variable).value


def run_if(condition: tf.Tensor, function: Callable[[Sequence], None], tensors: Sequence) -> None:
    """Runs `function(tensors)` on a replica where `condition`, the same on all replicas, holds.

    Under MirroredStrategy and its like an optimizer meets the other replicas' threads, which it cannot do from within
    a branch; so the threads meet first, and each branch starts threads of its own (as Keras' LossScaleOptimizer does).
    """
    replica = tf.distribute.get_replica_context()
    if not isinstance(replica, mirrored_run._MirroredReplicaContext):
        _branch(condition, lambda: function(tensors))
        return

    def meet(strategy: tf.distribute.Strategy, condition: Any, tensors: Sequence) -> None:
        first = strategy.experimental_local_results(condition)[0]
        _branch(first, lambda: strategy.extended.call_for_each_replica(function, args=(tensors,)))

    replica.merge_call(meet, args=(condition, tensors))


def takes_turns(replica: tf.distribute.ReplicaContext) -> bool:
    """Whether a step is traced once for each of several replicas of this process, in threads that take turns.

    Not on a TPU, whose replicas share one trace anyway.
    """
    mirrored = isinstance(replica, mirrored_run._MirroredReplicaContext)
    return mirrored and len(replica.strategy.extended.worker_devices) > 1


def _branch(condition: tf.Tensor, function: Callable[[], Any]) -> None:
    def then() -> None:  # whatever `function` returns: both branches must return the same
        function()

    tf.cond(condition, then, lambda: None)


@contextlib.contextmanager
def masks_of_their_own(num_replicas: int) -> Iterator[None]:
    """While a step is traced, each replica draws its own random numbers (keras 20612).

    The stored state stays the same on all replicas and moves on as ever; only what is drawn from it depends on the
    replica. State and replica decide, so a run that restores the state draws what it would have drawn. Keras has a
    generator a thread for what is drawn without one, and replicas have threads: they all take that of this thread.
    """
    generator = keras_seed_generator.SeedGenerator
    following, of_thread = generator.next, keras_seed_generator.global_seed_generator
    shared = of_thread()

    def next_of_replica(self: Any, ordered: bool = True) -> tf.Tensor:
        seed = following(self, ordered)
        replica = tf.distribute.get_replica_context()
        if replica is None:
            return seed
        return tf.random.experimental.stateless_fold_in(seed, replica.replica_id_in_sync_group)  # [2] int64

    if num_replicas > 1:
        generator.next = next_of_replica
        keras_seed_generator.global_seed_generator = lambda: shared
    try:
        yield
    finally:
        generator.next, keras_seed_generator.global_seed_generator = following, of_thread


@contextlib.contextmanager
def plain_argmax() -> Iterator[None]:
    """While a step is traced, `keras.ops.argmax` is TensorFlow's, to which -0 is 0, as to NumPy and JAX.

    Keras puts seven operations before it that make -0 the less; in a small step the accuracy took a tenth of the time.
    """
    kept = keras_numpy.argmax

    def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if axis is None or keepdims or x.dtype == tf.bool:
            return kept(x, axis=axis, keepdims=keepdims)
        return tf.argmax(x, axis=axis, output_type=tf.int32)

    keras_numpy.argmax = argmax
    try:
        yield
    finally:
        keras_numpy.argmax = kept


@contextlib.contextmanager
def tapes_of_tensors() -> Iterator[None]:
    """While a step is traced, tapes in the user's code take the tensors that stand for variables as they take those.

    They would watch no weight and find no gradient by any, as a penalty on gradients by weights has it.
    """
    tape = tf.GradientTape
    push, gradient = tape._push_tape, tape.gradient

    def push_and_watch(self: Any) -> None:
        push(self)
        scope = keras_stateless_scope.get_stateless_scope()
        if scope is not None and self._watch_accessed_variables:
            self.watch([t for t in scope.state_mapping.values() if tf.is_tensor(t) and t.dtype.is_floating])

    def gradient_by_value(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if keras_stateless_scope.in_stateless_scope():
            sources = keras.tree.map_structure(lambda s: s.value if isinstance(s, keras.Variable) else s, sources)
        return gradient(self, target, sources, *args, **kwargs)

    tape._push_tape, tape.gradient = push_and_watch, gradient_by_value
    try:
        yield
    finally:
        tape._push_tape, tape.gradient = push, gradient


def swallow_first_xla_notice() -> None:
    """Lets XLA announce a trivial compilation to nobody.

    It announces the first one of a process on the file descriptor of stderr, past every log level.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            tf.function(lambda: tf.constant(1) + 1, jit_compile=True)()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
