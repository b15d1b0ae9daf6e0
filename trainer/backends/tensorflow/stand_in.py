"""One replica that stands for N: a strategy under which a step is traced as each core of a slice would run it.

Its all-reduce is an operation in the graph, of a group of N, that XLA turns into a collective. All private names of
TensorFlow that preflight needs are here; `tests/preflight/test_stand_in.py` names what has moved.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy


class StandInStrategy(distribute_lib.Strategy):
    """One of `num_replicas` replicas, on this machine's CPU. Nothing can be trained under it, only traced."""

    def __init__(self, num_replicas: int):
        super().__init__(_StandIn(self, num_replicas))


class _StandIn(one_device_strategy.OneDeviceExtended):
    def __init__(self, strategy: tf.distribute.Strategy, num_replicas: int):
        super().__init__(strategy, "/device:CPU:0")
        self._num_replicas = num_replicas
        self._num_reductions = 0

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._num_replicas

    def _use_merge_call(self) -> bool:
        return False  # as under TPUStrategy: what is updated is updated in the context of the replica

    def _replica_ctx_all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any, options: Any = None) -> Any:
        def reduced(tensor: Any) -> tf.Tensor:
            dense = tf.convert_to_tensor(tensor)  # slices too, as on a TPU
            if tf.executing_eagerly():  # while variables are made; all replicas would say the same
                return dense if reduce_op == tf.distribute.ReduceOp.MEAN else dense * self._num_replicas
            total = self._sum(dense)
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                return total / tf.cast(self._num_replicas, total.dtype)
            return total

        return tf.nest.map_structure(reduced, value)

    def _sum(self, tensor: tf.Tensor) -> tf.Tensor:
        self._num_reductions += 1
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self._num_replicas,
            group_key=1,
            instance_key=self._num_reductions,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )
