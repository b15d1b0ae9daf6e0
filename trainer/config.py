"""Every option of a run, once: type, default, help with its unit, limits, and whether it changes the numbers.

`Config` is what a run is. It is made in one place, `merge`, from layers of plain values (file below flags), checked as
a whole, and never changed afterwards. Flags (`flags.py`) and files are generated from and read against its fields.
This module knows neither TensorFlow nor hardware; what depends on those is `plan.py`.
"""

import dataclasses
import difflib
import json
import math
import pathlib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import ConfigError

TPU_OF_THIS_ENVIRONMENT = "auto"
BUILT_IN_MODELS = pathlib.Path(__file__).parent / "models"


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    changes_numbers: bool = True,
) -> Any:
    """A field of `Config`; limits hold where the value is not None, `changes_numbers` guards resuming."""
    metadata = {
        "help": help,
        "group": group,
        "choices": tuple(choices),
        "minimum": minimum,
        "above": above,
        "below": below,
        "changes_numbers": changes_numbers,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run; `None` means "worked out from the data or the hardware", as the help says."""

    mode: str = option(
        "train_and_eval",
        "what to do; eval and export take the newest checkpoint and, where not given, the options of model_dir; "
        "profile_input measures the input of a training run of the same options, and trains nothing",
        group="run",
        choices=("train_and_eval", "train", "eval", "export", "profile_input"),
        changes_numbers=False,
    )
    model_dir: str = option(
        "", "directory of this run: config, checkpoints, logs, export", group="run", changes_numbers=False
    )
    seed: int = option(0, "seed of initial weights, data order and dropout", group="run", minimum=0, below=2**31)
    allow_config_change: bool = option(
        False,
        "resume although options that change the numbers differ from those model_dir was trained with",
        group="run",
        changes_numbers=False,
    )

    dataset: str = option(
        "",
        "dataset in TensorFlow Datasets' format: a name in data_dir, or a directory; for measuring without reading "
        "files: synthetic (images of image_size, num_classes), or synthetic:NAME, of the shapes of NAME",
        group="data",
    )
    data_dir: str | None = option(
        None,
        "where datasets are; default: TFDS_DATA_DIR, else ~/tensorflow_datasets",
        group="data",
        changes_numbers=False,
    )
    train_split: str = option("train", "split to train on", group="data")
    eval_split: str = option("test", "split to evaluate on", group="data")
    image_size: int | None = option(
        None, "height and width of images, in pixels; default: the dataset's own", group="data", minimum=1
    )
    num_classes: int | None = option(
        None, "number of classes; default: the dataset's own; at least that many", group="data", minimum=1
    )
    shuffle_mib: float = option(
        1024.0,
        "memory for shuffling, MiB of serialized records over all hosts, at most one epoch; more mixes better",
        group="data",
        above=0,
    )
    corrupt_records: str = option(
        "stop",
        "what to do about records that cannot be read: stop, or skip those that the audit finds",
        group="data",
        choices=("stop", "skip"),
    )
    max_corrupt_records: int = option(
        0, "records that may be skipped; more of them are an error", group="data", minimum=0, changes_numbers=False
    )

    data_service: str | None = option(
        None,
        "machines that parse, decode and crop: grpc://host:port[,host:port...], each running `python -m data.service`; "
        "the order stays the same",
        group="data",
        changes_numbers=False,
    )
    cache: str = option(
        "none",
        "copy the training shards before training: to the disk of cache_dir, or to memory of this process",
        group="data",
        choices=("none", "memory", "disk"),
        changes_numbers=False,
    )
    cache_dir: str | None = option(
        None, "where cache=disk keeps copies, for later runs too", group="data", changes_numbers=False
    )

    model: str = option(
        "cnn",
        "model: a file of trainer/models, applications/<Name> of Keras, or package.module of your own",
        group="model",
    )
    model_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "options of the model as TOML, such as 'units=[128, 64], dropout=0.1'; see the model's Options",
            "group": "model",
            "choices": (),
            "minimum": None,
            "above": None,
            "below": None,
            "changes_numbers": True,
        },
    )
    precision: str = option(
        "float32",
        "dtype policy; weights, logits and loss stay float32",
        group="model",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )

    global_batch_size: int = option(128, "examples a step, over all replicas", group="training", minimum=1)
    train_steps: int | None = option(None, "steps to train; or give train_epochs", group="training", minimum=1)
    train_epochs: float | None = option(
        None,
        "epochs to train, rounded up to whole steps; default 10 where train_steps is not given",
        group="training",
        above=0,
    )
    eval_every_steps: int | None = option(
        None, "steps between evaluations; default: one epoch", group="training", minimum=1, changes_numbers=False
    )
    checkpoint_every_steps: int | None = option(
        None, "steps between checkpoints; default: eval_every_steps", group="training", minimum=1, changes_numbers=False
    )
    keep_checkpoints: int = option(3, "newest checkpoints to keep", group="training", minimum=1, changes_numbers=False)
    log_every_steps: int = option(
        50, "steps between records in metrics.jsonl and TensorBoard", group="training", minimum=1, changes_numbers=False
    )

    optimizer: str = option("adamw", "optimizer", group="optimizer", choices=("sgd", "adamw"))
    learning_rate: float = option(1e-3, "peak learning rate, after warm-up", group="optimizer", above=0)
    warmup_steps: int = option(
        0, "steps of linear warm-up from 0, before the cosine decay to 0", group="optimizer", minimum=0
    )
    momentum: float = option(0.9, "momentum of sgd", group="optimizer", minimum=0, below=1)
    weight_decay: float = option(
        0.0,
        "decoupled weight decay, multiplied by the learning rate; not on biases and norms",
        group="optimizer",
        minimum=0,
    )
    clipnorm: float | None = option(None, "clip each gradient to this norm", group="optimizer", above=0)
    global_clipnorm: float | None = option(None, "clip all gradients to this joint norm", group="optimizer", above=0)
    clipvalue: float | None = option(None, "clip gradient entries to +-this value", group="optimizer", above=0)

    tpu: str | None = option(
        None,
        "TPU to use: local, a name, grpc://host:port; bare --tpu: the TPU of this environment; "
        "without it all GPUs, else the CPU",
        group="hardware",
        changes_numbers=False,
    )
    tpu_zone: str | None = option(None, "zone of the named TPU", group="hardware", changes_numbers=False)
    tpu_project: str | None = option(None, "project of the named TPU", group="hardware", changes_numbers=False)
    replicas: int | None = option(
        None,
        "GPUs to use, or virtual CPU devices; default: all GPUs, else one CPU device",
        group="hardware",
        minimum=1,
        changes_numbers=False,
    )
    connect_timeout_secs: float = option(
        300.0, "seconds to wait for a TPU or for other workers", group="hardware", above=0, changes_numbers=False
    )
    xla: str = option(
        "auto",
        "compile with XLA on CPU and GPU (a TPU always does); auto: on for GPUs, off on CPU",
        group="hardware",
        choices=("auto", "on", "off"),
        changes_numbers=False,
    )
    steps_per_loop: int = option(
        50,
        "steps the devices run between two looks of the host; no result depends on it",
        group="hardware",
        minimum=1,
        changes_numbers=False,
    )


FIELDS: Mapping[str, dataclasses.Field] = types.MappingProxyType({f.name: f for f in dataclasses.fields(Config)})
_TYPES = typing.get_type_hints(Config)


def merge(*layers: Mapping[str, Any]) -> Config:
    """A checked `Config` from layers of values, later ones winning.

    Raises:
        ConfigError: one error with every problem found.
    """
    config, problems = inspect(*layers)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot be used:", *problems]))
    return config


def inspect(*layers: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The merged `Config` and all that is wrong with it."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for layer in layers:
        for name, value in layer.items():
            if name not in FIELDS:
                problems.append(f"unknown option {name!r}{nearest(name, FIELDS)}")
                continue
            try:
                values[name] = _typed(name, value)
            except ValueError as error:
                problems.append(str(error))
    config = Config(**values)
    problems += _problems_of_values(config) + _problems_of_combinations(config)
    return config, list(dict.fromkeys(problems))


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def type_name(name: str) -> str:
    """The plain name of an option's type, for help."""
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        _base_type(name), "a table"
    )


