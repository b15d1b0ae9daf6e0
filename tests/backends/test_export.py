"""What is exported on one backend serves and loads as what the other exports of the same weights."""

import importlib
import json
import logging
import pathlib
import pkgutil
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.spec import Array, Spec
from tests.backends import export_worker
from tests.backends.export_worker import BATCH, LENGTH, NAMES, VOCABULARY
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import export, models

# Most of what JAX does here is to compile what runs once.
_QUICK = "--xla_backend_optimization_level=0"


def made_up(name: str) -> dict[str, np.ndarray]:
    """Inputs of a case."""
    generator = np.random.default_rng(0)
    images = {"x/": generator.integers(0, 256, (BATCH, 8, 8, 3)).astype("uint8")}
    tokens = generator.integers(1, VOCABULARY, (BATCH, LENGTH)).astype("int32")
    tokens[1:, -3:] = 0
    columns = {
        "x/year": generator.integers(1990, 2027, BATCH).astype("int32"),
        "x/kind": generator.integers(0, 3, BATCH).astype("int32"),
        "x/far": generator.normal(1e3, 5, (BATCH, 3)).astype("float32"),
    }
    segments = {"x/tokens": tokens, "x/segments": np.ones_like(tokens)}
    return {
        "cnn": images,
        "vit": images,
        "mlp": columns,
        "text_classifier": {"x/": tokens},
        "transformer": segments,
    }[name]


