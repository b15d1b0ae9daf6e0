"""What the train loop says of its waiting for input, which records and clock go by."""

import time

import tensorflow as tf

from tests import replicas_worker
from tests.devices import one_replica

CASE = replicas_worker.CASES["momentum"]


def test_waiting_for_input_is_told_from_training() -> None:
    # An input that makes one batch a time on purpose, by far slower than the model.
    trained = replicas_worker.make(CASE, one_replica())
    images, labels = replicas_worker.digits()

    def slowly(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        burnt = tf.reduce_sum(tf.linalg.matmul(tf.random.normal((1500, 1500)), tf.random.normal((1500, 1500))))
        return tf.constant(images[:64]) + 0.0 * burnt, tf.constant(labels[:64])

    iterator = iter(tf.data.Dataset.range(100).map(slowly))
    trained.run_train_loop(iterator, 1)
    begun = time.monotonic()
    waited = trained.run_train_loop(iterator, 10).input_wait_secs
    total = time.monotonic() - begun
    assert waited > 0.5 * total
    resident = iter(tf.data.Dataset.from_tensors((images[:64], labels[:64])).repeat())
    trained.run_train_loop(resident, 1)
    waited_for_resident = trained.run_train_loop(resident, 10).input_wait_secs
    assert waited_for_resident < 0.1 * waited
