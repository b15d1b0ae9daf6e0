"""Which options can be used, alone and together. Pure; `config.py` asks.

An option that has no effect beside the others is refused too: its user believes that it has one.
"""

import difflib
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from trainer import backend, durations, patterns
from trainer.options import FIELDS, LAST_RUN, Config
from trainer.options.augmentation import MOST_MAGNITUDE
from trainer.options.optimizer import LAYERWISE, OPTIMIZERS, SCHEDULES
from trainer.redact import check_alert_url

# Files that stand for many models each: `applications/<Name>`.
MODEL_FAMILIES = ("applications", "keras_hub")
BUILT_IN_MODELS = pathlib.Path(__file__).parent / "models"
# What a run_id may have in braces; `series.py` says what each stands for.
RUN_ID_FIELDS = ("date", "hour", "week", "month", "job", "trial")
_NEEDLESS = {"model_dir": ("doctor",), "dataset": ("doctor", "report")}  # modes that do without what all others need
STOPS = ("train_steps", "train_epochs", "train_examples")  # one of them says when training ends
DURATIONS = {"warmup": durations.parse, "decay_at": durations.parse_all, "decay_every": durations.parse}
SYNTHETIC = "synthetic"  # of dataset; as data/catalog.py, which nothing here may import, has it
_RUN_ID = re.compile(r"([A-Za-z0-9._-]|\{(" + "|".join(RUN_ID_FIELDS) + r")\})+")


