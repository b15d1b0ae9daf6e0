"""Which models mix the examples of a batch, and what is said of those that cannot be asked."""

import keras
import pytest

from tests.preflight import odd_layers
from trainer.preflight import mixing

BATCH = 16
MIXES = "depends on the others of its batch"


def said(does) -> str | None:
    """Of a model with an odd layer behind batch norm and before dropout."""
    inputs = keras.Input((16,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dropout(0.5)(odd_layers.Odd(does)(hidden))))
    return mixing.mixes_examples(model, keras.KerasTensor((BATCH, 16)))


def test_a_plain_model_keeps_them_apart() -> None:
    assert said(odd_layers.plain) is None


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (odd_layers.centred, MIXES),
        (odd_layers.noisy, "another answer each time"),  # not taken for mixing
        (odd_layers.fails_eagerly, "made-up inputs raise InvalidArgumentError at "),
    ],
)
def test_what_is_found_is_named_by_its_layer(does, says: str) -> None:
    found = said(does)
    assert found is not None
    assert says in found
    assert "odd" in found


def test_ids_are_within_any_embedding_and_inputs_may_be_several() -> None:
    inputs = {"kind": keras.Input((), dtype="int64", name="kind"), "size": keras.Input((3,), name="size")}
    kind = keras.layers.Embedding(2, 4)(inputs["kind"])
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()([kind, inputs["size"]])))
    spec = {"kind": keras.KerasTensor((BATCH,), "int64"), "size": keras.KerasTensor((BATCH, 3))}
    assert mixing.mixes_examples(model, spec) is None


def test_xla_announces_itself_to_nobody(capfd) -> None:
    """Keras compiles grouped convolutions on CPUs."""
    inputs = keras.Input((8, 8, 4))
    model = keras.Model(inputs, keras.layers.Conv2D(4, 3, groups=2)(inputs))
    assert mixing.mixes_examples(model, keras.KerasTensor((BATCH, 8, 8, 4))) is None
    assert capfd.readouterr().err == ""
