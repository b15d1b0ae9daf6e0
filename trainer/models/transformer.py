"""A decoder-only transformer over tokens, as LLaMA's (arXiv:2302.13971): see _text.py.

GPT-2's 125M size (Radford et al. 2019) is --model_options='width=768, depth=12, heads=12'.
"""

import dataclasses
from typing import Any

import keras

from data.spec import Spec
from trainer import tasks
from trainer.models import _text
from trainer.tasks import language_model


@dataclasses.dataclass(frozen=True)
class Options:
    """width: channels; depth: blocks; heads: attention heads; kv_heads: heads of keys and values, 0 as many as heads;
    hidden: inner width of the gated layers, 0 for 8/3 of the width; dropout: rate of what each layer adds;
    tied: the embeddings are the logits' weights too; z_loss: see `language_model.TokenCrossentropy`."""

    width: int = 256
    depth: int = 4
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    dropout: float = 0.0
    tied: bool = True
    z_loss: float = 0.0


def build(options: Options, spec: Spec) -> keras.Model:
    """tokens [B, S] and segments [B, S] (without: one document) -> [B, S, vocabulary] float32 logits of the next token.

    Raises:
        ValueError: the data is not tokens, or sizes do not divide.
    """
    inputs, tokens, segments = _text.token_inputs(spec)
    sizes = {
        "width": options.width,
        "heads": options.heads,
        "kv_heads": options.kv_heads or options.heads,
        "hidden": options.hidden or _text.hidden_width(options.width),
        "depth": options.depth,
    }
    _text.check_sizes(sizes)
    if segments is None:
        segments = keras.ops.ones_like(tokens)
    positions = _text.Positions(options.width // options.heads, causal=True, name="positions")(segments)
    embedding = keras.layers.ReversibleEmbedding(
        tasks.num_outputs(spec),
        options.width,
        tie_weights=options.tied,
        embeddings_initializer=_text.initializer(),
        dtype="float32",  # for its logits
        name="embedding",
    )
    x = embedding(tokens)  # [B, S, width]
    if options.dropout:
        x = keras.layers.Dropout(options.dropout)(x)
    for number in range(options.depth):
        x = _text.Block(**sizes, dropout=options.dropout, name=f"block_{number:02d}")(x, *positions)
    x = _text.norm("norm")(x)
    return keras.Model(inputs, embedding(x, reverse=True), name="transformer")


def compile_args(options: Options, spec: Spec) -> dict[str, Any]:
    """The task's loss, with the z-loss where that is asked for."""
    return {"loss": language_model.TokenCrossentropy(options.z_loss)} if options.z_loss else {}