def _base_type(name: str) -> type:
    hint = _TYPES[name]
    options = [t for t in typing.get_args(hint) if t is not type(None)]
    return options[0] if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint


def parse(name: str, text: str) -> Any:
    """The value of option `name` that `text` of the command line means; `none` unsets an optional one.

    Raises:
        ValueError: naming the option, its type and the text.
    """
    base = _base_type(name)
    if text.lower() == "none" and type(None) in typing.get_args(_TYPES[name]):
        return None
    try:
        if base is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if base is Mapping:
            return tomllib.loads(f"table = {{ {text} }}")["table"]
        return _typed(name, base(text))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{name} takes {type_name(name)}. Received: {text!r}") from error


def _typed(name: str, value: Any) -> Any:
    base = _base_type(name)
    if value is None and (type(None) in typing.get_args(_TYPES[name])):
        return None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ValueError(f"{name} takes {type_name(name)}. Received: {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite. Received: {value!r}")
    return value


def _problems_of_values(config: Config) -> list[str]:
    problems = []
    for name, field in FIELDS.items():
        value, limits = getattr(config, name), field.metadata
        if value is None:
            continue
        if limits["choices"] and value not in limits["choices"]:
            choices = ", ".join(limits["choices"])
            problems.append(f"{name} must be one of {choices}. Received: {value!r}{nearest(value, limits['choices'])}")
        if limits["minimum"] is not None and value < limits["minimum"]:
            problems.append(f"{name} must be at least {limits['minimum']}. Received: {value}")
        if limits["above"] is not None and value <= limits["above"]:
            problems.append(f"{name} must be above {limits['above']}. Received: {value}")
        if limits["below"] is not None and value >= limits["below"]:
            problems.append(f"{name} must be below {limits['below']}. Received: {value}")
    return problems


