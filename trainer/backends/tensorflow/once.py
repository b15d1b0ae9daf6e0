"""A function of tensors that is traced for one replica and called by all: its graph is made once."""

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from trainer.backends.tensorflow import internals

# Tensors handed over. With fewer it is inlined, for a call takes microseconds, which show in a small step; with more it
# is not, for each copy would be optimised again, which takes seconds.
_MANY = 64


class TracedOnce:
    """`function`, for replicas that are traced one after the other, as under MirroredStrategy.

    Traced replica by replica, a graph of N replicas is N times as large, and so is the time until it runs. Which of the
    replicas calls goes in as a tensor, so random numbers of their own are drawn as ever.

    What cannot be traced so is traced for each replica: what meets the others within the function, as a synchronized
    layer does, or has a variable of its own there. So are errors of the user's code, which then come from where they
    always do.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._traced: Callable | None = None
        self._is_tried = False

    def __call__(self, *tensors: Any) -> Any:
        """What the function returns on this replica. All replicas have tensors of the same shapes."""
        replica = tf.distribute.get_replica_context()
        if not internals.takes_turns(replica):
            return self._function(*tensors)
        replica_id = tf.convert_to_tensor(replica.replica_id_in_sync_group)
        if not self._is_tried:  # the threads of the replicas take turns
            self._is_tried, self._traced = True, self._trace(replica.strategy, (replica_id, *tensors))
        return self._function(*tensors) if self._traced is None else self._traced(replica_id, *tensors)

    def _trace(self, strategy: tf.distribute.Strategy, tensors: tuple) -> Callable | None:
        """The function as one graph, of no device; None where there cannot be one."""

        def function(replica_id: tf.Tensor, *tensors: Any) -> Any:
            with _AnyReplica(strategy, replica_id):
                return self._function(*tensors)

        attributes = {"_noinline": len(tf.nest.flatten(tensors)) >= _MANY}
        traced = tf.function(function, autograph=False, experimental_attributes=attributes)
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), tensors)
        try:
            with tf.Graph().as_default():  # else it would be for the device of the replica that traces
                concrete = traced.get_concrete_function(*specs)
        except Exception:  # whatever the user's code raises: it is called again, where that is told
            return None
        return None if any(tensor.dtype == tf.resource for tensor in concrete.captured_inputs) else concrete


class _AnyReplica(tf.distribute.ReplicaContext):
    """Within a graph that any replica calls, with a tensor for who that is."""

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("a graph that each replica runs by itself")

    merge_call = all_reduce = all_gather = _refuse
