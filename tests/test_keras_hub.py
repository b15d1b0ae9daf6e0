"""Backbones of KerasHub by name. Most needs the extra `hub`, which test_packaging.py installs to run this file."""

import importlib.util
import pathlib

import keras
import numpy as np
import pytest

from data.spec import Array, Spec
from tests.conftest import Trainer
from trainer import models, rules
from trainer.config import Config
from trainer.errors import ConfigError

INSTALLED = importlib.util.find_spec("keras_hub") is not None
with_hub = pytest.mark.skipif(not INSTALLED, reason="the extra hub is not installed")
IMAGE = Spec(Array((16, 16, 3), "uint8"), Array((), "int32"), 7)
TOKENS = Spec(Array((12,), "int32", below=50), Array((), "int32"), 7)
PACKED = {"tokens": Array((12,), "int32", below=50), "segments": Array((12,), "int32")}
NEXT_TOKEN = Spec(PACKED, Array((12,), "int32", below=50), None, "language_model")

VIT = {"patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
TEXT = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 16, "max_sequence_length": 12}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64],
    "stackwise_num_blocks": [1],
    "stackwise_num_strides": [1],
    "block_type": "basic_block",
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 50, (2, 12)).astype("int32")
PADDED = np.where(np.arange(12) < 8, IDS, 0)


def _build(name: str, options: dict, spec: Spec) -> keras.Model:
    return models.find(f"keras_hub/{name}", options).build(spec)


def test_names_need_no_library_until_they_are_used() -> None:
    assert not [p for p in rules.problems(Config(model="keras_hub/BertBackbone")) if "model" in p.split(" ")[:2]]
    assert "keras_hub" not in rules.built_in_models()


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_extra_the_error_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="needs 'keras_hub', which is not installed. Install the extra `hub`"):
        _build("BertBackbone", {}, TOKENS)


@with_hub
def test_an_image_backbone_learns() -> None:
    model = _build("ResNetBackbone", RESNET, IMAGE)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    before = model.get_weights()
    model.train_on_batch(RNG.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8), np.arange(4))
    assert model.output_shape == (None, 7)
    assert all(not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True) if a.ndim > 1)


@with_hub
@pytest.mark.parametrize(("pooling", "position"), [("auto", 0), ("first", 0), ("mean", slice(None))])
def test_a_class_token_is_what_the_head_takes(pooling: str, position: int | slice) -> None:
    model = _build("ViTBackbone", VIT | {"head_pooling": pooling}, IMAGE)
    images = RNG.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    (backbone,) = [layer for layer in model.layers if "backbone" in layer.name]
    hidden = backbone((images / 255.0).astype("float32")).numpy()
    features = hidden[:, position].reshape(2, -1, 16).mean(axis=1)
    kernel, bias = model.get_layer("logits").get_weights()
    np.testing.assert_allclose(model(images).numpy(), features @ kernel + bias, atol=1e-5)


@with_hub
@pytest.mark.parametrize("converter", [True, False])
def test_a_preset_gets_its_weights_and_its_preprocessing(converter: bool, tmp_path: pathlib.Path) -> None:
    import keras_hub

    theirs = keras_hub.models.ViTBackbone(image_shape=(16, 16, 3), **VIT)
    theirs.save_to_preset(str(tmp_path))
    scale, offset = np.ones(3) / 255, np.zeros(3)
    if converter:
        scale, offset = np.array([0.02, 0.013, 0.016]), np.array([-1.0, -0.5, -0.2])
        keras_hub.layers.ImageConverter(scale=list(scale), offset=list(offset)).save_to_preset(str(tmp_path))
    images = RNG.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    model = _build(str(tmp_path), {}, IMAGE)
    kernel, bias = model.get_layer("logits").get_weights()
    features = theirs((images * scale + offset).astype("float32")).numpy()[:, 0]
    np.testing.assert_allclose(model(images).numpy(), features @ kernel + bias, atol=1e-5)
    fresh = _build(str(tmp_path), {"weights": False}, IMAGE)
    path = "vit_patching_and_embedding/patch_embedding/kernel"
    ours, other = ({w.path: w.numpy() for w in m.weights}[path] for m in (model, fresh))
    assert not np.array_equal(ours, other)


