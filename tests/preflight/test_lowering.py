"""Steps lowered for XLA: what cannot be, by which line of the user's, and what the program holds."""

import inspect
import pathlib

import keras
import pytest
import tensorflow as tf

from tests.preflight import odd_layers
from trainer import operations, replicated
from trainer.backends.tensorflow import lowering
from trainer.lowered import Lowered, LoweringError, untraceable
from trainer.preflight import compilation, slices

REPLICAS, BATCH = 4, 8


def lowered(does) -> Lowered:
    """A small model with an odd layer, its train step lowered as one of four replicas would run it."""
    devices = lowering.cluster_of(REPLICAS)
    with devices.scope():
        layers = [keras.Input((3,)), keras.layers.Dense(16), odd_layers.Odd(does), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        spec = (keras.KerasTensor((BATCH, 3), "float32"), keras.KerasTensor((BATCH,), "int32"))
        trained = replicated.Replicated(model, devices, spec)
    return lowering.train_step(trained.engine, trained.variables(), spec)


def line_of(does) -> str:
    """Where the body of a function of one or two lines ends, as messages name it."""
    lines, first = inspect.getsourcelines(does)
    return f"{pathlib.Path(odd_layers.__file__)}:{first + len(lines) - 1}"


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # through NumPy
@pytest.mark.parametrize(
    ("does", "operation"),
    [
        (odd_layers.eig, "Eig"),
        (odd_layers.py_function, "EagerPyFunc"),
        (odd_layers.numpy_function, "PyFunc"),
        (odd_layers.decode_jpeg, "DecodeJpeg"),
        (odd_layers.as_string, "AsString"),
        (odd_layers.dynamic_reshape, "Reshape"),
        (odd_layers.dynamic_range, "Range"),
        (odd_layers.growing_array, "TensorListResize"),
        (odd_layers.table, "LookupTableFindV2"),
    ],
)
def test_what_cannot_be_compiled_is_named_with_its_line(does, operation: str) -> None:
    with pytest.raises(LoweringError) as raised:
        lowered(does)
    found = raised.value.obstacle
    assert found.operation == operation
    assert "odd" in found.node
    assert found.place.startswith(line_of(does))
    assert found.instead == operations.instead_of(operation)
    assert len(str(found)) < 600
    assert "\n" not in str(found)


@pytest.mark.parametrize("does", [odd_layers.boolean_mask, odd_layers.unique, odd_layers.float64, odd_layers.svd])
def test_what_looks_odd_and_compiles_is_not_refused(does) -> None:
    assert lowered(does).program


@pytest.mark.parametrize(
    ("does", "foreign"),
    [(odd_layers.foreign_variable, "lonely"), (odd_layers.foreign_generator, "StateVar")],
)
def test_variables_that_the_model_does_not_know_compile_and_are_named(does, foreign: str) -> None:
    does(tf.zeros((1, 16)))  # makes it
    [said] = lowered(does).remarks()
    assert said.startswith(f"{foreign}: a variable that no checkpoint holds")
    assert f" At {line_of(does)}" in said


def test_tensors_made_outside_are_no_input() -> None:
    odd_layers.foreign_constant(tf.zeros((1, 16)))  # makes it
    program = lowered(odd_layers.foreign_constant)
    assert [name for name in program.parameters if name.startswith("input/")] == ["input/0", "input/1"]
    assert sum(name.startswith("constant/") for name in program.parameters) == 1


def test_arguments_may_be_nested() -> None:
    specs = ({"b": tf.TensorSpec((2,)), "a": tf.TensorSpec((2, 3))}, tf.TensorSpec((2,)))
    program = lowering.lower(lambda x, y: tf.reduce_sum(x["a"], axis=1) - x["b"] * y, specs, {})
    assert program.parameters == ("input/0", "input/1", "input/2")


def test_print_is_named_by_its_line() -> None:
    with pytest.raises(LoweringError, match=r"odd_layers\.py:\d+ \(with tf\.control_dependencies.*tf\.print"):
        lowered(odd_layers.printed)


def test_code_that_cannot_be_traced_is_named_by_its_line() -> None:
    with pytest.raises(RuntimeError) as raised:
        lowered(odd_layers.python_if)
    found = untraceable(raised.value)
    assert found.place.startswith(line_of(odd_layers.python_if))
    assert "as a Python `bool` is not allowed" in found.reason


def test_parameters_are_named_in_their_order() -> None:
    program = lowered(odd_layers.plain)
    assert program.parameters[:2] == ("input/0", "input/1")
    assert len(set(program.parameters)) == len(program.parameters)
    ends = [name.rpartition("/")[2] for name in program.parameters]
    for weight in ("kernel", "moving_mean", "gamma"):
        assert weight in ends
    assert sum("velocity" in end for end in ends) == 6
    assert all(
        name.startswith(("input/", "model/", "optimizer/", "metrics/", "random/")) for name in program.parameters
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("does", "kind"),
    [
        (odd_layers.plain, None),
        (odd_layers.boolean_mask, None),
        (odd_layers.unique, None),
        (odd_layers.float64, None),
        (odd_layers.svd, None),
        (odd_layers.complex64, None),
        (odd_layers.complex128, "unsupported"),
    ],
)
def test_what_xla_takes_the_compiler_for_tpus_takes_too(does, kind: str | None, compiler) -> None:
    """But for complex128, which it names as TensorFlow's operation."""
    program = lowered(does)
    result = compiler.compile(program.program, slices.parse("v5e-4"))
    assert getattr(result, "kind", None) == kind, result
    if isinstance(result, compilation.Refusal):
        found = program.obstacle(result.message, result.op_name, result.operation)
        assert found is not None and found.operation == "FFT" and found.place.startswith(line_of(does))
