"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929); by default the plain one of arXiv:2205.01580.

Blocks are single layers named `block_00`, `block_01`, ..., so that what goes by layer names takes them whole.
"""

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from data.spec import Spec
from trainer.models import _blocks, _inputs


@dataclasses.dataclass(frozen=True)
class Size:
    """Width of a token, number of blocks, heads of the attention, width within the perceptron."""

    width: int
    depth: int
    heads: int
    hidden: int


# Table 2 of arXiv:2106.04560.
SIZES = {
    "ti": Size(192, 12, 3, 768),
    "s": Size(384, 12, 6, 1536),
    "b": Size(768, 12, 12, 3072),
    "l": Size(1024, 24, 16, 4096),
}
POSITIONS = ("sincos2d", "learned")
POOLINGS = ("average", "token")
EPSILON = 1e-6  # of the norms, as published
TEMPERATURE = 10_000.0  # of sincos2d: the longest wave, in patches over 2 pi


@dataclasses.dataclass(frozen=True)
class Options:
    """size: ti, s, b or l; width, depth, heads, hidden: in place of that size's; patch: side of a patch in pixels;
    positions: sincos2d or learned; pooling: average of all tokens, or a token of its own; hidden_head: a layer of the
    same width with tanh before the logits, as published runs from scratch have it; dropout: rate behind the positions
    and in each block; stochastic_depth: rate of dropping the last block's branches, less in those before.

    The original ViT has positions=learned, pooling=token.
    """

    size: str = "s"
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    hidden: int | None = None
    patch: int = 16
    positions: str = "sincos2d"
    pooling: str = "average"
    hidden_head: bool = False
    dropout: float = 0.0
    stochastic_depth: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("size", tuple(SIZES)), ("positions", POSITIONS), ("pooling", POOLINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}. Received: {getattr(self, name)!r}")
        chosen = self.chosen()
        if chosen.width % chosen.heads:
            raise ValueError(f"width must divide by heads. Received: {chosen.width} by {chosen.heads}")
        if self.positions == "sincos2d" and (chosen.width % 4 or chosen.width < 8):
            raise ValueError(f"positions=sincos2d needs a width of 8, 12, 16, ... Received: {chosen.width}")

    def chosen(self) -> Size:
        """The size, with what is given in place of its own."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Size)}
        return dataclasses.replace(SIZES[self.size], **{name: n for name, n in given.items() if n is not None})


