"""The model, and what it computes with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model, and what it computes with."""

    model: str = option(
        "cnn",
        "model: a file of trainer/models, applications/<Name> of Keras, keras_hub/<Backbone or preset>, or "
        "package.module of your own",
        group="model",
    )
    model_options: Mapping[str, Any] = option(
        {},
        "options of the model as TOML, such as 'units=[128, 64], dropout=0.1'; see the model's Options",
        group="model",
    )
    task: str = option(
        "auto",
        "what is learned about the label; auto: what fits it",
        group="model",
        choices=("auto", "classification", "language_model", "multi_label", "regression"),
    )
    precision: str = option(
        "float32",
        "dtype policy; weights, logits and loss stay float32",
        group="model",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
