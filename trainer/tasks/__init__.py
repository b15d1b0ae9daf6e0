"""What is learned about a label: losses, metrics, the size of a model's output, what an export gives. One file a task.

A task module holds

    reason_against(spec) -> str | None    why the label cannot be learned so; None if it can
    is_meant(spec) -> bool                only if labels that can be learned so may be meant for something else: whether
                                          this one is not, so that `auto` may choose the task
    num_outputs(spec) -> int              numbers that the model gives for an example, or for each of its positions
    takes(shape, spec) -> bool            whether what a model gives for an example can be held against the label
    loss(spec) -> keras.losses.Loss       a mean over examples (and positions): equal shares then make equal gradients
    metrics(spec) -> list                 new objects, to be made under the strategy's scope
    outputs(y_pred, spec) -> dict         what an export gives, by name

and, where labels can be shares of several classes,

    shares(y, smoothing, spec) -> tensor  [b, num_outputs] float32 of labels as stored, of which label smoothing has
                                          taken its part. Losses and metrics take them too: training may mix and smooth
                                          labels, evaluation has them as stored

and, only if an export does not ask for all inputs,

    given(spec) -> dict                   the input's name -> the value that it has everywhere

Importing this package imports none of them, nor TensorFlow.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from data.spec import Spec
from trainer.errors import ConfigError

AUTO = "auto"
# In the order in which `auto` asks them.
NAMES = ("classification", "language_model", "multi_label", "regression")


def choose(name: str, spec: Spec) -> str:
    """The task called `name`, or for `auto` the first that fits the label; "" if none does.

    Raises:
        ConfigError: the label cannot be learned so.
    """
    if name == AUTO:
        return next((task for task in NAMES if _is_meant(_module(task), spec)), "")
    reason = _module(name).reason_against(spec)
    if reason:
        raise ConfigError(f"--task={name} cannot be had: {reason}. Received: label {spec.label}")
    return name


def loss(spec: Spec) -> Any:
    """The loss of a spec's task.

    Raises:
        ConfigError: it has none, and the model brings no loss.
    """
    if not spec.task:
        raise ConfigError(
            "no task is plainly meant by the dataset's label: name one (--task=regression for quantities, multi_label "
            "for zeros and ones, --num_classes=N for classes), or bring a loss in the model's compile_args. "
            f"Received: {spec.label}"
        )
    return _module(spec.task).loss(spec)


def metrics(spec: Spec) -> list:
    """New metrics of a spec's task, none where it has none; to be made under the strategy's scope."""
    return _module(spec.task).metrics(spec) if spec.task else []


def num_outputs(spec: Spec) -> int:
    """How many numbers a model gives for an example, or for each of its positions.

    Raises:
        ValueError: no task fits the label.
    """
    if not spec.task:
        raise ValueError(f"the size of its output is not known, as no task fits the label. Received: {spec.label}")
    return _module(spec.task).num_outputs(spec)


def check_output(shape: tuple[int, ...], spec: Spec) -> None:
    """Raises ConfigError where the task's loss cannot hold what a model gives, [B, *shape], against the label."""
    if spec.task and not _module(spec.task).takes(shape, spec):
        raise ConfigError(
            f"the task {spec.task} cannot hold what the model gives against the label; choose a model for this data, "
            f"or bring a loss in the model's compile_args. Received: {shape} for each example of {spec.described}; a "
            f"label of shape {spec.label.shape}, {num_outputs(spec)} outputs"
        )


def outputs(y_pred: Any, spec: Spec) -> dict[str, Any]:
    """What an export gives, by name, of a model with a single output."""
    return _module(spec.task).outputs(y_pred, spec) if spec.task else {"output": y_pred}


def shares(spec: Spec) -> Callable[[Any, float, Spec], Any] | None:
    """What makes shares of classes of labels; None where labels cannot be mixed or smoothed."""
    return getattr(_module(spec.task), "shares", None) if spec.task else None


def given(spec: Spec) -> dict[str, int]:
    """Inputs that an export does not ask for, and the value that each has everywhere."""
    function = getattr(_module(spec.task), "given", None) if spec.task else None
    return function(spec) if function else {}


def _is_meant(module: ModuleType, spec: Spec) -> bool:
    return module.reason_against(spec) is None and getattr(module, "is_meant", lambda spec: True)(spec)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