def build(options: Options, spec: Spec) -> keras.Model:
    """[B, H, W, C] image -> [B, num_classes] float32 logits.

    Raises:
        ValueError: the data is not one image, or its sides are not whole numbers of patches.
    """
    image, x = _inputs.image_input(spec)
    size, patch = options.chosen(), options.patch
    rows, columns = (side // patch for side in x.shape[1:3])
    if any(side % patch for side in x.shape[1:3]):
        raise ValueError(
            f"height and width must divide by patch={patch}. Received: {x.shape[1]} x {x.shape[2]}. Set image_size, or "
            "another patch in model_options"
        )
    x = keras.layers.Rescaling(2.0, offset=-1.0)(x)
    x = keras.layers.Conv2D(size.width, patch, strides=patch, name="patches")(x)
    x = keras.layers.Reshape((rows * columns, size.width), name="tokens")(x)  # [B, T, width]
    if options.pooling == "token":
        x = ClassToken(name="token")(x)  # [B, 1 + T, width]
    table = sincos2d(rows, columns, size.width) if options.positions == "sincos2d" else None
    x = Positions(table, name="positions")(x)
    if options.dropout:
        x = keras.layers.Dropout(options.dropout, name="dropout")(x)
    for index, rate in enumerate(_blocks.depth_rates(options.stochastic_depth, size.depth)):
        x = EncoderBlock(
            size.heads, size.hidden, dropout=options.dropout, stochastic_depth=rate, name=f"block_{index:02d}"
        )(x)
    x = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm")(x)
    x = x[:, 0] if options.pooling == "token" else keras.layers.GlobalAveragePooling1D(name="pool")(x)  # [B, width]
    if options.hidden_head:
        x = keras.layers.Dense(size.width, activation="tanh", name="hidden_head")(x)
    # Logits of 0 to begin with: every class is as likely.
    return keras.Model(image, _inputs.logits(x, spec, "zeros"), name="vit")


def sincos2d(rows: int, columns: int, width: int) -> np.ndarray:
    """[rows * columns, width] float32: a quarter each of sin and cos of the column, sin and cos of the row.

    Chen et al. 2021, arXiv:2104.02057, in the form of arXiv:2205.01580.
    """
    row, column = (index.reshape(-1, 1) for index in np.mgrid[:rows, :columns])
    frequencies = TEMPERATURE ** -np.linspace(0.0, 1.0, width // 4)
    angles = [position * frequencies for position in (column, row)]
    waves = [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    return np.concatenate(waves, axis=1).astype("float32")


@keras.saving.register_keras_serializable(package=_blocks.PACKAGE)
class ClassToken(keras.layers.Layer):
    """Puts a token that is learned before those of the patches."""

    def build(self, input_shape: tuple) -> None:
        """The token, zeros."""
        self.token = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros", name="class_token")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """[B, T, D] -> [B, 1 + T, D]."""
        token = keras.ops.cast(self.token, x.dtype)
        shape = (keras.ops.shape(x)[0], 1, x.shape[-1])
        return keras.ops.concatenate([keras.ops.broadcast_to(token, shape), x], axis=1)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """As of `call`."""
        batch, tokens, width = input_shape
        return batch, tokens + 1, width


@keras.saving.register_keras_serializable(package=_blocks.PACKAGE, name="PatchPositions")  # of texts: Positions
class Positions(keras.layers.Layer):
    """Adds to each token what tells where it stands.

    Args:
        table: [T, D] float32, that the last T tokens get, and a class token before them nothing; None: it is learned,
            for all of them.
    """

    def __init__(self, table: Any = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = None if table is None else np.asarray(table, "float32")

    def build(self, input_shape: tuple) -> None:
        """The table that is learned, with lengths of about 1."""
        _, tokens, width = input_shape
        if self.table is None:
            initializer = keras.initializers.RandomNormal(stddev=1 / math.sqrt(width))
            self.learned = self.add_weight(shape=(tokens, width), initializer=initializer, name="position_embedding")
        else:
            self.padded = np.pad(self.table, ((tokens - len(self.table), 0), (0, 0)))

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """[B, T, D] -> the same."""
        return x + keras.ops.cast(self.learned if self.table is None else self.padded, x.dtype)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """As it came in."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """What it is made again from."""
        return {**super().get_config(), "table": None if self.table is None else self.table.tolist()}


@keras.saving.register_keras_serializable(package=_blocks.PACKAGE)
class EncoderBlock(keras.layers.Layer):
    """Attention and a perceptron of two layers, each behind a norm and beside a shortcut.

    Args:
        heads: of the attention.
        hidden: width within the perceptron.
        dropout: rate behind attention and each layer of the perceptron.
        stochastic_depth: rate of dropping a branch.
    """

    def __init__(self, heads: int, hidden: int, *, dropout: float = 0.0, stochastic_depth: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.settings = {"heads": heads, "hidden": hidden, "dropout": dropout, "stochastic_depth": stochastic_depth}
        inner = {"dtype": self.dtype_policy}
        self.norms = [keras.layers.LayerNormalization(epsilon=EPSILON, name=f"norm_{i}", **inner) for i in range(2)]
        self.drops = [keras.layers.Dropout(dropout, name=f"dropout_{i}", **inner) for i in range(3)]
        self.depths = [
            _blocks.StochasticDepth(stochastic_depth, name=f"stochastic_depth_{i}", **inner) for i in range(2)
        ]

    def build(self, input_shape: tuple) -> None:
        """Makes what depends on the width that comes in."""
        width, heads, hidden = input_shape[-1], self.settings["heads"], self.settings["hidden"]
        inner = {"dtype": self.dtype_policy}
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, name="attention", **inner)
        self.attention.build(input_shape, input_shape)
        self.expand = keras.layers.Dense(hidden, name="expand", **inner)
        self.expand.build(input_shape)
        self.reduce = keras.layers.Dense(width, name="reduce", **inner)
        self.reduce.build((*input_shape[:-1], hidden))
        for norm in self.norms:
            norm.build(input_shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """[B, T, D] -> the same."""
        y = self.norms[0](x)
        y = self.drops[0](self.attention(y, y))
        x = x + self.depths[0](y)
        y = keras.activations.gelu(self.expand(self.norms[1](x)), approximate=True)
        y = self.drops[2](self.reduce(self.drops[1](y)))
        return x + self.depths[1](y)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """As it came in."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """What it is made again from."""
        return {**super().get_config(), **self.settings}
