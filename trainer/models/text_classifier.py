"""A small encoder of texts: blocks of _text.py in which all positions see each other, then their mean."""

import dataclasses

import keras
from keras import ops

from data.spec import Array, Spec
from trainer.models import _inputs, _text


@dataclasses.dataclass(frozen=True)
class Options:
    """width: channels; kernel: positions that a convolution in front of the blocks joins, which makes pieces of words
    of bytes, 0: none; depth: blocks; heads: attention heads; hidden: inner width of the gated layers, 0 for 8/3 of the
    width; dropout: rate of what each layer adds, and before the logits."""

    width: int = 64
    kernel: int = 0
    depth: int = 2
    heads: int = 2
    hidden: int = 0
    dropout: float = 0.1


def build(options: Options, spec: Spec) -> keras.Model:
    """tokens [B, S], 0 for padding -> [B, num_outputs of the task] float32 logits, whatever the padding.

    Raises:
        ValueError: the data is not tokens of a known number, or sizes do not divide.
    """
    inputs, tokens, segments = _text.token_inputs(spec)
    array = spec.inputs if isinstance(spec.inputs, Array) else spec.inputs["tokens"]
    if array.below is None:
        raise ValueError(f"it takes tokens of a vocabulary whose size the dataset tells. Received: {array}")
    if segments is None:
        segments = ops.cast(ops.not_equal(tokens, 0), "int32")
    sizes = {
        "width": options.width,
        "heads": options.heads,
        "kv_heads": options.heads,
        "hidden": options.hidden or _text.hidden_width(options.width),
        "depth": options.depth,
    }
    _text.check_sizes(sizes)
    positions = _text.Positions(options.width // options.heads, causal=False, name="positions")(segments)
    x = keras.layers.Embedding(array.below, options.width, _text.initializer(), name="embedding")(tokens)
    if options.kernel:
        x = _text.norm("embedding_norm")(x)
        x = x * ops.cast(ops.not_equal(segments, 0), x.dtype)[:, :, None]  # as beyond the end of the record
        x = keras.layers.Conv1D(options.width, options.kernel, padding="same", activation="silu", name="joined")(x)
    for number in range(options.depth):
        x = _text.Block(**sizes, dropout=options.dropout, name=f"block_{number:02d}")(x, *positions)
    x = _text.norm("norm")(x)
    present = ops.cast(ops.not_equal(segments, 0), "bool")
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x, mask=present)  # [B, width]
    if options.dropout:
        x = keras.layers.Dropout(options.dropout)(x)
    return keras.Model(inputs, _inputs.logits(x, spec), name="text_classifier")