def drawn(model: keras.Model) -> list[np.ndarray]:
    """Weights of any kind; variances are above 0."""
    generator = np.random.default_rng(1)
    return [
        np.abs(generator.normal(0, 0.5, w.shape)).astype(w.dtype) if w.dtype.startswith("float") else w.numpy()
        for w in model.weights
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Exports of both backends, TensorFlow's made here."""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "jax").mkdir()
    for name in NAMES:
        model, spec = export_worker.made(name)
        arrays, weights = made_up(name), drawn(model)
        model.set_weights(weights)
        own = export_worker.computed(model, export_worker.inputs_of(arrays))
        export.save(model, spec, str(folder / "tensorflow" / name))
        held = {f"weight/{index}": weight for index, weight in enumerate(weights)}
        np.savez(folder / f"{name}.npz", own=own, **arrays, **held)
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.backends.export_worker", str(folder)]
    environ = clean_environ() | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "jax2tf" not in done.stderr and "Warning" not in done.stderr, done.stderr
    return folder


def served(directory: pathlib.Path, x: Any) -> dict[str, np.ndarray]:
    """What a SavedModel answers, by name."""
    signature = tf.saved_model.load(str(directory)).signatures["serving_default"]
    [(_, asked)] = [signature.structured_input_signature]
    given = x if isinstance(x, dict) else dict.fromkeys(asked, x)
    return {name: tensor.numpy() for name, tensor in signature(**{n: tf.constant(given[n]) for n in asked}).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_serves_the_same_whatever_exported_it(folder: pathlib.Path, name: str) -> None:
    given, of_jax = np.load(folder / f"{name}.npz"), np.load(folder / "jax" / f"{name}.npz")
    x, own = export_worker.inputs_of(dict(given)), given["own"]
    np.testing.assert_allclose(of_jax["own"], own, rtol=1e-5, atol=1e-5)
    for rows in (BATCH, 2):  # of any batch size
        part = tf.nest.map_structure(lambda array, rows=rows: array[:rows], x)
        answers = [served(folder / backend / name, part) for backend in ("tensorflow", "jax")]
        assert answers[0].keys() == answers[1].keys()
        first = "prediction" if name == "mlp" else "logits"
        for found in answers:
            np.testing.assert_allclose(found[first], own[:rows].reshape(found[first].shape), rtol=1e-5, atol=1e-5)
        for key, values in answers[0].items():
            np.testing.assert_allclose(answers[1][key], values, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kerass_file_loads_on_the_other_backend(folder: pathlib.Path, name: str) -> None:
    given, of_jax = np.load(folder / f"{name}.npz"), np.load(folder / "jax" / f"{name}.npz")
    np.testing.assert_allclose(of_jax["loaded"], given["own"], rtol=1e-5, atol=1e-5)
    loaded = keras.models.load_model(folder / "jax" / name / export.KERAS)
    found = export_worker.computed(loaded, export_worker.inputs_of(dict(given)))
    np.testing.assert_allclose(found, given["own"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_serving_assigns_nothing(folder: pathlib.Path) -> None:
    """A server answers many at once."""
    program = tf.saved_model.load(str(folder / "jax" / "cnn")).signatures["serving_default"].graph.as_graph_def()
    nodes = [*program.node, *(node for function in program.library.function for node in function.node_def)]
    assert not [node.name for node in nodes if "Assign" in node.op]
    [call] = [node for node in nodes if node.op == "XlaCallModule"]
    assert list(call.attr["platforms"].list.s) == [b"CPU", b"CUDA", b"TPU"]


@pytest.mark.slow
def test_a_model_that_needs_a_batch_size_is_refused_on_jax(folder: pathlib.Path) -> None:
    said = json.loads((folder / "jax" / "refused.json").read_text())
    assert said.startswith("JAX cannot export stubborn for any platform and batch size: ")
    assert "--mode=export --backend=tensorflow" in said
    assert not (folder / "jax" / "no").exists()


def test_layers_of_ours_are_told_apart_by_their_registered_names() -> None:
    names = [module.name for module in pkgutil.iter_modules(models.__path__)]
    kinds = [kind for name in names for kind in vars(importlib.import_module(f"{models.__name__}.{name}")).values()]
    layers = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, keras.layers.Layer)]
    ours = [layer for layer in layers if layer.__module__.startswith("trainer")]
    assert ours
    for layer in ours:
        name = keras.saving.get_registered_name(layer)
        assert keras.saving.get_registered_object(name) is layer, f"{name} is another class too: {layer}"


class Secretive(keras.Model):
    """Tells nobody its width."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_a_model_that_keras_cannot_write_down_is_exported_all_the_same(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Secretive(2)
    model(np.zeros((1, 3), "float32"))
    caplog.set_level(logging.INFO)
    export.save(model, Spec(Array((3,), "float32"), Array((2,), "float32"), None, ""), str(tmp_path / "export"))
    [said] = [record.getMessage() for record in caplog.records if record.name == "trainer.export"]
    assert "\n" not in said and said.startswith("the export has no model.keras, as Keras cannot write Secretive down: ")
    assert not (tmp_path / "export" / export.KERAS).exists()
    assert served(tmp_path / "export", np.ones((4, 3), "float32"))["output"].shape == (4, 2)


def test_columns_of_any_name_can_be_served(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow refuses spaces and more in the name of an input, after all of the training."""
    names = {"sepal length": "sepal_length_", "sepal_length": "sepal_length", "größe": "gr__e", "_id": "input_id"}
    assert export.served_names([*names, "a-b", "1.5"]) == {**names, "a-b": "a-b", "1.5": "1.5"}
    inputs = {name: keras.Input((), dtype="float32", name=name) for name in names}
    total = sum(factor * inputs[name] for factor, name in zip((1, 10, 100, 1000), names, strict=True))
    model = keras.Model(inputs, keras.ops.expand_dims(total, -1))
    spec = Spec({name: Array((), "float32") for name in names}, Array((1,), "float32"), None, "")
    export.save(model, spec, str(tmp_path / "export"))
    found = served(tmp_path / "export", {names[name]: np.full(2, digit, "f4") for digit, name in enumerate(names, 1)})
    assert found["output"].ravel().tolist() == [4321, 4321]
    assert "sepal_length_ for 'sepal length', gr__e for 'größe', input_id for '_id'" in caplog.text
