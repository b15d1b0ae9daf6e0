"""What the models of text are made of: token inputs, and blocks of attention and a gated layer.

    x + attention(norm(x)), then x + gated(norm(x))

Normalised before each branch by its root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), positions by rotation
(RoFormer, Su et al. 2021, arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202), no biases: the decoder of LLaMA
(Touvron et al. 2023, arXiv:2302.13971). Keras has no attention with rotated positions.
"""

import math
from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from data.spec import Array, Spec

# Of the initial weights, as GPT-2 (Radford et al. 2019); those that write to the residual stream are smaller.
INITIAL_STDDEV = 0.02
# RoFormer's: the slowest pair of channels turns once in some 60,000 positions.
_SLOWEST = 10_000.0
# The gated layer has three matrices, so two thirds of the usual four widths make as many weights as two matrices do.
_GATED_WIDTHS = 8 / 3
_HIDDEN_MULTIPLE = 64
_EPSILON = 1e-6


def token_inputs(spec: Spec) -> tuple[Any, keras.KerasTensor, keras.KerasTensor | None]:
    """The model's inputs, and what they hold.

    Returns:
        inputs: `tokens`, or a dict of `tokens` and `segments`.
        tokens: [B, S] integers.
        segments: [B, S] integers: which document a position is of; None where the data has tokens alone.

    Raises:
        ValueError: the data is not a sequence of tokens.
    """
    arrays = {"tokens": spec.inputs} if isinstance(spec.inputs, Array) else spec.inputs
    if not {"tokens"} <= arrays.keys() <= {"tokens", "segments"} or any(len(a.shape) != 1 for a in arrays.values()):
        raise ValueError(f"it takes tokens [S], or tokens and segments. Received: {spec.described}")
    inputs = {name: keras.Input(array.shape, dtype=array.dtype, name=name) for name, array in arrays.items()}
    tokens = inputs["tokens"]
    if "segments" in inputs:
        return inputs, tokens, inputs["segments"]
    return tokens if isinstance(spec.inputs, Array) else inputs, tokens, None


