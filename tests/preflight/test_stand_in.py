"""One replica that stands for N, and the private names of TensorFlow that it is made of."""

import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from trainer.backends.tensorflow import stand_in

REPLICAS = 4


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (one_device_strategy, "OneDeviceExtended"),
        (one_device_strategy.OneDeviceExtended, "_num_replicas_in_sync"),
        (distribute_lib.StrategyExtendedV1, "_use_merge_call"),
        (distribute_lib.StrategyExtendedV1, "_replica_ctx_all_reduce"),
        (distribute_lib.StrategyExtendedV2, "_num_replicas_in_sync"),
    ],
)
def test_private_name_is_still_there(owner: object, name: str) -> None:
    assert hasattr(owner, name), (
        f"TensorFlow {tf.__version__} has no {owner}.{name}: see backends/tensorflow/stand_in.py"
    )


def test_what_replicas_exchange_crosses_in_one_group_of_all() -> None:
    """The number of replicas is in the program, and one replica's own share is not multiplied by it."""
    strategy = stand_in.StandInStrategy(REPLICAS)

    def mean_and_sum(x):
        replica = tf.distribute.get_replica_context()
        mean = replica.all_reduce(tf.distribute.ReduceOp.MEAN, x)
        return mean, replica.all_reduce(tf.distribute.ReduceOp.SUM, x)

    assert strategy.num_replicas_in_sync == REPLICAS
    mean, total = strategy.run(mean_and_sum, args=(tf.constant(3.0),))
    assert (float(mean), float(total)) == (3.0, 12.0)
    graph = tf.function(lambda x: strategy.run(mean_and_sum, args=(x,))).get_concrete_function(tf.constant(3.0)).graph
    reductions = [operation for operation in graph.get_operations() if operation.type == "CollectiveReduceV2"]
    assert [int(tf.get_static_value(operation.inputs[1])) for operation in reductions] == [REPLICAS, REPLICAS]
