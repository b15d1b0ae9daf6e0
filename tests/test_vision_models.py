"""resnet and vit are the published models: their sizes, what they compute, and that it depends on no replica."""

import json
import math
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.spec import Array, Spec
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import models
from trainer.errors import ConfigError
from trainer.models import _blocks, vit

IMAGENET = Spec(Array((224, 224, 3), "uint8"), Array((), "int32"), 1000)
SMALL = Spec(Array((8, 12, 1), "uint8"), Array((), "int32"), 5)
ORIGINAL = {"positions": "learned", "pooling": "token"}
TINY = {"width": 16, "depth": 2, "heads": 2, "hidden": 24, "patch": 4}
TINY_RESNET = {"depth": 50, "width": 8, "stem": "small"}


# Of torchvision and timm, which count as the papers do.
@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("resnet", {"depth": 18}, 11_689_512),
        ("resnet", {"depth": 34}, 21_797_672),
        ("resnet", {}, 25_557_032),
        ("resnet", {"depth": 101}, 44_549_160),
        ("resnet", {"stem": "deep", "pooled_shortcuts": True}, 25_576_264),
        ("vit", ORIGINAL | {"size": "ti"}, 5_717_416),
        ("vit", ORIGINAL, 22_050_664),
        ("vit", ORIGINAL | {"size": "b"}, 86_567_656),
    ],
)
def test_sizes_are_the_published_ones(name: str, options: dict, parameters: int) -> None:
    model = models.find(name, options).build(IMAGENET)
    assert sum(math.prod(v.shape) for v in model.trainable_variables) == parameters


def _built(name: str, options: dict, spec: Spec = SMALL) -> keras.Model:
    """With weights of which none is as in the beginning, so that none can be left out unnoticed."""
    keras.utils.set_random_seed(0)
    model = models.find(name, options).build(spec)
    rng = np.random.default_rng(0)
    model.set_weights([w + 0.3 * np.abs(rng.normal(size=w.shape)).astype("float32") for w in model.get_weights()])
    return model


def _images(spec: Spec = SMALL, count: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, *spec.inputs.shape), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit", TINY | ORIGINAL | {"dropout": 0.1, "stochastic_depth": 0.2, "hidden_head": True}),
        ("vit", TINY),
        ("resnet", TINY_RESNET | {"pooled_shortcuts": True, "stochastic_depth": 0.2, "batch_norm_momentum": 0.8}),
    ],
)
def test_a_saved_model_is_the_same(name: str, options: dict) -> None:
    model = _built(name, options)
    again = keras.Model.from_config(json.loads(json.dumps(model.get_config())))
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(again(_images()), model(_images()))
    blocks = [layer for layer in model.layers if layer.name.startswith("block_")]
    for layer in blocks:
        assert again.get_layer(layer.name).get_config() == layer.get_config()
    assert [layer.name for layer in blocks] == [f"block_{i:02d}" for i in range(len(blocks))]


# --- vit ---


def _norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * gamma + beta


