"""Backbones of KerasHub with a head for the task: `keras_hub/<Backbone>` anew, or `keras_hub/<preset>` pretrained.

A preset is a name that KerasHub knows (`vit_base_patch16_224_imagenet`), a handle such as `hf://user/model`, or a
directory of `save_to_preset`. Only backbones of one image, or of tokens, can be trained:

    an image    scaled as the preset's image converter says, to 0..1 without one
    tokens      of an input `tokens` [S] integers, or of `tokens` and `segments` (0 for padding). KerasHub has no mask
                between documents that are packed in one record: they see each other
"""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import keras

from data.spec import Array, Spec
from trainer.errors import ConfigError
from trainer.models import _inputs

LANGUAGE_MODEL = "language_model"
_TOKENS, _SEGMENTS = "tokens", "segments"
_TEXT_INPUTS = {"token_ids", "padding_mask", "segment_ids"}
# Of every backbone's constructor: what the data says, or the run's own options.
_NOT_OPTIONS = ("self", "args", "kwargs", "vocabulary_size", "image_shape", "data_format", "dtype", "name", "trainable")
_POOLINGS = ("auto", "mean", "first")


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """head_pooling: mean of all positions, or the first one's; auto: what the backbone pools itself, else the first
    where that is a class token, else the mean; padding_id: the token that stands for padding, without `segments`."""

    head_pooling: str = "auto"
    padding_id: int = 0

    def __post_init__(self) -> None:
        if self.head_pooling not in _POOLINGS:
            raise ValueError(f"head_pooling must be one of {', '.join(_POOLINGS)}. Received: {self.head_pooling!r}")


@dataclasses.dataclass(frozen=True)
class PresetOptions(HeadOptions):
    """weights: those of the preset; false: only its architecture."""

    weights: bool = True


def options_of(name: str) -> type:
    """The options of a backbone are its constructor's arguments, and those of the head; of a preset, `PresetOptions`.

    Raises:
        ConfigError: KerasHub is not installed, or has no such backbone.
    """
    library = _library()
    if not name.endswith("Backbone"):
        return PresetOptions
    names = [known for known in vars(library.models) if known.endswith("Backbone") and known != "Backbone"]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else f". There are: {', '.join(sorted(names))}"
        raise ConfigError(f"KerasHub has no backbone {name!r}{hint}")
    fields = []
    for parameter in inspect.signature(getattr(library.models, name).__init__).parameters.values():
        if parameter.name in _NOT_OPTIONS:
            continue
        required = parameter.default is inspect.Parameter.empty
        # The type of the default, where that tells one.
        known = Any if required or parameter.default is None else type(parameter.default)
        default = {} if required else {"default": parameter.default}
        fields.append((parameter.name, known, dataclasses.field(**default, kw_only=True)))
    return dataclasses.make_dataclass("Options", fields, bases=(HeadOptions,), frozen=True)


def build(options: HeadOptions, spec: Spec, *, name: str) -> keras.Model:
    """An image [B, H, W, C] or tokens [B, S] -> float32 logits.

    [B, num_outputs of the task]; of the task language_model [B, S, vocabulary].

    Raises:
        ValueError: the backbone is for other inputs or another task; from KerasHub, options or a preset that cannot be
            had.
    """
    backbone = _backbone(options, spec, name)
    if keras.tree.is_nested(backbone.input):
        return _of_tokens(backbone, options, spec)
    if len(backbone.input.shape) != 4:
        raise ValueError(f"its backbone takes neither one image nor tokens. Received: {backbone.input}")
    converter = _converter(name) if isinstance(options, PresetOptions) else None
    if converter is None:
        image, x = _inputs.image_input(spec)
    else:
        image, x = _inputs.published_image_input(spec)
        scale, offset = 1.0 if converter.scale is None else converter.scale, converter.offset or 0.0
        x = keras.layers.Rescaling(scale, offset, dtype="float32")(x)
    features = _pooled(backbone, backbone(x), options, mask=None)
    return keras.Model(image, _inputs.logits(features, spec), name=backbone.name)


def _backbone(options: HeadOptions, spec: Spec, name: str) -> keras.Model:
    library = _library()
    if isinstance(options, PresetOptions):
        return library.models.Backbone.from_preset(name, load_weights=options.weights)
    constructor = getattr(library.models, name)
    of_head = {field.name for field in dataclasses.fields(HeadOptions)}
    arguments = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in of_head}
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    wanted = inspect.signature(constructor.__init__).parameters
    if "vocabulary_size" in wanted:
        arguments["vocabulary_size"] = _vocabulary(spec)
    if "image_shape" in wanted and isinstance(spec.inputs, Array):
        arguments["image_shape"] = spec.inputs.shape
    return constructor(**arguments)


