"""One class out of several."""

from typing import Any

import keras
from keras import ops

from data.spec import Spec


def reason_against(spec: Spec) -> str | None:
    """It wants a class label."""
    if spec.label.dtype != "int32":
        return "the label is not of whole numbers"
    return "the label is not a class; --num_classes makes it one" if spec.num_classes is None else None


def num_outputs(spec: Spec) -> int:
    """A logit a class."""
    return int(spec.num_classes or 0)


def takes(shape: tuple[int, ...], spec: Spec) -> bool:
    """[C], after the axes of a label that has any; more logits than classes are none's."""
    return len(shape) > len(spec.label.shape) and shape[:-1] == spec.label.shape and shape[-1] >= num_outputs(spec)


def loss(spec: Spec) -> keras.losses.Loss:
    """Cross-entropy of float32 logits [B, num_classes] against int32 classes [B] or shares [B, num_classes]."""
    return CrossEntropy(name="cross_entropy")


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Accuracy; while labels are mixed, against the class that has the largest share."""
    return [keras.metrics.MeanMetricWrapper(_accuracy, name="accuracy")]


def outputs(y_pred: Any, spec: Spec) -> dict[str, Any]:
    """`logits` and `probabilities`, [B, num_classes] float32 each."""
    return {"logits": y_pred, "probabilities": ops.softmax(y_pred)}


def shares(y: Any, smoothing: float, spec: Spec) -> Any:
    """Classes [B] to shares [B, num_classes] float32 of sum 1, `smoothing` of it spread evenly (arXiv:1512.00567)."""
    return ops.one_hot(y, num_outputs(spec)) * (1.0 - smoothing) + smoothing / num_outputs(spec)


class CrossEntropy(keras.losses.Loss):
    """Of logits, against classes or shares of classes: Keras has a loss for each, and compiles a model with one."""

    from_logits = True  # as losses of Keras say it

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """[B, ..., C] logits against [B, ...] classes or [B, ..., C] shares to [B, ...]."""
        if _are_shares(y_true, y_pred):
            return keras.losses.categorical_crossentropy(y_true, y_pred, from_logits=True)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def _accuracy(y_true: Any, y_pred: Any) -> Any:
    classes = ops.argmax(y_true, axis=-1) if _are_shares(y_true, y_pred) else y_true
    return keras.metrics.sparse_categorical_accuracy(classes, y_pred)


def _are_shares(y_true: Any, y_pred: Any) -> bool:
    return len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == y_pred.shape[-1]
