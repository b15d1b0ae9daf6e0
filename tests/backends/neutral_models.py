"""Models and steps for `neutral_worker`, the same on each backend."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trainer import backend, internals
from trainer.remat import rematerialise


def with_numpys_weights(model: keras.Model) -> keras.Model:
    """`model` with weights that no backend has drawn; variances and the like stay."""
    generator = np.random.default_rng(9)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(0, 0.3, variable.shape).astype("float32"))
    return model


def blocks() -> keras.Model:
    """Kernels, biases and norms in numbered blocks."""
    x = image = keras.Input((4,))
    for index in range(2):
        x = keras.layers.Dense(6, activation="gelu", name=f"block_{index}_dense")(x)
        x = keras.layers.LayerNormalization(name=f"block_{index}_norm")(x)
    return with_numpys_weights(keras.Model(image, keras.layers.Dense(2, name="head")(x)))


def applying(optimizer: keras.optimizers.Optimizer) -> Callable[[Sequence[np.ndarray]], None]:
    """A step of the optimizer, given gradients, as the engines have it: on JAX compiled, and of arrays only."""
    if backend.chosen() == "tensorflow":
        return lambda gradients: optimizer.apply([ops.convert_to_tensor(gradient) for gradient in gradients])
    own, weights = optimizer.variables, optimizer._trainable_variables
    step = backend.part("functions").compiled(optimizer.stateless_apply)

    def apply(gradients: Sequence[np.ndarray]) -> None:
        new_weights, new_own = step([v.value for v in own], list(gradients), [v.value for v in weights])
        for variable, value in zip((*weights, *own), (*new_weights, *new_own), strict=True):
            variable.assign(value)

    return apply


def normalised(behind_weights: bool) -> keras.Model:
    """A layer that adapts to the input, perhaps behind weights, and one that adapts to the label."""
    x = numbers = keras.Input((3,))
    x = keras.layers.Rescaling(0.5)(x)
    if behind_weights:
        x = keras.layers.Dense(3, name="early")(x)
    x = keras.layers.Normalization(name="numbers")(x)
    x = keras.layers.Dense(1, name="dense")(x)
    return with_numpys_weights(keras.Model(numbers, keras.layers.Normalization(invert=True, name="label")(x)))


class Function(keras.layers.Layer):
    """One of `keras.ops`."""

    def __init__(self, kind: str):
        super().__init__(name=kind)
        self.function = getattr(ops, kind)

    def call(self, x: Any) -> Any:
        return self.function(x)


def bad_at(kind: str) -> keras.Model:
    """Something that is not defined everywhere, or has no slope there, behind a layer and before another."""
    image = keras.Input((4,))
    x = keras.layers.Dense(4, use_bias=False, name="in")(image)
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dropout(0.2, seed=1)(Function(kind)(x)))
    model = with_numpys_weights(keras.Model(image, keras.layers.Dense(1, name="head")(x)))
    model.get_layer("in").kernel.assign(np.eye(4, dtype="float32"))
    model.compile("sgd", "mse", jit_compile=False)
    # So that the backends compute the same losses.
    internals.make_inert(model)
    return model


def padded() -> keras.Model:
    """What lint remarks on."""
    image = keras.Input((8, 8, 6), name="image")
    x = keras.layers.Conv2D(6, 3, groups=2, name="grouped")(image)
    return keras.Model(image, keras.layers.Dense(3, name="head")(keras.layers.Flatten()(x)))


class Centred(keras.layers.Layer):
    """Takes the mean over the batch off."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


def mixing(mixes: bool) -> keras.Model:
    """With a layer in which examples depend on each other, or without."""
    x = image = keras.Input((4,))
    for layer in (keras.layers.Dense(3), *([Centred(name="centred")] if mixes else []), keras.layers.Dense(2)):
        x = layer(x)
    return with_numpys_weights(keras.Model(image, x))


class Block(keras.layers.Layer):
    """A layer of layers with all that a layer may have: random numbers, statistics, a loss of its own."""

    def __init__(self, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(width, activation="relu", name="hidden")
        self.dropout = keras.layers.Dropout(0.3, seed=5)
        self.norm = keras.layers.BatchNormalization(name="norm")

    def build(self, shape: tuple) -> None:
        for layer in (self.hidden, self.dropout, self.norm):
            layer.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.dropout(self.hidden(x), training=training)
        self.add_loss(0.1 * ops.mean(ops.square(y)))
        return x + self.norm(y, training=training)


def remat() -> Iterator[tuple[str, Any]]:
    """Of steps with layers that are computed again and without: losses, gradients, state. Compiled, as in an engine."""
    x = np.random.default_rng(6).normal(size=(16, 8)).astype("float32")
    for precision in ("float32", "mixed_bfloat16"):
        for name, patterns in (("plain", []), ("again", ["block_*"])):
            keras.utils.clear_session()
            keras.config.set_dtype_policy(precision)
            image = keras.Input((8,))
            layers = [Block(8, name=f"block_{index}") for index in range(2)]
            head = keras.layers.Dense(1, dtype="float32", name="head")
            model = with_numpys_weights(keras.Model(image, head(layers[1](layers[0](image)))))
            keras.config.set_dtype_policy("float32")
            if patterns:
                rematerialise(model, patterns)
            for key, value in _steps(model, x):
                yield f"{precision}/{name}/{key}", value


def _steps(model: keras.Model, x: np.ndarray) -> Iterator[tuple[str, Any]]:
    functions = backend.part("functions")
    variables, state = model.trainable_variables, [*model.non_trainable_variables]

    def step(weights: list, held: list, x: Any) -> tuple[Any, list, list]:
        def loss_of(*weights: Any) -> tuple[Any, list]:
            mapping = [*zip(variables, weights, strict=True), *zip(state, held, strict=True)]
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                loss = ops.mean(ops.square(model(x, training=True))) + sum(
                    ops.cast(each, "float32") for each in model.losses
                )
            return loss, [scope.get_current_value(variable) for variable in state]

        return functions.value_and_gradients(loss_of, weights)

    compiled = functions.compiled(step)
    weights = [ops.convert_to_numpy(v.value) for v in variables]
    held = [ops.convert_to_numpy(v.value) for v in state]
    for index in range(2):
        loss, held, gradients = compiled(weights, held, x)
        held = [ops.convert_to_numpy(value) for value in held]
        weights = [w - 0.1 * ops.convert_to_numpy(g) for w, g in zip(weights, gradients, strict=True)]
        yield f"{index}/loss", loss
    if backend.chosen() == "jax":
        yield "products", np.array(compiled.lower(weights, held, x).as_text().count("dot_general"))
    for variable, value in zip((*variables, *state), (*weights, *held), strict=True):
        yield variable.path, value
