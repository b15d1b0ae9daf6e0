"""One class out of several."""

import keras
import tensorflow as tf

from data.spec import Spec


def reason_against(spec: Spec) -> str | None:
    """It wants a class label."""
    return "the label is not a class; --num_classes makes it one" if spec.num_classes is None else None


def num_outputs(spec: Spec) -> int:
    """A logit a class."""
    return int(spec.num_classes or 0)


def loss(spec: Spec) -> keras.losses.Loss:
    """Cross-entropy of float32 logits [B, num_classes] against int32 classes [B]."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Accuracy."""
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def outputs(y_pred: tf.Tensor, spec: Spec) -> dict[str, tf.Tensor]:
    """`logits` and `probabilities`, [B, num_classes] float32 each."""
    return {"logits": y_pred, "probabilities": tf.nn.softmax(y_pred)}
