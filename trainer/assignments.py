"""What a model assigns to while a step of arrays is traced: noted, or refused where its value would be lost."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from trainer import internals, places
from trainer.errors import ConfigError


@contextlib.contextmanager
def noting_assigned(
    scope: keras.StatelessScope, keep: Callable[[keras.Variable, Any], Any]
) -> Iterator[list[keras.Variable]]:
    """A list to which each variable is added that is assigned to within the scope.

    Unless `keep(variable, value)` takes care of it, and returns what the variable is from now on, ConfigError for one
    that the scope is not handed: its value would be lost. ConfigError also for what TensorFlow knows only within a
    branch, a loop or a function.
    """
    assigned: list[keras.Variable] = []
    refused: list[ConfigError] = []
    add = scope.add_update

    def noted(update: tuple) -> None:
        variable, value = update
        if _is_inner(value, scope.get_current_value(variable)):
            refused.append(_refusal_of_inner(variable))
            raise refused[0]
        kept = keep(variable, value)
        if kept is None:
            _refuse_lost(scope, variable)
            assigned.append(variable)
        add((variable, value if kept is None else kept))

    scope.add_update = noted  # of this scope alone: replicas of TensorFlow are traced by turns
    try:
        yield assigned
    except Exception:
        if refused:  # a tf.function makes another error of it
            raise refused[0] from None
        raise


@contextlib.contextmanager
def refusing_lost_assignments() -> Iterator[None]:
    """While a step is traced, ConfigError for an assignment to a variable that its scopes are not handed."""
    update = keras.StatelessScope.add_update

    def checked(self: keras.StatelessScope, pair: tuple[keras.Variable, Any]) -> None:
        _refuse_lost(self, pair[0])
        update(self, pair)

    keras.StatelessScope.add_update = checked
    try:
        yield
    finally:
        keras.StatelessScope.add_update = update


def _refuse_lost(scope: keras.StatelessScope, variable: keras.Variable) -> None:
    mapping = scope.state_mapping
    # A scope without variables, as where only shapes are asked for, is to lose all.
    if mapping and id(variable) not in mapping and not internals.only_asks_for_shapes():
        raise ConfigError(
            f"the model assigns to the variable {variable.path}, which is not one of its own: a step of arrays "
            "only loses that, and each step finds what the first one found. Make it an attribute of a layer or the "
            "model: self.NAME = self.add_weight(...) or keras.random.SeedGenerator(...). It comes about at "
            f"{places.users_line()}"
        )


def _is_inner(value: Any, before: Any) -> bool:
    """Whether a value is a tensor of another graph of TensorFlow than that of before."""
    graph, outer = getattr(value, "graph", None), getattr(before, "graph", None)
    return graph is not None and outer is not None and graph is not outer


def _refusal_of_inner(variable: keras.Variable) -> ConfigError:
    return ConfigError(
        f"the model assigns to the variable {variable.path} within a tf.function, a branch or a loop, from where a "
        "step of tensors cannot take it. Return the value from there and assign it outside, or give the model a "
        "train_step that returns super().train_step(data): the step is Keras' own then. It comes about at "
        f"{places.users_line()}"
    )
