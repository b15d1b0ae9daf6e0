"""Steps lowered on JAX: what cannot be, by which line of the user's, and what XLA:TPU makes of what can.

The oracle of the program is that of TensorFlow's backend: the same step of the same model. Pytest runs on TensorFlow,
so a process of its own lowers on JAX (jax_lowering_worker.py).
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import keras
import pytest

from tests.conftest import ROOT
from tests.preflight.conftest import GUARD_SECS
from trainer import operations, replicated
from trainer.backends.tensorflow import lowering
from trainer.preflight import compilation, slices

pytestmark = pytest.mark.slow

# As in jax_lowering_worker.py, which imports JAX.
REPLICAS, BATCH, INPUTS, OUTPUTS = 8, 256, 512, 256
V5E_4 = slices.parse("v5e-4")
V6E_8 = slices.parse("v6e-8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """With what the worker left."""
    directory = tmp_path_factory.mktemp("lowered")
    command = [sys.executable, "-m", "tests.preflight.jax_lowering_worker", str(directory)]
    environ = os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def found(directory) -> dict[str, Any]:
    return json.loads((directory / "found.json").read_text())


def test_private_names_are_still_there(found) -> None:
    assert not found["missing"], "JAX has no more what trainer/backends/jax/lowering.py relies on"


@pytest.mark.parametrize(
    ("does", "operation"),
    [("eig", "eig"), ("pure_callback", "pure_callback"), ("debug_print", "debug_print")],
)
def test_what_cannot_be_lowered_is_named_with_its_line(found, does: str, operation: str) -> None:
    of_layer = found["odd"][does]
    obstacle = of_layer["obstacle"]
    assert obstacle["operation"] == operation
    assert "odd" in obstacle["node"]
    assert obstacle["place"].startswith(of_layer["line"])
    assert obstacle["instead"] == operations.instead_of(operation)


def test_what_calls_python_is_found_within_loops(found) -> None:
    obstacle = found["odd"]["in_a_loop"]["obstacle"]
    assert obstacle["operation"] == "debug_print"
    assert obstacle["place"].startswith(found["odd"]["debug_print"]["line"])


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("python_if", "TracerBoolConversionError"),  # Keras itself would lose it
        ("to_numpy", "TracerArrayConversionError"),
        ("boolean_mask", "NonConcreteBooleanIndexError"),
        ("derivative_of_callback", "do not support JVP"),
        ("unseeded", "[JAX RNG]"),
    ],
)
def test_what_cannot_be_traced_is_named_by_its_line(found, does: str, reason: str) -> None:
    of_layer = found["odd"][does]
    assert reason in of_layer["obstacle"]["reason"]
    assert of_layer["obstacle"]["place"].startswith(of_layer["line"])


def test_variables_that_the_model_does_not_know_are_named(found) -> None:
    of_layer = found["odd"]["foreign_variable"]
    [said] = of_layer["remarks"]
    assert said.startswith("lonely: a variable that no checkpoint holds")
    assert f" At {of_layer['line']}" in said


def test_large_constants_are_named(found) -> None:
    [said] = found["odd"]["large_constant"]["remarks"]
    assert said.startswith("a constant float32[512, 1024] of 2.0 MiB")
    assert found["odd"]["plain"]["remarks"] == []


def test_what_the_compiler_refuses_is_found_in_the_model(found, directory, compiler) -> None:
    """XLA:TPU names an operation by its path, or only by its kind."""
    result = compiler.compile((directory / "int64").read_bytes(), V5E_4)
    assert (result.kind, result.operation, result.op_name) == ("unsupported", "dot", found["refused"]["name"])
    said, does = found["refused"], found["odd"]["product_of_int64"]
    assert said["obstacle"]["operation"] == said["by_kind"] == "dot_general"
    assert said["obstacle"]["place"].startswith(does["line"])
    assert said["unknown"] is None


def test_parameters_are_all_of_the_state_and_the_batch(found) -> None:
    parameters = found["odd"]["plain"]["parameters"]
    assert len(set(parameters)) == len(parameters)
    assert parameters[-2:] == ["input/0", "input/1"]
    assert all(name.startswith(("input/", "model/", "optimizer/", "average/", "metrics/")) for name in parameters)
    for copies in ("velocity", "momentum", "average/"):  # adam's moments, and the moving average
        assert sum(copies in name for name in parameters) == 6
    assert any(name.endswith("seed_generator_state") for name in parameters)
    of_linear = found["linear"]["parameters"]
    assert of_linear["test"][-3:] == ["input/0", "input/1", "input/2"]
    assert of_linear["serve"] == ["model/sequential/dense/bias", "model/sequential/dense/kernel", "input/0"]


# --- the program that XLA:TPU makes of a step whose numbers are known ---


def compiled(compiler, program: bytes) -> compilation.Compiled:
    result = compiler.compile(program, V6E_8)
    assert isinstance(result, compilation.Compiled), result
    return result


@pytest.fixture(scope="module")
def of_jax(compiler, directory, found) -> tuple[compilation.Compiled, dict[str, compilation.Parameter]]:
    """A train step of JAX compiled, and its parameters by name."""
    result = compiled(compiler, (directory / "train").read_bytes())
    return result, dict(zip(found["linear"]["parameters"]["train"], result.parameters, strict=True))


@pytest.fixture(scope="module")
def of_tensorflow(compiler) -> tuple[compilation.Compiled, dict[str, compilation.Parameter]]:
    """The same of TensorFlow."""
    devices = lowering.cluster_of(REPLICAS)
    with devices.scope():
        model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS, name="dense")], name="sequential")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        spec = (keras.KerasTensor((BATCH, INPUTS)), keras.KerasTensor((BATCH,), "int32"))
        trained = replicated.Replicated(model, devices, spec)
    lowered = lowering.train_step(trained.engine, trained.variables(), spec)
    result = compiled(compiler, lowered.program)
    return result, dict(zip(lowered.parameters, result.parameters, strict=True))


def test_flops_are_those_of_one_replica(of_jax, of_tensorflow) -> None:
    products = 2 * 2 * BATCH * INPUTS * OUTPUTS  # logits; gradient of the kernel
    assert products <= of_jax[0].flops < 1.05 * products
    assert of_jax[0].flops == pytest.approx(of_tensorflow[0].flops, rel=0.03)


def test_all_reduce_carries_the_gradients_once(of_jax, of_tensorflow) -> None:
    [all_reduce] = of_jax[0].collectives
    assert (all_reduce.kind, all_reduce.dtype) == ("all-reduce", "f32")
    parameters = 4 * (INPUTS * OUTPUTS + OUTPUTS)
    assert parameters <= all_reduce.bytes <= parameters + 8  # and whether the loss is finite
    assert all_reduce.bytes == pytest.approx(sum(c.bytes for c in of_tensorflow[0].collectives), rel=0.01)


def test_what_is_updated_is_written_over(of_jax) -> None:
    compiled, parameters = of_jax
    assert all(parameter.aliased != name.startswith("input/") for name, parameter in parameters.items())
    assert compiled.memory.aliased == sum(p.bytes for p in parameters.values() if p.aliased)
    assert compiled.memory.outputs - compiled.memory.aliased <= 4096


def test_weights_and_input_take_as_much_as_on_tensorflow(of_jax, of_tensorflow) -> None:
    names = of_jax[1].keys() & of_tensorflow[1].keys()
    assert {"model/sequential/dense/kernel", "model/sequential/dense/bias", "input/0", "input/1"} < names
    for name in names:
        if not name.endswith("iteration"):  # int64 and int32
            assert of_jax[1][name].bytes == of_tensorflow[1][name].bytes, name


def test_the_same_step_is_the_same_program(found, directory, of_jax, without_python) -> None:
    assert found["linear"]["same"]
    assert without_python.compile((directory / "train").read_bytes(), V6E_8) == of_jax[0]
