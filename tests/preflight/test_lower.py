"""Steps lowered for XLA: what cannot be, by which line of the user's, and what the program holds."""

import inspect
import pathlib

import keras
import pytest
import tensorflow as tf

from tests.preflight import odd_layers
from trainer import operations, replicated
from trainer.preflight import lower, stand_in

REPLICAS, BATCH = 4, 8


def lowered(does) -> lower.Lowered:
    """A small model with an odd layer, its train step lowered as one of four replicas would run it."""
    strategy = stand_in.StandInStrategy(REPLICAS)
    with strategy.scope():
        layers = [keras.Input((3,)), keras.layers.Dense(16), odd_layers.Odd(does), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        spec = (keras.KerasTensor((BATCH, 3), "float32"), keras.KerasTensor((BATCH,), "int32"))
        trained = replicated.Replicated(model, strategy, spec)
    data = (tf.TensorSpec((BATCH, 3), tf.float32), tf.TensorSpec((BATCH,), tf.int32))
    with trained.tracing():
        return lower.lower(lambda *d: strategy.run(trained.train_step, args=(d,)), data, trained.variables())


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
    with pytest.raises(lower.LoweringError) as raised:
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
    assert lowered(does).hlo


def test_print_is_named_by_its_line() -> None:
    with pytest.raises(lower.LoweringError, match=r"odd_layers\.py:\d+ \(with tf\.control_dependencies.*tf\.print"):
        lowered(odd_layers.printed)


def test_code_that_cannot_be_traced_is_named_by_its_line() -> None:
    with pytest.raises(RuntimeError) as raised:
        lowered(odd_layers.python_if)
    found = lower.untraceable(raised.value)
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


def test_all_gradients_cross_in_one_group_of_all_replicas() -> None:
    """The number of replicas is in the program, and one replica's own share is not multiplied by it."""
    strategy = stand_in.StandInStrategy(REPLICAS)

    def mean_and_sum(x):
        replica = tf.distribute.get_replica_context()
        mean = replica.all_reduce(tf.distribute.ReduceOp.MEAN, x)
        return mean, replica.all_reduce(tf.distribute.ReduceOp.SUM, x)

    assert strategy.num_replicas_in_sync == REPLICAS
    mean, total = strategy.run(mean_and_sum, args=(tf.constant(3.0),))
    assert (float(mean), float(total)) == (3.0, 12.0)
    graph = tf.function(lambda x: strategy.run(mean_and_sum, args=(x,))).get_concrete_function(tf.constant(3.0)).graph
    reductions = [operation for operation in graph.get_operations() if operation.type == "CollectiveReduceV2"]
    assert [int(tf.get_static_value(operation.inputs[1])) for operation in reductions] == [REPLICAS, REPLICAS]
