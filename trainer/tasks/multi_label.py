"""Several classes at once, each true or not."""

from typing import Any

import keras
from keras import ops

from data.spec import Spec

_BELOW_BOOLEAN = 2


def reason_against(spec: Spec) -> str | None:
    """It wants zeros and ones, one a class."""
    if spec.num_classes is not None:
        return "the label is one class"
    if len(spec.label.shape) != 1:
        return "the label is not one zero or one for each class, of shape [classes]"
    if spec.label.below not in (None, _BELOW_BOOLEAN):
        return "the label is tokens, not zeros and ones"
    return None


def is_meant(spec: Spec) -> bool:
    """Numbers [C] may be quantities too, unless the dataset says that they are zeros and ones."""
    return spec.label.below == _BELOW_BOOLEAN


def num_outputs(spec: Spec) -> int:
    """A logit a class."""
    return int(spec.label.shape[0])


def takes(shape: tuple[int, ...], spec: Spec) -> bool:
    """[C]; of another shape the loss would broadcast it."""
    return shape == spec.label.shape


def loss(spec: Spec) -> keras.losses.Loss:
    """Binary cross-entropy of float32 logits [B, C] against zeros and ones [B, C]; a mean over classes and examples."""
    return keras.losses.BinaryCrossentropy(from_logits=True)


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Accuracy over examples and classes at probability 0.5; F1 there, and areas under the ROC and the precision-recall
    curve (by 200 thresholds), each the mean over classes."""
    curves = {"multi_label": True, "num_labels": num_outputs(spec), "from_logits": True}
    return [
        keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0),  # of logits
        _F1OfLogits(average="macro", threshold=0.5, name="f1"),
        keras.metrics.AUC(name="roc_auc", **curves),
        keras.metrics.AUC(name="pr_auc", curve="PR", **curves),
    ]


def outputs(y_pred: Any, spec: Spec) -> dict[str, Any]:
    """`logits` and `probabilities`, [B, C] float32 each."""
    return {"logits": y_pred, "probabilities": ops.sigmoid(y_pred)}


class _F1OfLogits(keras.metrics.F1Score):
    """Keras' takes probabilities only."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, ops.sigmoid(y_pred), sample_weight)
