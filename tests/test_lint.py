"""What the lint says of models, and of what it keeps silent."""

import pathlib
from collections.abc import Iterator

import keras
import pytest

from tests.conftest import Trainer
from tests.preflight import odd_layers
from trainer import internals, lint

BATCH = 16


def remarks(*layers: keras.layers.Layer, dtype: str = "float32", batch: int = BATCH, last=None) -> list[lint.Remark]:
    """The lint of layers on [B, 64] inputs, before 10 logits in float32."""
    last = last or keras.layers.Dense(10, dtype="float32", name="logits")
    model = keras.Sequential([keras.Input((64,), dtype=dtype), *layers, last])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spec = (keras.KerasTensor((batch, 64), dtype, name="features"), keras.KerasTensor((batch,), "int32"))
    internals.build(model, spec)
    return lint.lint(model, spec)


def test_a_plain_model_gets_no_remark() -> None:
    assert remarks(keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.1)) == []


@pytest.mark.usefixtures("mixed")
def test_a_plain_model_in_mixed_precision_gets_none_either() -> None:
    assert remarks(keras.layers.Dense(64), keras.layers.BatchNormalization()) == []


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (odd_layers.py_function, "EagerPyFunc cannot be compiled"),
        (odd_layers.numpy_function, "PyFunc cannot be compiled"),
        (odd_layers.as_string, "XLA knows no strings"),
        (odd_layers.decode_jpeg, "DecodeJpeg cannot be compiled"),
        (odd_layers.table, "LookupTableFindV2 cannot be compiled"),
        (odd_layers.boolean_mask, "a shape that depends on values"),
        (odd_layers.dynamic_reshape, "a shape that depends on values"),
        (odd_layers.float64, "float64"),
        (odd_layers.complex128, "complex128"),
    ],
)
def test_an_operation_is_named_by_its_layer_and_line(does, says: str) -> None:
    found = [remark for remark in remarks(keras.layers.Dense(64), odd_layers.Odd(does)) if says in remark.what]
    assert found, does.__name__
    assert {remark.layer for remark in found} == {"odd"}
    assert all("odd_layers.py:" in remark.place for remark in found)


@pytest.mark.parametrize(("does", "text"), [(odd_layers.looped, "tf.while_loop"), (odd_layers.branched, "tf.cond")])
def test_host_functions_in_loops_and_branches_are_named_by_where_these_stand(does, text: str) -> None:
    [found] = [remark for remark in remarks(odd_layers.Odd(does)) if "EagerPyFunc" in remark.what]
    assert found.layer == "odd"
    assert "odd_layers.py:" in found.place
    assert text in found.place


def test_numpy_constants_in_float64_are_named() -> None:
    [found] = remarks(odd_layers.Odd(odd_layers.float64_constant))
    assert found.what.startswith("float64 (Mul)")


def test_int64_is_named_where_it_is_large_and_the_users_own() -> None:
    [found] = remarks(odd_layers.Odd(odd_layers.large_argmax))
    assert found.what.startswith("int64 (ArgMax)")
    assert remarks(keras.layers.Dense(64), batch=2048) == []  # Keras makes the labels int64 in its loss


def test_wide_inputs_are_named() -> None:
    [found] = remarks(keras.layers.Rescaling(1.0), dtype="int64")
    assert (found.layer, found.what[:5]) == ("features", "int64")


@pytest.fixture
def mixed() -> Iterator[None]:
    """Layers compute in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("mixed")
def test_softmax_and_loss_in_half_precision() -> None:
    found = remarks(keras.layers.Dense(64), keras.layers.Softmax(name="squash"))
    assert [(remark.layer, remark.what.split(":")[0]) for remark in found] == [("squash", "softmax in bfloat16")]
    assert remarks(keras.layers.Dense(64), keras.layers.Softmax(dtype="float32")) == []
    [found] = remarks(keras.layers.Dense(64), last=keras.layers.Dense(10, name="head"))
    assert (found.layer, "loss" in found.what, "bfloat16" in found.what) == ("head", True, True)


@pytest.mark.usefixtures("mixed")
def test_attention_whose_softmax_keras_computes_in_float32() -> None:
    def attends(x):
        return keras.ops.squeeze(keras.layers.MultiHeadAttention(2, 8)(x[:, None], x[:, None]), 1)

    tokens = keras.Input((64,))
    model = keras.Model(tokens, keras.layers.Dense(10, dtype="float32")(attends(tokens)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert lint.lint(model, (keras.KerasTensor((BATCH, 64)), keras.KerasTensor((BATCH,), "int32"))) == []


def test_layers_that_keras_keeps_from_xla() -> None:
    layer = keras.layers.Dense(64, name="kept")
    layer.supports_jit = False
    assert [remark.layer for remark in remarks(layer) if "supports_jit" in remark.what] == ["kept"]


def test_groups_are_named_but_not_of_one() -> None:
    def convolved(groups: int):
        shaped = keras.layers.Reshape((8, 8, 1)), keras.layers.Conv2D(4, 3)
        return remarks(*shaped, keras.layers.Conv2D(4, 3, groups=groups, name="grouped"), keras.layers.Flatten())

    assert [remark.layer for remark in convolved(2) if "groups" in remark.what] == ["grouped"]
    assert convolved(1) == []


def test_padding_is_told_in_percent_where_it_costs() -> None:
    wide = keras.layers.Dense(130, name="wide")  # [B, 64] x [64, 130]: 64 of 128 inputs, 130 of 256 outputs
    found = remarks(wide, batch=65536)
    [padded] = [remark for remark in found if remark.layer == "wide"]
    assert "64 inputs x 130 outputs fill tiles of 128 x 128 to 25.4% at best: 75% of its" in padded.what
    assert "logits" in {remark.layer for remark in found}
    assert remarks(keras.layers.Dense(130)) == []  # tiny: nobody waits for it


def test_a_batch_that_does_not_fill_its_tiles() -> None:
    [found] = remarks(keras.layers.Dense(64), batch=12)
    assert found.layer == "batch"


def test_like_remarks_are_one_line() -> None:
    lines = lint.grouped([lint.Remark(f"layer_{n}", "is odd") for n in range(5)])
    assert lines == ["layer_0, layer_1, layer_2 and 2 more: is odd"]


@pytest.mark.slow
def test_a_run_begins_with_it_where_it_is_asked_for(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = ["--model=mlp", "--global_batch_size=12", "--train_steps=1", "--mode=train"]
    asked = trainer.run(*flags, "--replicas=2", "--lint=on", f"--model_dir={tmp_path / 'on'}")
    assert "batch: 6 examples a replica do not fill tiles of 8" in asked.stderr
    assert trainer.run(*flags, f"--model_dir={tmp_path / 'auto'}").stderr == ""  # no TPU is there