def problems(config: Config) -> list[str]:
    """All that is wrong with it."""
    return _problems_of_values(config) + _problems_of_combinations(config)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def profile_range(text: str) -> tuple[int, int]:
    """(A, B) of `profile_steps`.

    Raises:
        ValueError: anything but two steps, the second one later.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 2 and all(part.isascii() and part.isdecimal() for part in parts) and int(parts[0]) < int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise ValueError(f"profile_steps must be A,B with A below B, for steps A to B-1. Received: {text!r}")


def runs(text: str) -> list[str]:
    """The names in `runs`.

    Raises:
        ValueError: anything but two or more, all different.
    """
    names = [name.strip().rstrip("/") for name in text.split(",")]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"runs must be two or more different runs with commas between. Received: {text!r}")
    return names


def built_in_models() -> list[str]:
    """Names of the model files, found without importing them."""
    return sorted(p.stem for p in BUILT_IN_MODELS.glob("*.py") if not p.stem.startswith(("_", *MODEL_FAMILIES)))


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
    for required in _NEEDLESS:
        if not getattr(config, required) and config.mode not in _NEEDLESS[required]:
            problems.append(f"{required} is missing; give --{required}=...")
    ends = {n: getattr(config, n) for n in STOPS if getattr(config, n) is not None}
    if len(ends) > 1:
        problems.append(
            f"{' and '.join(ends)} each say when to stop; give one. Received: {', '.join(map(str, ends.values()))}"
        )
    clips = [n for n in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(config, n) is not None]
    if len(clips) > 1:
        problems.append(f"one kind of clipping at a time. Received: {', '.join(clips)}")
    if config.mode in ("eval", "export"):
        supplies = {"cache": config.cache != "none", "data_service": config.data_service is not None}
        problems += [
            f"{name} supplies training only; leave it out of {config.mode}" for name, on in supplies.items() if on
        ]
        if config.lint == "on":
            problems.append(f"lint looks at what is to be trained; leave it out of {config.mode}")
    problems += [
        f"{name} is for mode={' or '.join(field.metadata['modes'])}; leave it out of {config.mode}"
        for name, field in FIELDS.items()
        if field.metadata["modes"] and config.mode not in field.metadata["modes"]
        if getattr(config, name) != field.default
    ]
    if config.mode == "parity" and config.replicas == 1:
        problems.append("parity compares one replica with several; give replicas=2 or more. Received: 1")
    problems += _problems_of_checkpoints(config) + _problems_of_series(config) + _problems_of_sweep(config)
    problems += _problems_of_augmentation(config) + _problems_of_optimizer(config) + _problems_of_schedule(config)
    if config.corrupt_records == "stop" and config.max_corrupt_records:
        problems.append("max_corrupt_records has no effect without corrupt_records=skip")
    if config.corrupt_records == "skip" and not config.max_corrupt_records:
        problems.append("corrupt_records=skip needs a budget; give --max_corrupt_records=N")
    if config.tpu is None:
        problems += [f"{n} has no effect without tpu" for n in ("tpu_zone", "tpu_project") if getattr(config, n)]
    elif config.replicas is not None:
        problems.append(f"a TPU slice has the replicas it has; leave out replicas. Received: {config.replicas}")
    checks = (
        (config.profile_steps, profile_range),
        (config.alert_url, check_alert_url),
        (config.runs, runs),
        (config.learning_rate_factors, patterns.factors),
    )
    for value, check in checks:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            problems.append(str(error))
    if config.tpu == "":
        problems.append("tpu is empty; write --tpu alone for the TPU of this environment, or leave it out")
    if config.xla != "auto" and (config.tpu is not None or backend.always_compiles(config.backend)):
        what = "JAX" if config.tpu is None else "a TPU"
        problems.append(
            f"xla is for TensorFlow on CPU and GPU, {what} always compiles; leave it out. Received: {config.xla}"
        )
    problems += _problems_of_reading(config) + _problems_of_text(config) + _problems_of_compile_cache(config)
    return problems + _problem_of_model_name(config.model)


def _problems_of_optimizer(config: Config) -> list[str]:
    name, problems = config.optimizer, []
    if name not in OPTIMIZERS:  # told already, as every choice that there is not
        return []
    known = OPTIMIZERS[name]
    for key, value in config.optimizer_options.items():
        if key not in known:
            hint = nearest(key, known) or f"; it has: {', '.join(known)}"
            option = f"; --{key} is an option of its own" if key in FIELDS else hint
            problems.append(f"optimizer_options: {name} has no option {key!r}{option}")
        elif not _is_like(value, known[key]):
            problems.append(f"optimizer_options: {key} of {name} must be {_kind(known[key])}. Received: {value!r}")
    if name == "ftrl" and config.weight_decay:
        problems.append(
            "weight_decay has no lasting effect on ftrl, which works out each weight from sums of gradients; use "
            f"--optimizer_options.l2_regularization_strength. Received: {config.weight_decay}"
        )
    if name == "ftrl" and config.warmup is not None:
        problems.append(f"ftrl divides by the learning rate, which a warm-up begins at 0. Received: {config.warmup!r}")
    if config.no_decay != FIELDS["no_decay"].default and not config.weight_decay and name not in LAYERWISE:
        problems.append("no_decay has no effect without weight_decay")
    return problems


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
    if isinstance(value, bool) or isinstance(default, bool | int):
        return type(value) is type(default)
    return isinstance(value, int | float)


def _kind(default: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list of texts"}
    return kinds[type(default)]


def _problems_of_schedule(config: Config) -> list[str]:
    problems = []
    if config.learning_rate_batch_size is None and config.learning_rate_scaling != "linear":
        problems.append("learning_rate_scaling has no effect without learning_rate_batch_size")
    for name, parse in DURATIONS.items():
        text = getattr(config, name)
        try:
            if text is not None:
                parse(name, text)
        except ValueError as error:
            problems.append(str(error))
    if config.schedule not in SCHEDULES:
        return problems
    needed, used = SCHEDULES[config.schedule]
    problems += [f"schedule={config.schedule} needs {n}; give --{n}=..." for n in needed if getattr(config, n) is None]
    idle = {name for lists in SCHEDULES.values() for names in lists for name in names} - {*needed, *used, "warmup"}
    problems += [
        f"{name} has no effect on schedule={config.schedule}"
        for name in sorted(idle)
        if getattr(config, name) != FIELDS[name].default
    ]
    if config.schedule == "wsd" and "," in (config.decay_at or ""):
        problems.append(f"schedule=wsd decays once; give decay_at one duration. Received: {config.decay_at!r}")
    return problems


def _problems_of_checkpoints(config: Config) -> list[str]:
    problems = []
    if config.checkpoint != "newest" and config.mode not in ("eval", "export"):
        problems.append(f"checkpoint={config.checkpoint} is for eval and export; {config.mode} goes on from the newest")
    if config.init_fresh and config.init_from is None:
        problems.append("init_fresh has no effect without init_from")
    if not config.keep_best_checkpoints and config.best_metric != FIELDS["best_metric"].default:
        problems.append("best_metric has no effect with keep_best_checkpoints=0")
    if config.on_nonfinite == "stop" and config.max_nonfinite != FIELDS["max_nonfinite"].default:
        problems.append("max_nonfinite has no effect with on_nonfinite=stop")
    return problems


def _problems_of_sweep(config: Config) -> list[str]:
    problems = []
    if config.sweep_from >= config.sweep_to:
        problems.append(
            f"the learning rate rises from sweep_from to sweep_to. Received: {config.sweep_from:g} and "
            f"{config.sweep_to:g}"
        )
    if config.mode == "sweep_lr" and config.init_from == LAST_RUN:
        problems.append(
            f"sweep_lr belongs to no series, so there is no last run; name one. Received: init_from={LAST_RUN}"
        )
    return problems


def _problems_of_series(config: Config) -> list[str]:
    problems = []
    if config.run_id is None:
        wanted = {name: FIELDS[name].default for name in ("if_new_data", "promote_margin", "keep_runs")}
        given = [name for name, default in wanted.items() if getattr(config, name) != default]
        given += [f"init_from={LAST_RUN}"] if config.init_from == LAST_RUN else []
        problems += [f"{name} looks at other runs of a series; give --run_id" for name in given]
    elif not _RUN_ID.fullmatch(config.run_id) or config.run_id.startswith("."):
        problems.append(
            "run_id is the name of a directory: letters, digits, dots, dashes, and "
            f"{', '.join(f'{{{name}}}' for name in RUN_ID_FIELDS)}. Received: {config.run_id!r}"
        )
    if config.promote_margin is not None and config.export_dir is not None:
        problems.append(f"what is promoted stays with its run; leave out export_dir. Received: {config.export_dir}")
    return problems


def _problems_of_augmentation(config: Config) -> list[str]:
    problems = []
    if config.crop_area is not None and config.crop_padding:
        problems.append("crop_area and crop_padding are two ways to crop; give one of the two")
    if not config.rand_augment and config.rand_augment_magnitude != FIELDS["rand_augment_magnitude"].default:
        problems.append("rand_augment_magnitude has no effect with rand_augment=0")
    if config.rand_augment_magnitude > MOST_MAGNITUDE:
        problems.append(
            f"rand_augment_magnitude must be at most {MOST_MAGNITUDE:g}. Received: {config.rand_augment_magnitude:g}"
        )
    return problems


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


def _problems_of_compile_cache(config: Config) -> list[str]:
    if config.compile_cache is None:
        return []
    problems = []
    if "://" in config.compile_cache:
        problems.append(
            "compile_cache must be a directory that this machine has mounted. "
            f"Received: {config.compile_cache}. Give a local one, or a mount such as /gcs/BUCKET/..."
        )
    if config.backend == "tensorflow" and config.tpu is not None:
        problems.append("compile_cache has no effect with TensorFlow on TPUs, which keeps no programs; leave it out")
    elif config.backend == "tensorflow" and config.xla == "off":
        problems.append("compile_cache has no effect with xla=off, where XLA compiles nothing; leave it out")
    return problems


def _problems_of_text(config: Config) -> list[str]:
    if config.task != "language_model" or config.dataset != SYNTHETIC:
        if config.sequence_length is None:
            return []
        return [f"sequence_length is for --dataset={SYNTHETIC} --task=language_model; a dataset has its own"]
    if config.sequence_length is None:
        return ["synthetic tokens have no length; give --sequence_length=N"]
    if config.image_size is not None:
        return [f"image_size has no effect on tokens; leave it out. Received: {config.image_size}"]
    return []


def _problem_of_model_name(model: str) -> list[str]:
    """A name that can be judged without importing Keras or the user's code; the rest is judged by trainer.models."""
    if "." in model or model.partition("/")[0] in MODEL_FAMILIES:
        return []
    known = built_in_models()
    if model in known:
        return []
    return [
        f"unknown model {model!r}{nearest(model, known)}. There are: {', '.join(known)}, "
        "applications/<Name> for a class of keras.applications, keras_hub/<Backbone or preset> for one of KerasHub, "
        "package.module for your own"
    ]