@with_hub
@pytest.mark.parametrize("name", ["BertBackbone", "GPT2Backbone", "RobertaBackbone", "DistilBertBackbone"])
def test_padding_does_not_change_the_class_of_a_text(name: str) -> None:
    for pooling in ("auto", "mean"):
        model = _build(name, TEXT | {"head_pooling": pooling}, TOKENS)
        assert model.output_shape == (None, 7)
        other = PADDED.copy()
        other[:, 8:] = 0
        short = _build(name, TEXT | {"head_pooling": pooling}, Spec(Array((8,), "int32", 50), TOKENS.label, 7))
        short.set_weights(model.get_weights())
        np.testing.assert_allclose(model(other).numpy(), short(PADDED[:, :8]).numpy(), atol=1e-5, err_msg=pooling)


@with_hub
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_a_causal_backbone_learns_the_next_token(precision: str) -> None:
    keras.config.set_dtype_policy(precision)
    try:
        model = _build("GPT2Backbone", TEXT, NEXT_TOKEN)
    finally:
        keras.config.set_dtype_policy("float32")
    batch = {"tokens": IDS, "segments": np.ones_like(IDS)}
    logits = model(batch)
    assert logits.dtype == "float32"
    assert logits.shape == (2, 12, 50)
    changed = IDS.copy()
    changed[:, 6:] = 1
    np.testing.assert_array_equal(model(batch | {"tokens": changed}).numpy()[:, :6], logits.numpy()[:, :6])
    rounded = keras.ops.cast(keras.ops.cast(logits, "bfloat16"), "float32")
    assert (rounded.numpy() == logits.numpy()).mean() < 0.1, "in full precision"


@with_hub
@pytest.mark.parametrize(
    ("name", "options", "spec", "message"),
    [
        ("BertBackbon", {}, TOKENS, "Unknown preset identifier"),
        ("BertsBackbone", {}, TOKENS, "KerasHub has no backbone 'BertsBackbone'; did you mean BertBackbone"),
        ("BertBackbone", TEXT | {"num_layer": 1}, TOKENS, "unknown option 'num_layer'; did you mean 'num_layers'"),
        ("BertBackbone", TEXT | {"dropout": "much"}, TOKENS, "dropout must be of type <class 'float'>"),
        ("BertBackbone", {"num_layers": 1}, TOKENS, "missing 3 required keyword-only arguments: 'num_heads'"),
        ("BertBackbone", TEXT, NEXT_TOKEN, "its positions see what comes behind them"),
        ("BertBackbone", TEXT, IMAGE, "it takes tokens"),
        ("GPT2Backbone", TEXT | {"head_pooling": "last"}, TOKENS, "head_pooling must be one of auto, mean, first"),
        ("T5Backbone", {k: TEXT[k] for k in list(TEXT)[:4]}, TOKENS, "neither one image nor tokens alone"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(
    name: str, options: dict, spec: Spec, message: str, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(ConfigError, match=message):
        _build(name, options, spec)
    recwarn.clear()


@with_hub
def test_a_preset_with_fewer_tokens_than_the_data_is_refused(tmp_path: pathlib.Path) -> None:
    import keras_hub

    keras_hub.models.GPT2Backbone(vocabulary_size=20, **TEXT).save_to_preset(str(tmp_path))
    with pytest.raises(ConfigError, match="it knows 20 tokens. Received: data of 50"):
        _build(str(tmp_path), {}, TOKENS)


@with_hub
@pytest.mark.slow
def test_a_run_fine_tunes_a_preset_on_two_replicas(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    import keras_hub

    preset = tmp_path / "preset"
    keras_hub.models.ViTBackbone(image_shape=(8, 8, 1), **(VIT | {"patch_size": 2, "num_layers": 2})).save_to_preset(
        str(preset)
    )
    flags = [f"--model=keras_hub/{preset}", f"--model_dir={tmp_path}/run", "--train_steps=4", "--replicas=2"]
    flags += ["--layer_decay=0.5", "--freeze=vit_patching*"]
    done = trainer.run(*flags)
    assert "times 0.125 before vit_encoder/transformer_block_1, 0.5 in vit_encoder/transformer_block_2" in done.stdout
    assert (tmp_path / "run" / "export").is_dir()