def _attention(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    q, k, v = (
        np.einsum("td,dhe->hte", x, w[f"{n}/kernel"]) + w[f"{n}/bias"][:, None] for n in ("query", "key", "value")
    )
    scores = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]))  # [heads, T, T]
    mixed = scores / scores.sum(-1, keepdims=True) @ v
    return np.einsum("hte,hed->td", mixed, w["attention_output/kernel"]) + w["attention_output/bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _vit(image: np.ndarray, w: dict[str, np.ndarray], patch: int, depth: int) -> np.ndarray:
    """The paper's equations 1 to 4, for one image and a class token."""
    height, width, _ = image.shape
    cells = [image[r : r + patch, c : c + patch] for r in range(0, height, patch) for c in range(0, width, patch)]
    x = np.stack([np.tensordot(2 * cell / 255 - 1, w["patches/kernel"], 3) for cell in cells]) + w["patches/bias"]
    x = np.concatenate([w["token/class_token"][0], x]) + w["positions/position_embedding"]
    for index in range(depth):
        b = {key.partition("/")[2]: a for key, a in w.items() if key.startswith(f"block_{index:02d}/")}
        attention = {key.removeprefix("attention/"): a for key, a in b.items() if key.startswith("attention/")}
        x = x + _attention(_norm(x, b["norm_0/gamma"], b["norm_0/beta"]), attention)
        y = _norm(x, b["norm_1/gamma"], b["norm_1/beta"]) @ b["expand/kernel"] + b["expand/bias"]
        x = x + _gelu(y) @ b["reduce/kernel"] + b["reduce/bias"]
    return _norm(x, w["norm/gamma"], w["norm/beta"])[0] @ w["logits/kernel"] + w["logits/bias"]


def test_vit_computes_what_the_paper_says() -> None:
    model = _built("vit", TINY | ORIGINAL)
    weights = {v.path: v.numpy().astype("float64") for v in model.variables}
    expected = [_vit(image.astype("float64"), weights, TINY["patch"], TINY["depth"]) for image in _images()]
    np.testing.assert_allclose(model(_images()), np.stack(expected), rtol=1e-4, atol=1e-4)


def test_sincos2d() -> None:
    rows, columns, width = 3, 5, 16
    table = vit.sincos2d(rows, columns, width)
    for row in range(rows):
        for column in range(columns):
            for i in range(width // 4):
                frequency = 1 / 10_000 ** (i / (width // 4 - 1))
                waves = (math.sin(column * frequency), math.cos(column * frequency))
                waves += (math.sin(row * frequency), math.cos(row * frequency))
                np.testing.assert_allclose(table[row * columns + column, i :: width // 4], waves, atol=1e-6)


def test_where_a_patch_stands_matters_with_either_kind_of_positions() -> None:
    images = _images(count=1)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], axis=1)  # two rows of patches
    for options in (TINY, TINY | ORIGINAL):
        model = _built("vit", options)
        assert np.abs(model(images) - model(swapped)).max() > 1e-3, options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit", {"patch": 16}, "must divide by patch=16. Received: 8 x 12"),
        ("vit", {"size": "xl"}, "size must be one of ti, s, b, l. Received: 'xl'"),
        ("vit", {"heads": 5}, "width must divide by heads. Received: 384 by 5"),
        ("vit", {"width": 6, "heads": 2}, "needs a width of 8, 12, 16, ... Received: 6"),
        ("vit", {"width": "64"}, "width must be of type <class 'int'>. Received: '64'"),
        ("resnet", {"depth": 20}, "depth must be one of 18, 34, 50, 101, 152. Received: 20"),
        ("resnet", {"stem": "tiny"}, "stem must be one of imagenet, deep, small. Received: 'tiny'"),
        ("resnet", {"stochastic_depth": 1.0}, r"must be in \[0, 1\). Received: 1.0"),
    ],
)
def test_mistakes(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.find(name, options).build(SMALL)


# --- resnet ---


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({"depth": 50}, [16, 16, 16, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 2, 2, 2]),
        ({"depth": 18, "stem": "deep"}, [16, 16, 8, 8, 4, 4, 2, 2]),
        ({"depth": 18, "stem": "small"}, [64, 64, 32, 32, 16, 16, 8, 8]),
    ],
)
def test_where_the_image_is_halved(options: dict, sides: list[int]) -> None:
    model = models.find("resnet", options | {"width": 8}).build(Spec(Array((64, 64, 3), "uint8"), SMALL.label, 5))
    blocks = [layer for layer in model.layers if layer.name.startswith("block_")]
    assert [block.output.shape[1] for block in blocks] == sides
    for block in blocks:  # v1.5: in the 3x3
        strided = [c.kernel_size for c in block.convolutions if c.strides != (1, 1)]
        assert strided in ([], [(3, 3)])


def test_a_block_begins_as_its_shortcut_with_zero_gamma_only() -> None:
    image = tf.nn.relu(tf.random.stateless_normal([2, 8, 8, 32], [0, 0]))
    for zero_gamma in (True, False):
        model = models.find("resnet", TINY_RESNET | {"zero_gamma": zero_gamma}).build(SMALL)
        block = model.get_layer("block_01")  # in the middle of a stage: the shortcut is the input
        assert np.array_equal(block(image, training=True), image) == zero_gamma


def test_batch_norm_is_as_told_in_every_layer() -> None:
    model = _built(
        "resnet", TINY_RESNET | {"batch_norm_momentum": 0.7, "batch_norm_epsilon": 1e-3, "synchronized": True}
    )
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == 1 + 3 * 16 + 4
    assert {(layer.momentum, layer.epsilon, layer.synchronized) for layer in norms} == {(0.7, 1e-3, True)}
    before = [layer.moving_mean.numpy() for layer in norms]
    model(_images())
    assert all(np.array_equal(b, layer.moving_mean) for b, layer in zip(before, norms, strict=True))
    for layer in norms:
        layer.synchronized = False  # which wants replicas
    model(_images(), training=True)
    assert not any(np.array_equal(b, layer.moving_mean) for b, layer in zip(before, norms, strict=True))


# --- what both share ---


def test_stochastic_depth_rates_rise_to_the_last_block() -> None:
    for name, options in (("vit", TINY | {"depth": 3}), ("resnet", TINY_RESNET | {"depth": 18})):
        model = models.find(name, options | {"stochastic_depth": 0.3}).build(SMALL)
        rates = [block.get_config()["stochastic_depth"] for block in model.layers if block.name.startswith("block_")]
        np.testing.assert_allclose(rates, np.linspace(0, 0.3, len(rates)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stochastic_depth_drops_whole_examples_at_its_rate(dtype: str) -> None:
    rate, count = 0.009, 200_000
    layer = _blocks.StochasticDepth(rate, seed=0, dtype=dtype)
    x = tf.ones((count, 2, 1), dtype)
    assert np.array_equal(layer(x), x), "outside of training nothing is dropped"
    y = np.asarray(tf.cast(layer(x, training=True), tf.float32))
    assert np.array_equal(y[:, 0], y[:, 1])
    assert set(np.unique(y)) == {0.0, float(tf.cast(tf.cast(1.0, dtype) / (1 - rate), tf.float32))}
    deviation = math.sqrt(rate * (1 - rate) / count)
    assert abs((y[:, 0] == 0).mean() - rate) < 5 * deviation
    assert not np.array_equal(y, tf.cast(layer(x, training=True), tf.float32)), "another draw at each call"


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_a_branch_that_is_dropped_leaves_the_shortcut(name: str) -> None:
    options = {"vit": TINY, "resnet": TINY_RESNET}[name] | {"stochastic_depth": 0.999}
    model = _built(name, options)
    block = [layer for layer in model.layers if layer.name.startswith("block_")][-1]
    x = tf.nn.relu(tf.random.stateless_normal([4, *block.input.shape[1:]], [0, 0]))
    assert not np.allclose(block(x), x)
    np.testing.assert_array_equal(block(x, training=True), x)


def _differences(*cases: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vision_worker", *cases],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=2 * GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _assert_alike(found: dict) -> None:
    assert found["begin"] == 0
    assert found["moved"] > 1e-2
    assert max(found["weights"], found["state"], found["logs"]) < 1e-5


@pytest.mark.slow
def test_vit_learns_the_same_on_two_replicas() -> None:
    _assert_alike(_differences("vit")["vit"])


@pytest.mark.nightly
def test_resnet_learns_the_same_on_two_replicas_if_its_norms_are_synchronized() -> None:
    found = _differences("synchronized", "resnet")
    _assert_alike(found["synchronized"])
    assert found["resnet"]["weights"] > 1e-3, "each replica's share has statistics of its own: the README says so"
