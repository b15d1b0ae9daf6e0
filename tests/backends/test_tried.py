"""A call that does not wait for its steps to be judged, on TensorFlow: when it is made, and that it can be undone."""

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.devices import one_replica
from trainer import replicated
from trainer.backends.tensorflow import tried

STEPS, BAD = 10, 6
FINITE, NAN = np.ones((4, 3), np.float32), np.full((4, 3), np.nan, np.float32)


class OwnStep(keras.Model):
    def train_step(self, data: tuple) -> dict:
        return super().train_step(data)


class Noise(keras.layers.Layer):
    """Draws without a generator of its own."""

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        return x + keras.random.uniform((4, 3)) if training else x


def model(
    units: int = 1, *, scaled: bool = False, kind: type[keras.Model] = keras.Model, noise: bool = False
) -> replicated.Replicated:
    devices = one_replica()
    with devices.scope():
        inputs = keras.Input((3,))
        hidden = Noise()(inputs) if noise else inputs
        made = kind(inputs, keras.layers.Dense(units, kernel_initializer="ones")(hidden))
        optimizer = keras.optimizers.Adam()
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        made.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return replicated.Replicated(made, devices, (keras.KerasTensor((4, 3)), keras.KerasTensor((4, units))))


class Batches:
    """STEPS of them, that of BAD as given; counts how often they were asked for once more."""

    def __init__(self, bad: np.ndarray, units: int = 1):
        x = np.stack([bad if step == BAD else FINITE for step in range(STEPS)])
        self._dataset = tf.data.Dataset.from_tensor_slices((x, np.zeros((STEPS, 4, units), np.float32)))
        self.asked = 0

    def first(self) -> Iterator:
        return iter(self._dataset)

    def again(self) -> Iterator:
        self.asked += 1
        return iter(self._dataset)


def call(trained: replicated.Replicated, batches: Batches) -> int | None:
    return trained.run_train_loop(batches.first(), STEPS, batches.again).halted_at


def test_batches_are_asked_for_again_only_by_a_call_that_was_not_finite_and_only_by_the_first() -> None:
    trained, good, bad = model(), Batches(FINITE), Batches(NAN)
    assert (call(trained, good), good.asked) == (None, 0)
    assert (call(trained, bad), bad.asked) == (BAD, 1)
    # From now on every step waits, for a run whose numbers are often not finite would do half of its work twice.
    assert (call(trained, bad), bad.asked) == (BAD, 1)
    assert (call(trained, good), good.asked) == (None, 0)


def test_the_call_is_undone_before_its_batches_are_asked_for() -> None:
    trained, bad = model(noise=True), Batches(NAN)
    before, found = trained.state(), {}

    def again() -> Iterator:
        found.update(trained.state())
        return bad.first()

    trained.run_train_loop(bad.first(), STEPS, again)
    assert found.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_call_that_goes_well_the_second_time_counts_as_it_then_went() -> None:
    trained, good, bad = model(), Batches(FINITE), Batches(NAN)
    done = trained.run_train_loop(bad.first(), STEPS, good.first)  # as data that are not the same every time have it
    expected = model()
    call(expected, good)
    assert done.halted_at is None
    for found, wanted in zip(trained.model.get_weights(), expected.model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)


LARGE = tried.MOST_COPIED_BYTES // 40  # units, each with four weights of four bytes and two moments of each


@pytest.mark.parametrize(
    ("options", "units"),
    [({"scaled": True}, 1), ({"kind": OwnStep}, 1), ({}, LARGE)],
    ids=["scaled gradients, some of which are not finite in any run", "a train_step of its own", "too large to copy"],
)
def test_some_models_wait_in_any_case(options: dict, units: int) -> None:
    bad = Batches(NAN, units)
    call(model(units, **options), bad)
    assert bad.asked == 0
