"""Updates in fewer operations are those of Keras. (On several replicas: tests/test_replicated.py.)"""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from trainer.backends.tensorflow import fused

STEPS = 20
SIZES = (7, 2**17)  # the second so large that TensorFlow computes it in several threads


def trained(make: Callable[[], keras.optimizers.Optimizer], *, fuse: bool) -> dict[str, np.ndarray]:
    """Weights, and the optimizer's own variables, after steps with random gradients and one that are all zero."""
    random = np.random.default_rng(0)
    weights = [keras.Variable(random.standard_normal(size, np.float32), name=f"weights_{size}") for size in SIZES]
    optimizer = make()
    optimizer.build(weights)
    if fuse:
        fused.fuse(optimizer)
        assert "update_step" in vars(optimizer)
    for step in range(STEPS):
        gradients = [random.standard_normal(size, np.float32) * (step != STEPS // 2) for size in SIZES]
        optimizer.apply(list(map(keras.ops.convert_to_tensor, gradients)))
    kept = {f"{index}, {variable.name}": variable.numpy() for index, variable in enumerate(optimizer.variables)}
    return kept | {weight.name: weight.numpy() for weight in weights}


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda: keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.99, epsilon=1e-5),
        lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipnorm=1.0),
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, STEPS), weight_decay=0.1),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw"],
)
def test_the_update_is_that_of_keras(make: Callable[[], keras.optimizers.Optimizer]) -> None:
    fused_update, by_keras = (trained(make, fuse=fuse) for fuse in (True, False))
    assert fused_update.keys() == by_keras.keys()
    for name, value in by_keras.items():
        np.testing.assert_allclose(fused_update[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Lion(0.01), lambda: keras.optimizers.RMSprop(0.01)])
def test_another_optimizer_is_left_alone(make: Callable[[], keras.optimizers.Optimizer]) -> None:
    optimizer = make()
    fused.fuse(optimizer)
    assert "update_step" not in vars(optimizer)
