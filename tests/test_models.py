"""The contract of a model, over every model found: a new file is tested without writing a test."""

import pathlib
import sys

import keras
import numpy as np
import pytest

from data.spec import Array, Spec
from trainer import models, rules, tasks
from trainer.errors import ConfigError

IMAGE = Spec(Array((32, 32, 3), "uint8"), Array((), "int32"), 7)


TOKENS = Array((12,), "int32", 7)
# Of models that do not take an image.
SPECS = {
    "transformer": Spec({"tokens": TOKENS, "segments": Array((12,), "int32", 3)}, TOKENS, None, "language_model"),
    "text_classifier": Spec(TOKENS, Array((), "int32"), 7),
}


def _noise(rng: np.random.Generator, array: Array, below: int) -> np.ndarray:
    return rng.integers(0, array.below or below, (4, *array.shape)).astype(array.dtype)


def _train_once(source: models.ModelSource, spec: Spec) -> keras.Model:
    """Builds a model and takes one step on noise."""
    model = source.build(spec)
    model.compile("sgd", tasks.loss(spec), jit_compile=False)
    rng = np.random.default_rng(0)
    x = keras.tree.map_structure(lambda array: _noise(rng, array, 256), spec.inputs)
    before = [w.copy() for w in model.get_weights()]
    model.train_on_batch(x, _noise(rng, spec.label, spec.num_classes))
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert any(changed)
    return model


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", rules.built_in_models())
def test_built_in_model(name: str, precision: str) -> None:
    keras.config.set_dtype_policy(precision)
    try:
        spec = SPECS[name] if name in SPECS else IMAGE
        model = _train_once(models.find(name, {}), spec)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.output_shape == (None, *spec.label.shape, 7)
    assert model.output.dtype == "float32", "logits in full precision"
    if spec is IMAGE:
        assert model.input.dtype == "uint8", "bytes cross to the device"


SMALL_APPLICATIONS = ["MobileNetV2", "EfficientNetB0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_APPLICATIONS)
def test_application(name: str) -> None:
    model = _train_once(models.find(f"applications/{name}", {}), IMAGE)
    assert model.output_shape == (None, 7)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_application_builds() -> None:
    from trainer.models import applications

    spec = Spec(Array((96, 96, 3), "uint8"), Array((), "int32"), 7)
    for name in applications.names():
        keras.utils.clear_session()
        model = models.find(f"applications/{name}", {}).build(spec)
        assert model.output_shape == (None, 7), name


def test_mlp_takes_several_inputs_of_any_shape() -> None:
    inputs = {"image": Array((4, 4, 1), "uint8"), "age": Array((), "float32"), "words": Array((3,), "float32")}
    spec = Spec(inputs, Array((), "int32"), 3)
    model = models.find("mlp", {"units": [8]}).build(spec)
    batch = {name: np.ones((2, *array.shape), array.dtype) for name, array in inputs.items()}
    assert model(batch).shape == (2, 3)


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A package of the user's, empty."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        del sys.modules[name]


def _write(package: pathlib.Path, text: str) -> None:
    (package / "net.py").write_text(text)


def test_users_own_model(package: pathlib.Path) -> None:
    _write(package, "import keras\ndef build(options, spec):\n    return keras.Sequential([keras.layers.Dense(2)])\n")
    assert isinstance(models.find("theirs.net", {}).build(IMAGE), keras.Model)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("def construct(): pass", {}, r"must define build\(options, spec\)"),
        ("import absent_package", {}, "needs 'absent_package', which is not installed"),
        ("def build(o, s): return 1", {"width": 3}, "has no options. Received: width"),
        ("def build(o, s): return undefined", {}, r"NameError: name 'undefined' is not defined \(.*net.py:1\)"),
        ("def build(o, s): raise ValueError('too\\nsmall')", {}, r"\(32, 32, 3\) uint8, 7 classes: too small"),
    ],
)
def test_mistakes_in_a_users_model(package: pathlib.Path, text: str, options: dict, message: str) -> None:
    _write(package, text)
    with pytest.raises(ConfigError, match=message):
        models.find("theirs.net", options).build(IMAGE)


def test_compile_args_are_checked(package: pathlib.Path) -> None:
    _write(package, "def build(o, s): pass\ndef compile_args(o, s): return {'loss': 'mse', 'metric': []}\n")
    with pytest.raises(ConfigError, match="may hold loss, metrics, optimizer. Received: metric"):
        models.find("theirs.net", {}).compile_args(IMAGE)


def test_colours_of_keras_do_not_reach_the_message(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "colourful.py").write_text("""
import keras

class Wrong(keras.layers.Layer):
    def call(self, x):
        return x + self.missing

def build(options, spec):
    return keras.Model(image := keras.Input(spec.inputs.shape), Wrong()(image))
""")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'Wrong' object has no attribute 'missing'") as raised:
        models.find("theirs.colourful", {}).build(IMAGE)
    assert "\x1b" not in str(raised.value)
