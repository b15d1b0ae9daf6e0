"""What a post-mortem says of a step that was not finite: which layer, which records."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import postmortem

BATCH = 24
RECORDS = [postmortem.Record(f"shard-{row % 3}", row) for row in range(BATCH)]


@keras.saving.register_keras_serializable()
class Log(keras.layers.Layer):
    """NaN for negative numbers."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return keras.ops.log(x)


class Root(keras.layers.Layer):
    """Finite at 0, where its gradient is not."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return keras.ops.sqrt(x)


def _model(layer: keras.layers.Layer | None = None, loss: object = "mse", kind: type = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    image = keras.Input((4,))
    x = layer(image) if layer else image
    x = keras.layers.BatchNormalization(name="norm")(x)
    model = kind(image, keras.layers.Dense(1, name="head")(x))
    model.compile(keras.optimizers.SGD(0.1), loss=loss)
    return model


def _batch(bad_rows: tuple[int, ...] = (), value: float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).uniform(0.5, 1.0, (BATCH, 4)).astype("float32")
    x[list(bad_rows), 2] = value
    return x, np.ones((BATCH, 1), "float32")


def _examine(model: keras.Model, batch: tuple, num_replicas: int = 1, records: list = RECORDS) -> postmortem.Finding:
    x, y = (np.split(part, num_replicas) for part in batch)
    shares = [(tf.constant(a), tf.constant(b)) for a, b in zip(x, y, strict=True)]
    names = {id(layer): f"the user's {layer.name}" for layer in model.layers}
    return postmortem.examine(model, shares, records, names, step=7, learning_rate=0.25)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_records_whose_input_is_bad(num_replicas: int) -> None:
    found = _examine(_model(), _batch((3, 17)), num_replicas)
    assert found.first is not None
    assert found.first.startswith("the input, then the output of layer the user's norm (BatchNormalization)")
    assert found.suspects == [RECORDS[3], RECORDS[17]]
    assert found.records == RECORDS
    assert "shard-0, record 3; shard-2, record 17" in str(found)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_layer_that_makes_it_of_finite_input(num_replicas: int) -> None:
    found = _examine(_model(Log(name="log")), _batch((5,), -1.0), num_replicas)
    assert found.first == "the output of layer the user's log (Log)"
    assert found.suspects == [RECORDS[5]]


def test_loss_of_finite_outputs() -> None:
    def loss(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return keras.ops.log(y_true - 1.0)[:, 0]

    x, y = _batch()
    y += 1.0
    y[9] = 1.0
    found = _examine(_model(loss=loss), (x, y))
    assert found.first == "the loss, of outputs that are finite"
    assert found.suspects == [RECORDS[9]]


def test_gradient_of_finite_outputs_and_loss() -> None:
    found = _examine(_model(Root(name="root")), _batch((11,), 0.0))
    assert found.first is None, "the gradient of the input is nobody's"
    keras.utils.set_random_seed(0)
    image = keras.Input((4,))
    hidden = keras.layers.Dense(4, use_bias=False, kernel_initializer="identity", name="in")(image)
    model = keras.Model(image, keras.layers.Dense(1, name="head")(Root(name="root")(hidden)))
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    found = _examine(model, _batch((11,), 0.0))
    assert found.first == "the gradient of the output of layer the user's in (Dense)"
    assert found.suspects == [RECORDS[11]]
    assert np.isfinite(found.loss)
    assert not np.isfinite(found.gradient_norms["in/kernel"])
    assert np.isfinite(found.gradient_norms["head/kernel"])


class OwnTrainStep(keras.Model):
    def train_step(self, data: tuple) -> dict:
        raise AssertionError("a post-mortem changes no weights")


def test_own_train_step_is_looked_at_as_far_as_its_outputs() -> None:
    found = _examine(_model(Log(name="log"), kind=OwnTrainStep), _batch((5,), -1.0))
    assert found.first == "the output of layer the user's log (Log)"
    assert found.suspects == [RECORDS[5]]


def test_a_batch_that_is_finite_after_all() -> None:
    found = _examine(_model(), _batch())
    assert found.first is None
    assert found.suspects == []
    assert "it was finite" in str(found)


def test_many_bad_records_are_cut_off_and_made_up_data_has_none() -> None:
    assert len(_examine(_model(), _batch(tuple(range(BATCH)))).suspects) == 10
    found = _examine(_model(), _batch((3,)), records=[])
    assert found.first is not None
    assert found.suspects == found.records == []


def test_json_is_valid_where_numbers_are_not() -> None:
    values = json.loads(_examine(_model(), _batch((3,))).to_json(), parse_constant=pytest.fail)
    assert values["loss"] == "nan"
    assert values["step"] == 7
    assert values["suspects"] == [{"shard": "shard-0", "index": 3}]
    assert values["gradient_norms"]["head/kernel"] == "nan"


class Masked(keras.Model):
    """Calls its layers itself: in a graph of Keras masks go beside the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(5, 2, mask_zero=True)
        self.mean = keras.layers.GlobalAveragePooling1D()

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        return self.mean(self.embedding(tokens))


def test_masks_of_layers_are_kept() -> None:
    model = Masked()
    batch = np.array([[1, 2, 0], [3, 0, 0]], "int32"), np.ones((2, 2), "float32")
    loss = float(np.mean((np.asarray(model(batch[0])) - 1) ** 2))
    model.compile("sgd", "mse")
    assert _examine(model, batch, records=[]).loss == pytest.approx(loss, rel=1e-6)


def test_norms_are_those_of_the_gradients_of_any_rank() -> None:
    image = keras.Input((6, 6, 1))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(2, 3, name="conv")(image))
    model = keras.Model(image, keras.layers.Dense(1, name="head")(x))
    model.compile("sgd", "mse")
    x, y = np.random.default_rng(0).normal(size=(4, 6, 6, 1)).astype("float32"), np.ones((4, 1), "float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    wanted = [
        np.linalg.norm(gradient) for gradient in tape.gradient(loss, [v.value for v in model.trainable_variables])
    ]
    found = _examine(model, (x, y), records=[]).gradient_norms
    assert [*found] == ["conv/kernel", "conv/bias", "head/kernel", "head/bias"]
    np.testing.assert_allclose(list(found.values()), wanted, rtol=1e-5)
