"""The next token at each position of a text.

The label is [S] int32: the token that comes next, below 0 where there is none (padding).
"""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from data.spec import Spec

# Which document of a packed record a position is of (data/datasets/sources/tokens.py).
SEGMENTS = "segments"


def reason_against(spec: Spec) -> str | None:
    """It wants a sequence of tokens."""
    if len(spec.label.shape) != 1 or spec.label.dtype != "int32" or not num_outputs(spec):
        return "the label is not a sequence of tokens of a known vocabulary"
    return None


def num_outputs(spec: Spec) -> int:
    """A logit a token of the vocabulary."""
    return int(spec.label.below or spec.num_classes or 0)


def takes(shape: tuple[int, ...], spec: Spec) -> bool:
    """[S, vocabulary]; a vocabulary filled up to a size that suits the hardware is larger."""
    return len(shape) > len(spec.label.shape) and shape[:-1] == spec.label.shape and shape[-1] >= num_outputs(spec)


def loss(spec: Spec) -> keras.losses.Loss:
    """See `TokenCrossentropy`."""
    return TokenCrossentropy()


def metrics(spec: Spec) -> list[keras.metrics.Metric]:
    """Perplexity and accuracy, over all positions that have a next token, each counted once."""
    return [Perplexity(name="perplexity"), TokenAccuracy(name="accuracy")]


def outputs(y_pred: Any, spec: Spec) -> dict[str, Any]:
    """`logits`, [B, S, vocabulary] float32: at each position of the token that comes next."""
    return {"logits": y_pred}


def given(spec: Spec) -> dict[str, int]:
    """What is served is one text a row, filled up behind it with anything: no position looks at what comes later."""
    return {SEGMENTS: 1} if isinstance(spec.inputs, Mapping) and SEGMENTS in spec.inputs else {}


@keras.saving.register_keras_serializable(package="trainer")
class TokenCrossentropy(keras.losses.Loss):
    """Cross-entropy of float32 logits [B, S, V] against the next tokens [B, S], 0 where there is none.

    The mean over all B * S positions, empty ones too. Keras' own `ignore_class` divides by the number of tokens in the
    batch: then a token's weight depends on how full the records beside it are, and the mean over replicas is not that
    of the global batch. The mean over tokens is the logarithm of `Perplexity`.

    Args:
        z_loss: factor of the squared logarithm of the softmax's divisor, which keeps logits from drifting (Chowdhery et
            al. 2022, arXiv:2204.02311, section 5).
    """

    def __init__(self, z_loss: float = 0.0, name: str = "token_crossentropy", **options: Any):
        super().__init__(name=name, **options)
        self._z_loss = z_loss

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """[B] float32: the mean over positions, so that an example's weight is one number."""
        entropy = _crossentropy(y_true, y_pred)
        if self._z_loss:
            entropy += self._z_loss * ops.square(ops.logsumexp(y_pred, axis=-1)) * _present(y_true)
        return ops.mean(entropy, axis=-1)

    def get_config(self) -> dict:
        return {**super().get_config(), "z_loss": self._z_loss}


@keras.saving.register_keras_serializable(package="trainer")
class Perplexity(keras.metrics.Mean):
    """exp of the mean cross-entropy over all tokens: sum by sum, over batches and replicas."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch: y_true [B, S], y_pred [B, S, V], sample_weight [B] or none."""
        super().update_state(_crossentropy(y_true, y_pred), _weights(y_true, sample_weight))

    def result(self) -> Any:
        """float32."""
        return ops.exp(super().result())


@keras.saving.register_keras_serializable(package="trainer")
class TokenAccuracy(keras.metrics.Mean):
    """Share of the tokens that have the largest logit."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch: y_true [B, S], y_pred [B, S, V], sample_weight [B] or none."""
        right = ops.equal(ops.cast(y_true, "int32"), ops.argmax(y_pred, axis=-1))
        super().update_state(ops.cast(right, "float32"), _weights(y_true, sample_weight))


def _present(y_true: Any) -> Any:
    """[B, S] float32: 1 where there is a next token."""
    return ops.cast(y_true >= 0, "float32")


def _crossentropy(y_true: Any, y_pred: Any) -> Any:
    """[B, S] float32."""
    entropy = ops.sparse_categorical_crossentropy(ops.maximum(y_true, 0), y_pred, from_logits=True)
    return entropy * _present(y_true)


def _weights(y_true: Any, sample_weight: Any) -> Any:
    """[B, S] float32: the example's weight where there is a next token."""
    present = _present(y_true)
    return present if sample_weight is None else present * ops.cast(sample_weight, "float32")[:, None]
