"""Every option of a run, once: type, default, help with its unit, limits, and whether it changes the numbers.

Flags (`flags.py`) and files (`config.py`) are generated from and read against these fields.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

TPU_OF_THIS_ENVIRONMENT = "auto"
LAST_RUN = "last"  # of init_from
_TRAINING = ("train", "train_and_eval")
_TRYING = ("profile_input", "preflight", "parity", "doctor")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    modes: Sequence[str] = (),
    changes_numbers: bool = True,
    secret: bool = False,
) -> Any:
    """A field of `Config`; limits hold where the value is not None.

    In other `modes`, where some are named, the option would have no effect. `changes_numbers` guards resuming; what is
    `secret` is never written to a file.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": tuple(choices),
        "minimum": minimum,
        "above": above,
        "below": below,
        "modes": tuple(modes),
        "changes_numbers": changes_numbers,
        "secret": secret,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run; `None` means "worked out from the data or the hardware", as the help says."""

    mode: str = option(
        "train_and_eval",
        "what to do; eval and export take the newest checkpoint and, where not given, the options of model_dir; "
        "the others take the options of a training run and train nothing: profile_input measures its input, preflight "
        "compiles its steps for TPU slices, parity compares it on one and on several replicas, doctor looks at "
        "everything around it",
        group="run",
        choices=("train_and_eval", "train", "eval", "export", *_TRYING),
        changes_numbers=False,
    )
    model_dir: str = option(
        "",
        "directory of this run: config, checkpoints, logs, export; with run_id, of the runs of a series",
        group="run",
        changes_numbers=False,
    )
    export_dir: str | None = option(
        None,
        "where the export goes; default: export in model_dir",
        group="run",
        modes=("train_and_eval", "export", *_TRYING),
        changes_numbers=False,
    )
    tensorboard_dir: str | None = option(
        None,
        "where TensorBoard's files go; default: tensorboard in model_dir",
        group="run",
        modes=(*_TRAINING, *_TRYING),
        changes_numbers=False,
    )
    seed: int = option(0, "seed of initial weights, data order and dropout", group="run", minimum=0, below=2**31)
    allow_config_change: bool = option(
        False,
        "resume although options that change the numbers differ from those model_dir was trained with",
        group="run",
        changes_numbers=False,
    )
    checkpoint: str = option(
        "newest",
        "which checkpoint eval and export take: the newest, or the best by best_metric",
        group="run",
        choices=("newest", "best"),
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
            "modes": (),
            "changes_numbers": True,
            "secret": False,
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
    log_every_steps: int = option(
        50, "steps between records in metrics.jsonl and TensorBoard", group="training", minimum=1, changes_numbers=False
    )

    checkpoint_every_steps: int | None = option(
        None,
        "steps between checkpoints; default: eval_every_steps",
        group="checkpoints",
        minimum=1,
        changes_numbers=False,
    )
    checkpoint_every_secs: float | None = option(
        None,
        "seconds after which a checkpoint is due even where checkpoint_every_steps asks for none",
        group="checkpoints",
        above=0,
        changes_numbers=False,
    )
    keep_checkpoints: int = option(
        3, "newest checkpoints to keep", group="checkpoints", minimum=1, changes_numbers=False
    )
    keep_best_checkpoints: int = option(
        1,
        "best checkpoints to keep besides; one is saved after each evaluation that is among them",
        group="checkpoints",
        minimum=0,
        changes_numbers=False,
    )
    best_metric: str = option(
        "loss", "evaluation metric that says which are best", group="checkpoints", changes_numbers=False
    )
    best_goal: str = option(
        "min",
        "whether the best of best_metric is its smallest or its largest value",
        group="checkpoints",
        choices=("min", "max"),
        changes_numbers=False,
    )
    init_from: str | None = option(
        None,
        "start from the weights of this model_dir's newest checkpoint, or of one checkpoint in it; last: of the newest "
        "finished run of the series; a run that has a checkpoint of its own goes on from that",
        group="checkpoints",
    )
    init_fresh: str = option(
        "",
        "variables that init_from leaves as initialised, such as a head of another shape: patterns with commas "
        "between, 'dense_1/*'; all others have to be found with their shapes",
        group="checkpoints",
    )

    run_id: str | None = option(
        None,
        "makes model_dir a series of runs, and names this one in it: any text, with {date}, {hour}, {week} or {month} "
        "of its start in UTC, {job} and {trial} of Vertex AI; where it names a time, a run of the series that has not "
        "finished comes first",
        group="series",
        modes=(*_TRAINING, *_TRYING),
        changes_numbers=False,
    )
    if_new_data: bool = option(
        False,
        "begin a run only if the training split is not what the last finished run of the series was trained on; else "
        "there is nothing to do",
        group="series",
        modes=(*_TRAINING, *_TRYING),
        changes_numbers=False,
    )
    promote_margin: float | None = option(
        None,
        "let serving.json of the series name the run's export, if it beats the one named there by more than this in "
        "best_metric, both evaluated on eval_split as it is now; default: nothing is promoted",
        group="series",
        minimum=0,
        modes=("train_and_eval", *_TRYING),
        changes_numbers=False,
    )
    keep_runs: int | None = option(
        None,
        "newest finished runs of the series to keep, besides the two promoted last; older ones are removed once this "
        "one has finished; default: all",
        group="series",
        minimum=1,
        modes=(*_TRAINING, *_TRYING),
        changes_numbers=False,
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

    grace_secs: float = option(
        25.0,
        "seconds from SIGTERM, SIGINT or a notice of preemption to the end of the process; a little less than what the "
        "scheduler grants",
        group="surviving",
        minimum=2,
        changes_numbers=False,
    )
    lease_secs: float = option(
        60.0,
        "seconds without a heartbeat after which another process may go on with the run",
        group="surviving",
        minimum=6,
        changes_numbers=False,
    )
    on_nonfinite: str = option(
        "stop",
        "when loss or gradients become NaN or infinite: stop before that step; skip it; or rollback to the last "
        "checkpoint and go on behind the step, without the batches in between",
        group="surviving",
        choices=("stop", "skip", "rollback"),
        changes_numbers=False,
    )
    max_nonfinite: int = option(
        10, "how often a run may skip or roll back", group="surviving", minimum=1, changes_numbers=False
    )

    lint: str = option(
        "auto",
        "look over the model for what TPUs take badly, before it runs; auto: on a TPU and in preflight",
        group="knowing before",
        choices=("auto", "on", "off"),
        changes_numbers=False,
    )
    slice: str | None = option(
        None,
        "of preflight: TPU slices to compile for, with commas between: v5e-8, v3-32, or a topology such as v5e:2x4; "
        "default: the common ones over whose cores the batch divides",
        group="knowing before",
        modes=("preflight",),
        changes_numbers=False,
    )
    preflight_probes: int | None = option(
        None,
        "of preflight: compilations a slice that may be spent on finding the largest batch that fits; default: 5 where "
        "slice names it, else 0",
        group="knowing before",
        modes=("preflight",),
        minimum=0,
        changes_numbers=False,
    )
    preflight_timeout_secs: float = option(
        900.0,
        "of preflight: seconds after which a compilation is given up",
        group="knowing before",
        modes=("preflight",),
        above=0,
        changes_numbers=False,
    )
    preflight_python: str | None = option(
        None,
        "of preflight: the Python with the extra `preflight`, such as /opt/preflight/bin/python; default: this one",
        group="knowing before",
        modes=("preflight",),
        changes_numbers=False,
    )
    parity_steps: int = option(
        8,
        "of parity: training steps to compare",
        group="knowing before",
        modes=("parity",),
        minimum=1,
        changes_numbers=False,
    )

    log_format: str = option(
        "text",
        "of the console: for people, or JSON lines for Cloud Logging",
        group="watching",
        choices=("text", "json"),
        changes_numbers=False,
    )
    stall_secs: float | None = option(
        1800.0,
        "seconds without progress after which the stacks are written down and the process ends, to be run again; "
        "none: never",
        group="watching",
        above=0,
        changes_numbers=False,
    )
    alert_url: str | None = option(
        None,
        "where alerts are sent, as a JSON POST: stall, nonfinite, preempted, slow input, failing saves, finished",
        group="watching",
        changes_numbers=False,
        secret=True,
    )
    profile_steps: str | None = option(
        None,
        "A,B: steps A to B-1 are profiled for TensorBoard; SIGUSR1 profiles a job that runs",
        group="watching",
        changes_numbers=False,
    )


FIELDS: Mapping[str, dataclasses.Field] = types.MappingProxyType({f.name: f for f in dataclasses.fields(Config)})
