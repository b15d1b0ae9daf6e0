"""Losses and metrics of a task, chosen by what the label is."""

import keras

from data.spec import Spec
from trainer.errors import ConfigError


def loss(spec: Spec) -> keras.losses.Loss:
    """Cross-entropy of float32 logits [B, num_classes] against int32 classes [B].

    Raises:
        ConfigError: the label is not a class, and the model brings no loss for it.
    """
    if spec.num_classes is None:
        raise ConfigError(
            "the dataset's label is not a class; a model for it brings its loss in compile_args. "
            f"Received: {spec.label}"
        )
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Accuracy for a class label, none otherwise; new objects, to be made under the strategy's scope."""
    return [] if spec.num_classes is None else [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
