"""One number, or several."""

import math
from typing import Any

import keras
from keras import ops

from data.spec import Spec

_SINGLE_OR_ROW = 1


def reason_against(spec: Spec) -> str | None:
    """It wants numbers."""
    if spec.num_classes is not None:
        return "the label is a class"
    if len(spec.label.shape) > _SINGLE_OR_ROW:
        return "the label is neither a number nor a row of numbers"
    if spec.label.dtype == "int32" and spec.label.below is not None:
        return "the label is tokens, not quantities"
    return None


def is_meant(spec: Spec) -> bool:
    """Whole numbers may be classes, for all that the dataset says."""
    return spec.label.dtype == "float32" and spec.label.below is None


def num_outputs(spec: Spec) -> int:
    """As many as the label has."""
    return math.prod(spec.label.shape)


def takes(shape: tuple[int, ...], spec: Spec) -> bool:
    """As many numbers as the label has."""
    return math.prod(shape) == num_outputs(spec)


def loss(spec: Spec) -> keras.losses.Loss:
    """Mean squared error of predictions [B] or [B, 1] against labels [B], or [B, n] against [B, n], in the label's
    units squared."""
    return _MeanSquaredError()


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Mean absolute error and root of the mean squared error, in the label's units, and R2, the mean over a row."""
    return [_MeanAbsoluteError(name="mae"), _RootMeanSquaredError(name="rmse"), _R2Score(name="r2")]


def outputs(y_pred: Any, spec: Spec) -> dict[str, Any]:
    """`prediction`, float32 of the label's shape."""
    return {"prediction": ops.reshape(y_pred, [-1, *spec.label.shape])}


def _rows(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Both as [b, n], which they must agree on.

    Of two tensors [b] Keras' losses and metrics average over the batch before they look at the weights of examples, so
    padding would count; its R2 refuses them.
    """
    y_true = ops.reshape(y_true, [-1, math.prod(y_true.shape[1:])])
    return y_true, ops.reshape(y_pred, ops.shape(y_true))


class _MeanSquaredError(keras.losses.MeanSquaredError):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(*_rows(y_true, y_pred))


class _MeanAbsoluteError(keras.metrics.MeanAbsoluteError):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(*_rows(y_true, y_pred), sample_weight)


class _RootMeanSquaredError(keras.metrics.RootMeanSquaredError):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(*_rows(y_true, y_pred), sample_weight)


class _R2Score(keras.metrics.R2Score):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(*_rows(y_true, y_pred), sample_weight)