def _of_tokens(backbone: keras.Model, options: HeadOptions, spec: Spec) -> keras.Model:
    """A model of a backbone that takes a dict of tokens."""
    wanted = set(backbone.input)
    if not {"token_ids"} <= wanted <= _TEXT_INPUTS:
        raise ValueError(
            f"its backbone takes neither one image nor tokens alone. Received: {', '.join(sorted(wanted))}"
        )
    vocabulary = _vocabulary(spec)
    if backbone.vocabulary_size < vocabulary:
        raise ValueError(f"it knows {backbone.vocabulary_size} tokens. Received: data of {vocabulary}")
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {_TOKENS: spec.inputs}
    inputs = {key: keras.Input(array.shape, dtype=array.dtype, name=key) for key, array in arrays.items()}
    ids = keras.ops.cast(inputs[_TOKENS], "int32")  # [B, S]
    real = inputs[_SEGMENTS] != 0 if _SEGMENTS in inputs else ids != options.padding_id  # [B, S] bool
    given = {"token_ids": ids, "padding_mask": real, "segment_ids": keras.ops.zeros_like(ids)}
    hidden = backbone({key: given[key] for key in wanted})
    if spec.task == LANGUAGE_MODEL:
        outputs = _next_token(backbone, hidden)
    else:
        outputs = _inputs.logits(_pooled(backbone, hidden, options, mask=real), spec)
    whole = inputs if isinstance(spec.inputs, Mapping) else inputs[_TOKENS]
    return keras.Model(whole, outputs, name=backbone.name)


def _vocabulary(spec: Spec) -> int:
    """How many tokens there are in the input that holds them.

    Raises:
        ValueError: there is none, its vocabulary is not known, or there are other inputs.
    """
    arrays = spec.inputs if isinstance(spec.inputs, Mapping) else {_TOKENS: spec.inputs}
    found = arrays.get(_TOKENS)
    if not arrays.keys() <= {_TOKENS, _SEGMENTS} or found is None or len(found.shape) != 1 or found.below is None:
        raise ValueError(f"it takes tokens [S] of a vocabulary of known size. Received: {spec.described}")
    return found.below


def _next_token(backbone: keras.Model, hidden: Any) -> keras.KerasTensor:
    """[B, S, vocabulary] float32 logits, by the token embedding, as KerasHub's own models of this kind have it."""
    models = _library().models
    causal: list[Any] = [m for m in vars(models).values() if inspect.isclass(m) and issubclass(m, models.CausalLM)]
    if not any(task.backbone_cls is type(backbone) for task in causal):
        raise ValueError(
            "its positions see what comes behind them, so it cannot learn the next token. "
            f"Received: task {LANGUAGE_MODEL} with {type(backbone).__name__}"
        )
    # Keras keeps an embedding's weights in float32 within a model, so the product is that already; this says so.
    as_float = keras.layers.Activation("linear", dtype="float32", name="logits")
    return as_float(backbone.token_embedding(hidden, reverse=True))


def _pooled(backbone: keras.Model, output: Any, options: HeadOptions, mask: Any) -> keras.KerasTensor:
    """[B, D] of what the backbone gives.

    Raises:
        ValueError: it gives several things, as detectors do.
    """
    if isinstance(output, Mapping):
        if "sequence_output" not in output:
            raise ValueError(f"its backbone gives no features of the whole input. Received: {', '.join(output)}")
        if options.head_pooling == "auto" and "pooled_output" in output:
            return output["pooled_output"]
        output = output["sequence_output"]
    if len(output.shape) == 4:  # [B, H, W, D]
        return keras.layers.GlobalAveragePooling2D(name="pool")(output)
    if len(output.shape) != 3:
        return output
    has_class_token = bool(getattr(backbone, "use_class_token", False))
    if options.head_pooling == "first" or (options.head_pooling == "auto" and has_class_token):
        return output[:, 0]
    return keras.layers.GlobalAveragePooling1D(name="pool")(output, mask=mask)


def _converter(preset: str) -> Any:
    """The image converter of a preset; None where it has none."""
    try:
        return _library().layers.ImageConverter.from_preset(preset)
    except FileNotFoundError:
        return None


def _library() -> ModuleType:
    try:
        import keras_hub
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model=keras_hub/... needs {error.name!r}, which is not installed. "
            "Install the extra `hub`, then: pip install --no-deps 'keras-hub>=0.32,<0.33'"
        ) from error
    return keras_hub
