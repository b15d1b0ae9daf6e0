"""Regression and several labels at once: losses and metrics are those of NumPy and scikit-learn, padding aside."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn import metrics as sklearn_metrics

from data import synthetic
from data.spec import Array, Spec
from trainer import config, inputs, internals, models, tasks
from trainer.errors import ConfigError

IMAGE = Array((8, 8, 1), "uint8")


def _spec(shape: tuple[int, ...], dtype: str, below: int | None = None, num_classes: int | None = None) -> Spec:
    return Spec(IMAGE, Array(shape, dtype, below), num_classes, task="")


REAL, ROW, WHOLE = _spec((), "float32"), _spec((3,), "float32"), _spec((), "int32")
TOKENS = _spec((3,), "int32", 9)
BITS, WHOLE_ROW, CLASS = _spec((3,), "float32", 2), _spec((3,), "int32"), _spec((), "int32", num_classes=5)


@pytest.mark.parametrize(
    ("spec", "chosen", "others"),
    [
        (CLASS, "classification", ()),
        (BITS, "multi_label", ("regression",)),
        (REAL, "regression", ()),
        (ROW, "regression", ("multi_label",)),
        # Of whole numbers nobody can tell whether they are quantities, classes or bits: the user says.
        (WHOLE, "", ("regression",)),
        (WHOLE_ROW, "", ("regression", "multi_label")),
        (_spec((2, 2), "float32"), "", ()),
        (TOKENS, "language_model", ()),
    ],
)
def test_the_task_is_what_the_label_says_or_the_user_asks_for(spec: Spec, chosen: str, others: tuple) -> None:
    assert tasks.choose("auto", spec) == chosen
    possible = {*others, *([chosen] if chosen else [])}
    for name in ("classification", "multi_label", "regression"):
        if name in possible:
            assert tasks.choose(name, spec) == name
        else:
            with pytest.raises(ConfigError, match=f"--task={name} cannot be had: "):
                tasks.choose(name, spec)


@pytest.mark.parametrize(
    ("spec", "takes", "refuses"),
    [
        (CLASS, [(5,), (8,)], [(), (4,), (7, 5)]),
        (TOKENS, [(3, 9), (3, 16)], [(9,), (3, 8), (4, 9)]),
        (BITS, [(3,)], [(1,), (4,), (2, 3)]),  # of (1,) the loss would compare the one number with all three
        (REAL, [(), (1,)], [(2,)]),
        (ROW, [(3,)], [(1,), (3, 3)]),
    ],
)
def test_a_model_that_gives_another_shape_than_the_task_takes_is_refused(
    spec: Spec, takes: list[tuple], refuses: list[tuple]
) -> None:
    spec = dataclasses.replace(spec, task=tasks.choose("auto", spec))
    for shape in takes:
        tasks.check_output(shape, spec)
    for shape in refuses:
        with pytest.raises(ConfigError, match=re.escape(f"Received: {shape} for each example")):
            tasks.check_output(shape, spec)
    tasks.check_output((1, 2, 3), dataclasses.replace(spec, task=""))


def test_classes_are_not_made_of_other_labels() -> None:
    for spec, given in ((REAL, 5), (BITS, 5), (TOKENS, 8)):
        dataset = synthetic.Dataset("it", {}, lambda image_size, spec=spec: spec)
        with pytest.raises(ConfigError, match=f"label of it is not one class.*Received: {given}"):
            inputs.spec_of(dataset, config.merge({"dataset": "it", "model_dir": "run", "num_classes": given}))


def test_a_message_names_the_first_of_many_inputs() -> None:
    columns = dataclasses.replace(REAL, inputs={name: Array((), "float32") for name in "abcdef"})
    assert columns.described == "a () float32, b () float32, c () float32, d () float32 and 2 more"
    assert REAL.described == "input (8, 8, 1) uint8"


def _evaluated(spec: Spec, y: np.ndarray, y_pred: np.ndarray, *, size: int) -> dict[str, float]:
    """Metrics over the examples in batches of `size`, the last one padded with what is far off."""
    model = keras.Sequential([keras.Input(y_pred.shape[1:]), keras.layers.Activation("linear")])
    model.compile("sgd", tasks.loss(spec), weighted_metrics=tasks.metrics(spec), jit_compile=False)
    internals.build(model, (keras.KerasTensor((size, *y_pred.shape[1:])), keras.KerasTensor((size, *y.shape[1:]))))
    for begin in range(0, len(y), size):
        real = min(size, len(y) - begin)
        rows = [
            np.concatenate([a[begin : begin + real], np.repeat(9 - a[:1], size - real, axis=0)]) for a in (y_pred, y)
        ]
        mask = (np.arange(size) < real).astype(np.float32)
        internals.test_step(model, tuple(map(tf.constant, (*rows, mask))))
    return {name: float(value) for name, value in model.get_metrics_result().items()}


@pytest.mark.parametrize("size", [40, 16, 7])
@pytest.mark.parametrize(("shape", "output"), [((), ()), ((), (1,)), ((3,), (3,))])
def test_regression_is_measured_as_by_scikit_learn(shape: tuple, output: tuple, size: int) -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(150, 77, (40, *shape)).astype(np.float32)
    y_pred = (y + rng.normal(0, 30, y.shape)).astype(np.float32)
    spec = Spec(IMAGE, Array(shape, "float32"), None, "regression")
    found = _evaluated(spec, y, y_pred.reshape(40, *output), size=size)
    assert found["loss"] == pytest.approx(sklearn_metrics.mean_squared_error(y, y_pred), rel=1e-5)
    assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(y, y_pred), rel=1e-5)
    assert found["rmse"] == pytest.approx(sklearn_metrics.mean_squared_error(y, y_pred) ** 0.5, rel=1e-5)
    assert found["r2"] == pytest.approx(sklearn_metrics.r2_score(y, y_pred), abs=1e-5)
    assert tasks.outputs(tf.constant(y_pred.reshape(40, *output)), spec)["prediction"].shape == y.shape


def test_a_prediction_of_another_size_is_an_error() -> None:
    spec = Spec(IMAGE, Array((), "float32"), None, "regression")
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="reshape"):
        tasks.loss(spec)(tf.zeros([4]), tf.zeros([4, 3]))


@pytest.mark.parametrize("size", [60, 16])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_several_labels_are_measured_as_by_scikit_learn(dtype: str, size: int) -> None:
    rng = np.random.default_rng(2)
    y = rng.integers(0, 2, (60, 4)).astype(dtype)
    # Probabilities on a grid that the 200 thresholds of Keras tell apart, so that the curves are exact.
    probabilities = (np.clip(y * 30 + rng.integers(10, 60, y.shape), 1, 98) + 0.5) / 100
    logits = np.log(probabilities / (1 - probabilities)).astype(np.float32)
    spec = Spec(IMAGE, Array((4,), dtype), None, "multi_label")
    found = _evaluated(spec, y, logits, size=size)
    decided = probabilities > 0.5
    loss = -np.mean(np.where(y == 1, np.log(probabilities), np.log(1 - probabilities)))
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(decided == y), abs=1e-6)
    assert found["f1"] == pytest.approx(sklearn_metrics.f1_score(y, decided, average="macro"), abs=1e-5)
    assert found["roc_auc"] == pytest.approx(sklearn_metrics.roc_auc_score(y, probabilities, average="macro"), abs=1e-5)
    precise = sklearn_metrics.average_precision_score(y, probabilities, average="macro")
    assert found["pr_auc"] == pytest.approx(precise, abs=0.02), "Keras interpolates the curve, scikit-learn does not"
    given = tasks.outputs(tf.constant(logits), spec)
    np.testing.assert_allclose(given["probabilities"], probabilities, atol=1e-6)
    assert given["logits"].shape == logits.shape


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("task", "shape"), [("regression", ()), ("regression", (3,)), ("multi_label", (3,))])
def test_built_in_models_give_what_the_task_wants(name: str, task: str, shape: tuple) -> None:
    spec = Spec(IMAGE, Array(shape, "float32"), None, task)
    model = models.find(name, {}).build(spec)
    assert model.output_shape == (None, *shape)
    assert model.output.dtype == "float32"


def test_mlp_embeds_categories_and_tells_numbers_apart_in_any_precision() -> None:
    inputs = {
        "year": Array((), "int32"),
        "city": Array((), "int32", below=1_000),
        "flags": Array((2,), "int32", below=3),
        "married": Array((), "uint8"),
        "face": Array((4, 4, 1), "uint8"),
    }
    spec = Spec(inputs, Array((), "float32"), None, "regression")
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = models.find("mlp", {"units": [8]}).build(spec)
    finally:
        keras.config.set_dtype_policy("float32")
    # 1.6 * 1000^0.56 = 76.6 and 1.6 * 3^0.56 = 2.96: fastai's rule.
    assert model.get_layer("city_embedding").output.shape == (None, 77)
    assert model.get_layer("flags_embedding").output.shape == (None, 2, 3)
    assert model.get_layer("numbers").output.shape == (None, 2), "year and married"
    part = keras.Model(model.input, model.get_layer("numbers").output)
    batch = {name: np.ones((2, *array.shape), array.dtype) for name, array in inputs.items()}
    batch["year"] = np.array([2026, 2027], np.int32)
    assert list(part(batch)[:, 0].numpy()) == [2026.0, 2027.0], "bfloat16 has no 2027"
