"""Trains tiny models in mixed float16 on 1 and on 2 virtual replicas, and stores what was reported of their gradients.

`python -m tests.precision_worker OUT.npz`. A process of its own, since TensorFlow's devices are fixed once used.
Keys are `<case>/<replicas>/<what>`.
"""

import sys
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from trainer import cluster, replicated

BATCH = 16  # on one replica
# Gradients of the weights of `planted`, by turns: 2^-20 is below the smallest normal number of float16, 2^-14.
TINY, FINE = 2.0**-20, 2.0**-13
FIRST = np.array([0, 0, 0, TINY, -TINY, FINE, -FINE, 1, 0.5, FINE])
SECOND = np.array([TINY, FINE, FINE, FINE, 1, 1, 1, 1, 1, 1])
VANISHED = 4  # weights whose gradients are all 0
SCALE, GROWTH_STEPS, STEPS, BAD_STEP, SAVED_AT = 1024.0, 4, 10, 2, 5


def scaled(scale: float, **options: int) -> keras.optimizers.Optimizer:
    """SGD with a loss scale that begins at `scale`."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2), initial_scale=scale, **options)


def make(devices: cluster.Cluster, outputs: int, optimizer: dict, loss: object) -> replicated.Replicated:
    """Weights without biases on inputs of `[b, 10]` and of `[b, 4]`; those of the head compute in float32."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    share = BATCH // devices.num_replicas
    with devices.scope():
        x, zeros = keras.Input((10,)), keras.Input((VANISHED,))
        flat = {"use_bias": False, "kernel_initializer": "zeros"}
        body = keras.layers.Dense(outputs, **flat)(x) + keras.layers.Dense(outputs, **flat)(zeros)
        head = keras.layers.Dense(outputs, dtype="float32", **flat)(x)
        model = keras.Model([x, zeros], keras.layers.Add(dtype="float32")([body, head]))
        model.compile(scaled(**optimizer), loss, jit_compile=False)
        spec = [keras.KerasTensor((share, 10)), keras.KerasTensor((share, VANISHED))]
        return replicated.Replicated(model, devices, (spec, keras.KerasTensor((share, outputs))))


def batches(devices: cluster.Cluster, x: np.ndarray, y: np.ndarray):
    """Of `[steps, BATCH, 10]` and `[steps, BATCH, outputs]`; replicas take turns within a batch."""
    num_replicas = devices.num_replicas
    arrays = (x.astype("float32"), np.zeros((*x.shape[:2], VANISHED), "float32"), y.astype("float32"))
    rows = [array.reshape(-1, *array.shape[2:]) for array in arrays]

    def local(_: tf.distribute.InputContext) -> tf.data.Dataset:
        flat = tf.data.Dataset.from_tensor_slices(((rows[0], rows[1]), rows[2]))
        return flat.batch(BATCH // num_replicas, drop_remainder=True)

    return iter(devices.distribute(local))


def underflow(devices: cluster.Cluster) -> dict[str, float]:
    """Gradients that are the inputs: of one report, of it gone on with from its state, and of the next."""

    def fresh() -> replicated.Replicated:
        return make(devices, 1, {"scale": 1.0}, lambda y, y_pred: keras.ops.mean(y_pred, -1))

    x = np.stack([np.tile(row, (BATCH, 1)) for row in (FIRST, SECOND, SECOND)])
    y = np.zeros((3, BATCH, 1))
    trained, iterator = fresh(), batches(devices, x, y)
    found = {"first": trained.run_train_loop(iterator, 1).logs}
    state = trained.state()
    found["same"] = trained.run_train_loop(iterator, 1).logs
    trained.reset_metrics()
    found["next"] = trained.run_train_loop(iterator, 1).logs
    resumed = fresh()
    resumed.restore(state, "memory")
    found["resumed"] = resumed.run_train_loop(batches(devices, x[1:], y[1:]), 1).logs
    return {f"{name}/{key}": value for name, logs in found.items() for key, value in logs.items()}


def overflow(devices: cluster.Cluster) -> dict[str, np.ndarray]:
    """Least squares with one label at which scaled gradients overflow, and without that batch."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(STEPS, BATCH, 10)), random.normal(size=(STEPS, BATCH, 2))
    y[BAD_STEP, 0] = 1e4
    others = [step for step in range(STEPS) if step != BAD_STEP]
    options = {"scale": SCALE, "dynamic_growth_steps": GROWTH_STEPS}

    def run(begin: int, ends: Sequence[int], x: np.ndarray, y: np.ndarray, state: dict | None = None):
        trained = make(devices, 2, options, "mse")
        if state is not None:
            trained.restore(state, "memory")
        iterator, found = batches(devices, x[begin:], y[begin:]), {}
        for end in ends:
            done = trained.run_train_loop(iterator, end - begin)
            found[f"scale/{end}"] = done.logs["loss_scale"]
            if end == SAVED_AT:
                found["saved"] = trained.state()
            begin = end
        weights = np.concatenate(trained.model.get_weights())
        overflow = done.logs["gradient_overflow"] if "gradient_overflow" in done.logs else np.nan
        halted = -1 if done.halted_at is None else done.halted_at
        return found | {"weights": weights, "overflow": overflow, "halted": halted, "loss": done.logs["loss"]}

    whole = run(0, range(1, STEPS + 1), x, y)
    resumed = run(SAVED_AT, [STEPS], x, y, whole.pop("saved"))
    runs = {"whole": whole, "resumed": resumed, "without": run(0, [STEPS - 1], x[others], y[others])}
    return {f"{name}/{key}": value for name, found in runs.items() for key, value in found.items()}


def main() -> None:
    """Runs it all and writes the file."""
    tf.get_logger().setLevel("ERROR")  # it warns of retracing, and each case is a function of its own
    found = {}
    for num_replicas, devices in enumerate(cluster.rehearse(2), start=1):
        for case in (underflow, overflow):
            values = case(devices)
            found |= {f"{case.__name__}/{num_replicas}/{key}": np.asarray(v) for key, v in values.items()}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