def hidden_width(width: int) -> int:
    """The inner width of the gated layer of a block, where none is given."""
    return math.ceil(_GATED_WIDTHS * width / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE


def norm(name: str, dtype: Any = None) -> keras.layers.Layer:
    """Divides by the root mean square, with a scale."""
    return keras.layers.RMSNormalization(epsilon=_EPSILON, dtype=dtype, name=name)


def initializer(stddev: float = INITIAL_STDDEV) -> keras.initializers.Initializer:
    """Normal."""
    return keras.initializers.RandomNormal(stddev=stddev)


@keras.saving.register_keras_serializable(package="trainer")
class Positions(keras.layers.Layer):
    """Of `segments` [B, S]: who looks at whom, and where in its document each position is.

    Args:
        head_width: D, channels of a head; even.
        causal: positions look at earlier ones of their document only, and at themselves.
    """

    def __init__(self, head_width: int, causal: bool, **options: Any):
        super().__init__(dtype="float32", **options)  # the positions of a long text are not whole in bfloat16
        self._head_width, self._causal = head_width, causal

    def call(self, segments: Any) -> tuple:
        """mask [B, 1, S, S] bool; cosine and sine [B, S, 1, D/2] float32."""
        length = segments.shape[1]
        same = ops.equal(segments[:, :, None], segments[:, None, :])  # [B, S, S]
        earlier = ops.tril(ops.ones((length, length), "bool"))
        before = ops.logical_and(same, earlier)
        positions = ops.sum(ops.cast(before, "float32"), axis=-1) - 1.0  # [B, S]
        pairs = ops.arange(self._head_width // 2, dtype="float32")
        frequencies = ops.power(_SLOWEST, -2.0 * pairs / self._head_width)  # [D/2]
        angles = positions[:, :, None, None] * frequencies
        return (before if self._causal else same)[:, None], ops.cos(angles), ops.sin(angles)

    def compute_output_spec(self, segments: Any) -> tuple:
        """As `call`."""
        batch, length = segments.shape
        cosine, sine = (keras.KerasTensor((batch, length, 1, self._head_width // 2), "float32") for _ in range(2))
        return keras.KerasTensor((batch, 1, length, length), "bool"), cosine, sine

    def get_config(self) -> dict:
        return {**_without_dtype(super().get_config()), "head_width": self._head_width, "causal": self._causal}


@keras.saving.register_keras_serializable(package="trainer")
class Block(keras.layers.Layer):
    """Attention and a gated layer, each added to what it takes: [B, S, width] to the same.

    Args:
        width: channels.
        heads: attention heads, which share the width.
        kv_heads: heads of keys and values, each for as many query heads (Ainslie et al. 2023, arXiv:2305.13245).
        hidden: inner width of the gated layer.
        depth: blocks of the model; 2 * depth branches add to the residual stream.
        dropout: rate of what each branch adds.
    """

    def __init__(
        self, *, width: int, heads: int, kv_heads: int, hidden: int, depth: int, dropout: float = 0.0, **options: Any
    ):
        super().__init__(autocast=False, **options)  # which would round the angles too
        self._sizes = {
            "width": width, "heads": heads, "kv_heads": kv_heads, "hidden": hidden, "depth": depth, "dropout": dropout
        }  # fmt: skip
        self._head_width = width // heads
        policy = self.dtype_policy
        into, out = initializer(), initializer(INITIAL_STDDEV / math.sqrt(2 * depth))

        def dense(units: int, kind: keras.initializers.Initializer, name: str) -> keras.layers.Layer:
            return keras.layers.Dense(
                units, use_bias=False, kernel_initializer=kind, dtype=self.dtype_policy, name=name
            )

        self._attention_norm = norm("attention_norm", policy)
        self._gated_norm = norm("gated_norm", policy)
        self._query = dense(width, into, "query")
        self._key = dense(kv_heads * self._head_width, into, "key")
        self._value = dense(kv_heads * self._head_width, into, "value")
        self._attended = dense(width, out, "attended")
        self._gate, self._up = dense(hidden, into, "gate"), dense(hidden, into, "up")
        self._down = dense(width, out, "down")
        self._dropouts = [
            keras.layers.Dropout(dropout, dtype=self.dtype_policy, name=name) for name in ("dropout_1", "dropout_2")
        ]

    def build(self, shape: tuple, *_: tuple) -> None:
        """Makes the weights for x [B, S, width]."""
        hidden = (*shape[:-1], self._sizes["hidden"])
        for layer in (self._attention_norm, self._query, self._key, self._value, self._attended, self._gated_norm,
                      self._gate, self._up, *self._dropouts):  # fmt: skip
            layer.build(shape)
        self._down.build(hidden)

    def call(self, x: Any, mask: Any, cosine: Any, sine: Any, training: bool = False) -> Any:
        """[B, S, width]; mask, cosine and sine as of `Positions`."""
        x = ops.cast(x, self.compute_dtype)
        normed = self._attention_norm(x)
        query, key = (self._rotated(layer(normed), cosine, sine) for layer in (self._query, self._key))
        # Keras 3.15 does this itself, but not for a single head, which MKL's einsum then refuses.
        group = self._sizes["heads"] // self._sizes["kv_heads"]
        key, value = (ops.repeat(x, group, axis=2) for x in (key, self._by_head(self._value(normed))))
        attended = ops.dot_product_attention(query, key, value, mask=mask)
        x = x + self._dropouts[0](self._attended(ops.reshape(attended, ops.shape(x))), training=training)
        normed = self._gated_norm(x)
        gated = self._down(ops.silu(self._gate(normed)) * self._up(normed))
        return x + self._dropouts[1](gated, training=training)

    def compute_output_spec(self, x: Any, mask: Any, cosine: Any, sine: Any, training: bool = False) -> Any:
        """As x."""
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def _by_head(self, x: Any) -> Any:
        """[B, S, heads * D] to [B, S, heads, D]."""
        return ops.reshape(x, (-1, x.shape[1], x.shape[2] // self._head_width, self._head_width))

    def _rotated(self, x: Any, cosine: Any, sine: Any) -> Any:
        """[B, S, heads * D] to [B, S, heads, D], each pair of channels turned by its position's angle."""
        first, second = ops.split(ops.cast(self._by_head(x), "float32"), 2, axis=-1)
        turned = ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return ops.cast(turned, self.compute_dtype)

    def get_config(self) -> dict:
        return {**super().get_config(), **self._sizes}


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raises ValueError for sizes of a block that do not divide."""
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    if min(width, heads, kv_heads) < 1 or width % (2 * heads) or heads % kv_heads:
        raise ValueError(
            "width must be an even multiple of heads, and heads a multiple of kv_heads. "
            f"Received: width {width}, heads {heads}, kv_heads {kv_heads}"
        )


def _without_dtype(config: dict) -> dict:
    return {name: value for name, value in config.items() if name != "dtype"}