def _problems_of_combinations(config: Config) -> list[str]:
    problems = []
    for required in ("model_dir", "dataset"):
        if not getattr(config, required):
            problems.append(f"{required} is missing; give --{required}=...")
    if config.train_steps is not None and config.train_epochs is not None:
        problems.append(
            "train_steps and train_epochs both say when to stop; give one. "
            f"Received: {config.train_steps} and {config.train_epochs}"
        )
    clips = [n for n in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(config, n) is not None]
    if len(clips) > 1:
        problems.append(f"one kind of clipping at a time. Received: {', '.join(clips)}")
    if config.optimizer != "sgd" and config.momentum != FIELDS["momentum"].default:
        problems.append(f"momentum has no effect on {config.optimizer}; leave it out or use --optimizer=sgd")
    if config.mode in ("eval", "export"):
        supplies = {"cache": config.cache != "none", "data_service": config.data_service is not None}
        problems += [
            f"{name} supplies training only; leave it out of {config.mode}" for name, on in supplies.items() if on
        ]
    if config.corrupt_records == "stop" and config.max_corrupt_records:
        problems.append("max_corrupt_records has no effect without corrupt_records=skip")
    if config.corrupt_records == "skip" and not config.max_corrupt_records:
        problems.append("corrupt_records=skip needs a budget; give --max_corrupt_records=N")
    if config.tpu is None:
        problems += [f"{n} has no effect without tpu" for n in ("tpu_zone", "tpu_project") if getattr(config, n)]
    elif config.replicas is not None:
        problems.append(f"a TPU slice has the replicas it has; leave out replicas. Received: {config.replicas}")
    if config.tpu == "":
        problems.append("tpu is empty; write --tpu alone for the TPU of this environment, or leave it out")
    if config.tpu is not None and config.xla != "auto":
        problems.append(f"xla is for CPU and GPU, a TPU always compiles; leave it out. Received: {config.xla}")
    return problems + _problems_of_reading(config) + _problem_of_model_name(config.model)


def _problems_of_reading(config: Config) -> list[str]:
    problems = []
    if config.cache == "disk" and not config.cache_dir:
        problems.append("cache=disk needs to know where; give --cache_dir=... on a fast disk")
    if config.cache != "disk" and config.cache_dir:
        problems.append(f"cache_dir has no effect with cache={config.cache}; leave it out or use --cache=disk")
    if config.cache != "none" and config.data_service is not None:
        problems.append(
            f"cache={config.cache} has no effect with data_service, whose machines read the shards themselves; "
            "give one of the two"
        )
    if config.mode == "profile_input" and config.data_service is not None:
        problems.append("profile_input measures the pipeline of this machine; leave out data_service")
    return problems


def _problem_of_model_name(model: str) -> list[str]:
    """A name that can be judged without importing Keras or the user's code; the rest is judged by trainer.models."""
    if "." in model or model.startswith("applications/"):
        return []
    known = built_in_models()
    if model in known:
        return []
    return [
        f"unknown model {model!r}{nearest(model, known)}. There are: {', '.join(known)}, "
        "applications/<Name> for a class of keras.applications, package.module for your own"
    ]


def built_in_models() -> list[str]:
    """Names of the model files, found without importing them."""
    return sorted(p.stem for p in BUILT_IN_MODELS.glob("*.py") if not p.stem.startswith(("_", "applications")))


def load(path: str) -> dict[str, Any]:
    """Values of a TOML or JSON file.

    Raises:
        ConfigError: the file cannot be read or parsed, or is of another kind.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            values = tomllib.loads(text)
        elif path.endswith(".json"):
            values = json.loads(text)
        else:
            raise ConfigError(f"a config file ends in .toml or .json. Received: {path!r}")
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}. Received: {path!r}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config file {path!r} does not parse: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path!r} must hold a table of options. Received: {type(values).__name__}")
    return values


def to_json(config: Config) -> str:
    """All options as JSON that `load` and `merge` read back to an equal `Config`."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """Lines `name: old -> new` for the options that change the numbers of a run."""
    lines = []
    for name, field in FIELDS.items():
        before, after = old.get(name, field.default), getattr(new, name)
        if field.metadata["changes_numbers"] and name in old and before != after:
            lines.append(f"{name}: {before!r} -> {after!r}")
    return lines
