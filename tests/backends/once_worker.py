"""Lets two replicas call functions that are traced once, and prints what came of it as JSON.

A process of its own: TensorFlow's devices are fixed once used.
"""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer import cluster, hardware
from trainer.backends.tensorflow.once import TracedOnce


def main() -> None:
    """Prints, by case, how often a function was traced and what each replica got."""
    devices = cluster.connect(hardware.resolve(tpu=None, replicas=2, environ={}), connect_timeout_secs=60)
    strategy = devices.strategy
    with strategy.scope():
        variable = tf.Variable(2.0)

    def run(function: Callable[[tf.Tensor], tf.Tensor]) -> dict[str, Any]:
        traces = []

        def counted(tensor: tf.Tensor) -> tf.Tensor:
            traces.append(None)
            return function(tensor)

        once = TracedOnce(counted)
        step = tf.function(lambda: strategy.run(lambda: once(tf.constant(1.0))), autograph=False)
        found = [float(value) for value in strategy.experimental_local_results(step())]
        return {"traces": len(traces), "found": found}

    def replica() -> tf.distribute.ReplicaContext:
        return tf.distribute.get_replica_context()

    def fails(tensor: tf.Tensor) -> tf.Tensor:
        raise ArithmeticError("of the user")

    found = {
        "pure": run(lambda x: x + 1.0),
        "own": run(lambda x: x + tf.cast(replica().replica_id_in_sync_group, tf.float32)),
        "meets": run(lambda x: replica().all_reduce("SUM", x)),
        "variable": run(lambda x: x + variable),
    }
    try:
        run(fails)
    except ArithmeticError as error:
        found["error"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
