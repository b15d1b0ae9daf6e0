"""Trains on JAX from slow, failing and endless inputs, and writes what came of it, for test_jax_loop.py.

`python -m tests.backends.jax_loop_worker OUT.json`
"""

import gc
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from tests import replicas_worker
from tests.devices import one_replica
from trainer import replicated
from trainer.errors import ConfigError

CASE = replicas_worker.CASES["momentum"]
BATCH = replicas_worker.GLOBAL_BATCH
DEVICES = one_replica()
# Seconds that a slow input makes of a batch on purpose, and products of matrices that a slow step makes: some 40 ms.
SLOW_BATCH, PRODUCTS, SIZE = 0.06, 100, 300
STEPS, LAST_GOOD = 20, 4
GROWTH_STEPS, STEPS_OF_CALL = 2000, 100
DEPTHS = (10, 40)
END_SECS = 30.0


def input_of(make: Callable[[int], Any], num_batches: int) -> Iterator:
    """Batches of digits in file order, each after `make` has been called with its number."""
    images, labels = replicas_worker.digits()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index in range(num_batches):
            make(index)
            chosen = np.arange(index * BATCH, (index + 1) * BATCH) % len(labels)
            yield images[chosen], labels[chosen]

    signature = (tf.TensorSpec((BATCH, 8, 8)), tf.TensorSpec((BATCH,), "int32"))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return iter(DEVICES.distribute(lambda _: dataset))


def slowly(index: int) -> None:
    time.sleep(SLOW_BATCH)


def at_once(index: int) -> None:
    pass


def failing(index: int) -> None:
    if index == LAST_GOOD:
        raise ValueError("a record that cannot be read")


def slow_step(data: tuple) -> tuple:
    """A `prepare` that takes its time on the device."""
    x, y = data
    begun = jnp.full((SIZE, SIZE), x[0, 0, 0])
    burnt = jax.lax.fori_loop(0, PRODUCTS, lambda _, matrix: jnp.tanh(matrix @ matrix), begun)
    return x + 0.0 * burnt[0, 0], y


def timed(trained: replicated.Replicated, batches: Iterator) -> dict[str, float]:
    """What STEPS steps took, and what of it the devices waited."""
    trained.run_train_loop(batches, 1)  # compiles
    begun = time.monotonic()
    waited = trained.run_train_loop(batches, STEPS).input_wait_secs
    return {"total": time.monotonic() - begun, "waited": waited}


def waits() -> dict[str, dict[str, float]]:
    """Of a slow input, of one at once, and beside a slow step of either."""
    trained = replicas_worker.make(CASE, DEVICES)
    found = {"slow": timed(trained, input_of(slowly, STEPS + 5)), "at_once": timed(trained, input_of(at_once, 50))}
    slow = replicas_worker.make(
        replicas_worker.Case(CASE.model, CASE.optimizer, options={"prepare": slow_step}), DEVICES
    )
    alone = min((timed(slow, input_of(at_once, STEPS + 5)) for _ in range(2)), key=lambda took: took["total"])
    return found | {"slow_step": timed(slow, input_of(slowly, STEPS + 5)), "slow_step_alone": alone}


def trained_on(make: Callable[[int], None]) -> dict[str, np.ndarray]:
    """State after two calls."""
    trained = replicas_worker.make(CASE, DEVICES)
    batches = input_of(make, STEPS + 5)
    for steps in (STEPS - 3, 3):
        trained.run_train_loop(batches, steps)
    return trained.state()


def failed() -> dict[str, Any]:
    """What a pipeline that fails leaves: the steps before, and its error each time a batch is asked for."""
    trained = replicas_worker.make(CASE, DEVICES)
    batches = input_of(failing, STEPS)
    errors = []
    for _ in range(2):
        try:
            trained.run_train_loop(batches, STEPS)
        except tf.errors.InvalidArgumentError as error:
            errors.append(str(error))
    return {"errors": errors, "steps": int(trained.model.optimizer.iterations.value)}


def threads_left() -> list[str]:
    """Of the threads that read, those that do not end although nobody has an iterator any more."""
    gc.collect()
    reading = [thread for thread in threading.enumerate() if thread.name == "batches"]
    deadline = time.monotonic() + END_SECS
    for thread in reading:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in reading if thread.is_alive()]


def growth() -> dict[str, Any]:
    """Arrays after each call, and by how many bytes the process has grown over GROWTH_STEPS steps."""
    trained = replicas_worker.make(CASE, DEVICES)
    batches = replicas_worker.batches(CASE, DEVICES)
    for _ in range(3):  # compiles, and fills what allocators keep
        trained.run_train_loop(batches, STEPS_OF_CALL)
    before, arrays, given = _peak_bytes(), set(), []
    for _ in range(GROWTH_STEPS // STEPS_OF_CALL):
        given = [variable.value for variable in trained.model.trainable_variables]
        trained.run_train_loop(batches, STEPS_OF_CALL)
        gc.collect()
        arrays.add(len(jax.live_arrays()))
    freed = [array.is_deleted() for array in given]
    return {"bytes": _peak_bytes() - before, "arrays": sorted(arrays), "freed": all(freed) and bool(freed)}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def instructions(depth: int) -> int:
    """Of the step of a model so deep, as it is compiled."""
    keras.utils.clear_session()
    inputs = x = keras.Input((8,))
    for _ in range(depth):
        x = keras.layers.Dense(8)(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(), "mse")
    engine = replicated.Replicated(model, DEVICES, (keras.KerasTensor((4, 8)), keras.KerasTensor((4, 8)))).engine
    batch = (np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32))
    with engine.tracing():
        compiled = engine.train_program.lower(engine._take(), batch).compile()
    return compiled.as_text().count(" = ")


class PastTheOptimizer(replicas_worker.OwnTrainStepOnJax):
    """Trains by nothing."""

    def train_step(self, state: tuple, data: tuple) -> tuple[dict, tuple]:
        return {}, state


class TwoOptimizers(replicas_worker.OwnTrainStepOnJax):
    """As a GAN has them."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.second = keras.optimizers.SGD()


def refused() -> dict[str, str]:
    """What models that JAX cannot train as they are written are told."""
    said = {}
    for model in (replicas_worker.OwnTrainStep, PastTheOptimizer, TwoOptimizers):
        case = replicas_worker.Case(lambda model=model: model(*replicas_worker._dense_graph()), replicas_worker.SGD)
        try:
            replicas_worker.make(case, DEVICES).run_train_loop(replicas_worker.batches(case, DEVICES), 1)
        except ConfigError as error:
            said[model.__name__] = str(error)
    return said


def main() -> None:
    """See above."""
    slow, quick = trained_on(slowly), trained_on(at_once)
    found = {
        "waits": waits(),
        "same": all(np.array_equal(slow[name], quick[name]) for name in slow),
        "steps": int(slow["optimizer/sgd/iteration"]),
        "failed": failed(),
        "growth": growth(),
        "instructions": {depth: instructions(depth) for depth in DEPTHS},
        "refused": refused(),
        "threads_left": threads_left(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
