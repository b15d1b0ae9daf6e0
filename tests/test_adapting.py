"""Layers that adapt to the data: their mean and variance are NumPy's, and everything that computes uses them."""

import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.spec import Array, Spec
from tests.devices import one_replica
from trainer import adapting, export, internals, replicated
from trainer.errors import ConfigError

NUM = 50
SIZE = 16  # 50 examples end within a batch


def _table() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns whose means are large beside their spread, where float32 sums would be off, and one that is constant."""
    rng = np.random.default_rng(0)
    x = {
        "year": rng.integers(1_990, 2_027, NUM).astype(np.int32),
        "far": (1e6 + rng.normal(size=(NUM, 3))).astype(np.float32),
        "same": np.full(NUM, 0.1, np.float32),
    }
    return x, rng.normal(150.0, 77.0, (NUM, 2)).astype(np.float32)


def _dataset(x: object, y: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE)


def _inputs() -> dict[str, keras.KerasTensor]:
    shapes = {"year": ((), "int32"), "far": ((3,), "float32"), "same": ((), "float32")}
    return {name: keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in shapes.items()}


def _normalised() -> keras.Model:
    """One layer straight on an input, one behind layers without weights, and one for the label."""
    inputs = _inputs()
    columns = [keras.layers.Reshape((-1,))(inputs[name]) for name in ("year", "same")]
    joined = keras.layers.Concatenate(dtype="float32")(columns)
    numbers = keras.layers.Normalization(name="numbers")(joined)
    far = keras.layers.Normalization(name="far_ones")(inputs["far"])
    given = keras.layers.Normalization(mean=3.0, variance=4.0, axis=None)(far)
    x = keras.layers.Dense(2)(keras.layers.Concatenate()([numbers, given]))
    return keras.Model(inputs, keras.layers.Normalization(invert=True, name="label")(x))


def _adapt(make: Callable[[], keras.Model], data: tuple | None = None) -> keras.Model:
    x, y = data or _table()
    dataset = _dataset(x, y)
    models = [make(), make()]
    for model in models:
        internals.use_statistics(model)
        model(tf.nest.map_structure(lambda values: values[:1], x))
    model, copy = models
    adapting.adapt(model, one_replica(), copy, adapting.waiting(model), dataset)
    return model


def _statistics(model: keras.Model, name: str) -> tuple[np.ndarray, np.ndarray]:
    mean, variance, _ = model.get_layer(name).get_weights()
    return mean, variance


def test_mean_and_variance_are_numpys() -> None:
    x, y = _table()
    model = _adapt(_normalised)
    expected = {"far_ones": x["far"], "label": y}
    for name, values in expected.items():
        mean, variance = _statistics(model, name)
        exact = values.astype(np.float64)
        np.testing.assert_array_equal(mean, exact.mean(axis=0).astype(np.float32))
        np.testing.assert_allclose(variance, exact.var(axis=0), rtol=1e-6)
    mean, variance = _statistics(model, "numbers")
    years = x["year"].astype(np.float64)
    np.testing.assert_allclose(mean, [years.mean(), np.float32(0.1)], rtol=1e-7)
    np.testing.assert_allclose(variance, [years.var(), 1.0], rtol=1e-6, err_msg="a constant column is left as it is")
    assert adapting.waiting(model) == []


def test_a_model_computes_with_what_was_put_into_its_weights(tmp_path: pathlib.Path) -> None:
    # Keras' own layer would go on with mean 0 and variance 1, which are constants of its graph by then.
    x, y = _table()
    adapted, fresh = _adapt(_normalised), _normalised()
    compiled = tf.function(lambda x: fresh(x, training=False))
    internals.use_statistics(fresh)
    before = compiled(x).numpy()
    fresh.set_weights(adapted.get_weights())
    after = compiled(x).numpy()
    kernel, bias = adapted.layers[-2].get_weights()
    columns = np.stack([x["year"], x["same"]], axis=1)
    spread = np.sqrt([np.var(columns[:, 0]), 1.0])
    far = x["far"].astype(np.float64)
    far = (far - far.mean(axis=0).astype(np.float32)) / far.std(axis=0)  # a weight is float32, here to within 0.03
    features = np.concatenate([(columns - columns.mean(axis=0)) / spread, (far - 3.0) / 2.0], axis=1)
    expected = (features @ kernel + bias) * y.std(axis=0) + y.mean(axis=0)
    np.testing.assert_allclose(after, expected, rtol=1e-3, atol=1e-2)  # of numbers up to 100
    assert np.abs(before - after).max() > 1
    spec = Spec({name: Array(v.shape[1:], v.dtype.name) for name, v in x.items()}, Array((2,), "float32"), None, "")
    export.save(fresh, spec, str(tmp_path / "export"))
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    np.testing.assert_array_equal(served(**{n: tf.constant(v) for n, v in x.items()})["output"].numpy(), after)


def test_layers_within_models_and_without_a_graph_adapt_too() -> None:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Rescaling(0.5), keras.layers.Normalization(axis=None)])
            self.out = keras.layers.Dense(2)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.out(self.inner(x))

    x, y = _table()
    model = _adapt(Subclassed, data=(x["far"], y))
    mean, variance = model.inner.layers[-1].get_weights()[:2]
    np.testing.assert_allclose(mean, x["far"].astype(np.float64).mean() / 2, rtol=1e-7)
    np.testing.assert_allclose(variance, x["far"].astype(np.float64).var() / 4, rtol=1e-6)


def test_what_no_layer_was_given_before_stays() -> None:
    def make() -> keras.Model:
        far = keras.Input((3,))
        layers = [keras.layers.Normalization(name=name) for name in ("adapted", "waiting")]
        layers[0].adapt(np.array([[1.0, 2, 3], [2, 4, 6]]))
        return keras.Model(far, [layer(far) for layer in layers])

    x, y = _table()
    model = make()
    assert [internals.layers(model)[place].name for place in adapting.waiting(model)] == ["waiting"]
    model = _adapt(make, data=(x["far"], y))
    np.testing.assert_allclose(_statistics(model, "adapted")[0], [1.5, 3, 4.5])
    np.testing.assert_allclose(_statistics(model, "waiting")[0], x["far"].astype(np.float64).mean(axis=0), rtol=1e-7)


def _behind_weights() -> keras.Model:
    far = keras.Input((3,))
    return keras.Model(far, keras.layers.Normalization(name="late")(keras.layers.Dense(2, name="early")(far)))


def _behind_another() -> keras.Model:
    far = keras.Input((3,))
    return keras.Model(far, keras.layers.Normalization(name="late")(keras.layers.Normalization(name="early")(far)))


def _of_a_label_of_another_size() -> keras.Model:
    far = keras.Input((3,))
    return keras.Model(far, keras.layers.Normalization(name="late", invert=True)(far))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _behind_weights,
            "late is to normalise .* depends on weights, which training changes. Received: .*early/kernel",
        ),
        (_behind_another, "depends on weights, which training changes. Received: .*early/mean"),
        (_of_a_label_of_another_size, r"given as many numbers. Received: \(3,\) for a label of shape \(2,\)"),
    ],
)
def test_what_cannot_adapt_is_an_error(make: Callable[[], keras.Model], message: str) -> None:
    x, y = _table()
    with pytest.raises(ConfigError, match=message):
        _adapt(make, data=(x["far"], y))


def test_values_that_are_not_finite_are_an_error() -> None:
    x, y = _table()
    x["far"][7, 1] = np.nan
    with pytest.raises(ConfigError, match="the layer far_ones .* not finite. Received: mean .*nan"):
        _adapt(_normalised, data=(x, y))
    x["far"][:, 1] = np.where(np.arange(len(y)) % 2, 1e25, 0)  # a feature that would be 0 from there on
    with pytest.raises(ConfigError, match="the layer far_ones .* float32 cannot hold. Received: 2.5e[+]49"):
        _adapt(_normalised, data=(x, y))


def test_the_step_leaves_the_statistics_alone() -> None:
    # They are the same on all replicas: averaging them at each step would cost time, and round them again and again.
    model = _adapt(_normalised)
    model.compile("sgd", "mse", jit_compile=False)
    spec = ({n: keras.KerasTensor((SIZE, *v.shape[1:]), v.dtype.name) for n, v in _table()[0].items()},
            keras.KerasTensor((SIZE, 2)))  # fmt: skip
    trained = replicated.Replicated(model, one_replica(), spec)
    held = {weight.path for name in ("numbers", "far_ones", "label") for weight in model.get_layer(name).weights}
    assert not held & {weight.path for weight in internals.step_state(model)}
    assert {f"model/{path}" for path in held} <= trained.state().keys(), "they are in checkpoints"
