"""Lowers steps on JAX and stores what came out: `python -m tests.preflight.jax_lowering_worker DIRECTORY`.

`found.json` has for each odd layer how the lowering of its train step ended, and the names of parameters; the programs
lie beside it.
"""

import inspect
import json
import pathlib
import sys

import jax
import keras
import numpy as np

from tests.preflight import odd_jax_layers as odd_layers
from trainer import replicated
from trainer.backends.jax import lowering
from trainer.lowered import Lowered, LoweringError, untraceable

ODD = (
    *(odd_layers.plain, odd_layers.eig, odd_layers.pure_callback, odd_layers.debug_print, odd_layers.in_a_loop),
    *(odd_layers.derivative_of_callback, odd_layers.python_if, odd_layers.boolean_mask, odd_layers.to_numpy),
    *(odd_layers.unseeded, odd_layers.product_of_int64, odd_layers.foreign_variable, odd_layers.large_constant),
)
# Of a linear classifier, in which products are by far the most of what is computed.
REPLICAS, BATCH, INPUTS, OUTPUTS = 8, 256, 512, 256
ODD_BATCH, ODD_REPLICAS = 8, 4
# The product of int64, as the compiler's refusal has it.
NAMED_BY_XLA = "jvp(sequential)/odd/dot_general"


def built(layers: list, optimizer: keras.optimizers.Optimizer, batch: int, num_replicas: int):
    """A model on a slice, and a replica's batch."""
    devices = lowering.cluster_of(num_replicas)
    keras.utils.clear_session()  # names begin anew
    with devices.scope():
        model = keras.Sequential(layers)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    spec = (keras.KerasTensor((batch, *model.input_shape[1:])), keras.KerasTensor((batch,), "int32"))
    return replicated.Replicated(model, devices, spec), spec


def odd(does) -> Lowered:
    """The train step of a small model with an odd layer, for four replicas."""
    layers = [keras.Input((3,)), keras.layers.Dense(16), odd_layers.Odd(does), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    trained, spec = built(layers, keras.optimizers.Adam(use_ema=True), ODD_BATCH, ODD_REPLICAS)
    return lowering.train_step(trained.engine, trained.variables(), spec)


def how_it_ended(does) -> dict:
    """Of the lowering: an obstacle, or what is said of the program."""
    lines, first = inspect.getsourcelines(does)
    does_at = f"{odd_layers.__file__}:{first + len(lines) - 1}"
    try:
        lowered = odd(does)
    except LoweringError as error:
        return {"line": does_at, "obstacle": vars(error.obstacle)}
    except Exception as error:  # where Keras traces the model to build it, as preflight tells it too
        return {"line": does_at, "obstacle": vars(untraceable(error))}
    return {"line": does_at, "remarks": lowered.remarks(), "parameters": lowered.parameters}


def refused_by_the_compiler(directory: pathlib.Path) -> dict:
    """What is said of a product of int64 once XLA:TPU has named it as it does."""
    keras.utils.clear_session()
    lowered = odd(odd_layers.product_of_int64)
    (directory / "int64").write_bytes(lowered.program)
    found, by_kind = lowered.obstacle("no", NAMED_BY_XLA, "dot"), lowered.obstacle("no", None, "dot")
    assert found is not None and by_kind is not None
    return {"obstacle": vars(found), "by_kind": by_kind.operation, "unknown": lowered.obstacle("no", None, None)}


def linear(directory: pathlib.Path) -> dict:
    """Programs of a linear classifier, whose FLOPs are known, for eight replicas."""

    def made() -> tuple:
        layers = [keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS)]
        trained, spec = built(layers, keras.optimizers.SGD(0.1, momentum=0.9), BATCH, REPLICAS)
        return trained, spec, lowering.train_step(trained.engine, trained.variables(), spec)

    _, _, same = made()
    trained, spec, train = made()  # from another line
    variables = trained.variables()
    test = lowering.test_step(trained.engine, variables, (*spec, keras.KerasTensor((BATCH,))))
    serve = lowering.function(trained.engine, variables, lambda x: trained.model(x, training=False), spec[:1])
    (directory / "train").write_bytes(train.program)
    (directory / "test").write_bytes(test.program)
    parameters = {"train": train.parameters, "test": test.parameters, "serve": serve.parameters}
    return {"parameters": parameters, "same": train.program == same.program}


def private() -> list[str]:
    """Names of JAX that lowering.py relies on and that are not there."""
    [equation] = jax.jit(jax.numpy.sin).trace(np.zeros(())).jaxpr.jaxpr.eqns
    frame = equation.source_info.traceback.frames[0]
    wanted = [
        (jax.config, "values"),
        (equation.source_info, "name_stack"),
        (frame, "file_name"),
        (frame, "line_num"),
        (equation.primitive, "name"),
        (keras.StatelessScope, "get_current_value"),
    ]
    missing = [f"{owner}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    return missing + [name for name in (lowering.LINES,) if name not in jax.config.values]


def main() -> None:
    """See above."""
    keras.utils.set_random_seed(0)
    lowering.cluster_of(1)
    odd_layers.foreign_variable(1.0)  # makes it
    directory = pathlib.Path(sys.argv[1])
    found = {
        "linear": linear(directory),
        "odd": {does.__name__: how_it_ended(does) for does in ODD},
        "refused": refused_by_the_compiler(directory) | {"name": NAMED_BY_XLA},
        "missing": private(),
    }
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
