"""The wiring of a run, readable from top to bottom: data, model, devices, plan, training, export.

Everything that can be wrong is looked at in the order of its cost: names and files first, then hardware, then the model
on it. Nothing is written to `model_dir` before all of it stands.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Sequence

import keras
import tensorflow as tf

from data import catalog, stages
from data.spec import Array
from trainer import (
    checkpoints,
    cluster,
    console,
    export,
    hardware,
    inputs,
    models,
    optimizers,
    plan,
    profile_input,
    profile_picture,
    profile_report,
    replicated,
    run_dir,
    supply,
    tasks,
)
from trainer.callbacks.checkpoint import SaveCheckpoint
from trainer.callbacks.clock import Clock, LoopClock
from trainer.callbacks.metrics import MetricsLog
from trainer.config import FIELDS, Config
from trainer.errors import ConfigError

# Options that say nothing once a model brings its own optimizer.
OPTIMIZER_OPTIONS = [name for name, field in FIELDS.items() if field.metadata["group"] == "optimizer"]


def run(config: Config, argv: Sequence[str], started: float) -> None:
    """Runs `config` to its end.

    Args:
        config: what to run.
        argv: the command line, for the provenance.
        started: `time.monotonic()` at the start of the process.

    Raises:
        TrainerError, DataError: anything its user can mend, before or while it happens.
    """
    clock = Clock(started)
    source = models.find(config.model, config.model_options)
    target = hardware.resolve(
        tpu=config.tpu, tpu_zone=config.tpu_zone, tpu_project=config.tpu_project, replicas=config.replicas
    )
    folder = run_dir.RunDir(config.model_dir)
    profiles = config.mode == inputs.PROFILING
    if profiles:
        _refuse_several_machines(target)
    # Profiling leaves nothing of a training run behind, repaired shards neither.
    with tempfile.TemporaryDirectory() if profiles else contextlib.nullcontext() as elsewhere:
        read = inputs.open_inputs(config, cache_dir=elsewhere or folder.file(run_dir.REPAIRED))
        _refuse_local_paths(target, config, read)
        if config.mode in inputs.TRAINING_MODES:
            folder.check_resumable(config, read.identity())
        if target.is_chief and (profiles or config.mode in inputs.TRAINING_MODES):
            folder.check_writable()
        if profiles or config.mode in inputs.TRAINING_MODES:
            read = dataclasses.replace(
                read, services=supply.services(config), cached=supply.copies(config, read.train_shards)
            )
        devices = cluster.connect(target, connect_timeout_secs=config.connect_timeout_secs)
        with read.explained():
            _Run(config, argv, clock, source, read, folder, devices).go()


def _refuse_several_machines(target: hardware.Target) -> None:
    if target.is_remote or target.workers:
        raise ConfigError(
            "profile_input measures the pipeline of the machine that it runs on, and here others read too. Received: "
            f"{target.source if target.is_remote else 'TF_CONFIG with several workers'}. Run it on one of them, with "
            "--tpu=local on a TPU VM, and without TF_CONFIG"
        )


def _refuse_local_paths(target: hardware.Target, config: Config, read: inputs.AnyInputs) -> None:
    """A worker on another machine reads the data and writes checkpoints itself, and sees none of our disks."""
    paths = dict(read.local_paths())
    if not catalog.is_remote(config.model_dir):
        paths["model_dir"] = config.model_dir
    if config.cache != "none":
        paths["cache"] = config.cache
    if target.is_remote and config.data_service is not None:
        raise ConfigError(
            "data_service is for hosts that read their data themselves, not for a TPU worker on another machine; leave "
            f"it out. Received: {config.data_service}"
        )
    if target.is_remote and paths:
        received = ", ".join(f"{name}={path}" for name, path in paths.items())
        raise ConfigError(f"a TPU worker on another machine cannot see local paths; use gs://. Received: {received}")


@dataclasses.dataclass
class _Run:
    """One run on its devices: what its steps share."""

    config: Config
    argv: Sequence[str]
    clock: Clock
    source: models.ModelSource
    inputs: inputs.AnyInputs
    folder: run_dir.RunDir
    devices: cluster.Cluster

    def __post_init__(self) -> None:
        self.spec = self.inputs.spec
        self.plan = plan.resolve(
            self.config,
            num_replicas=self.devices.num_replicas,
            num_train_examples=self.inputs.num_train_examples,
            num_eval_examples=self.inputs.num_eval_examples,
        )
        self.replicated = self._build()
        self.checkpoints = checkpoints.Checkpoints(
            self.folder.file(run_dir.CHECKPOINTS), self.replicated.variables(), self.config.keep_checkpoints
        )

    def go(self) -> None:
        """Does what `mode` says."""
        if self.config.mode == inputs.PROFILING:
            self._profile_input()
            return
        start_step = self.checkpoints.restore()
        self._say(self._summary(start_step or 0))
        if self.config.mode in inputs.TRAINING_MODES:
            self._train(start_step or 0)
            return
        if start_step is None:
            raise ConfigError(
                f"there is no checkpoint to {self.config.mode}. Received: --model_dir={self.config.model_dir}. "
                "Train first, or name the model_dir of a trained run"
            )
        self.clock.start_is_over()
        if self.config.mode == "eval":
            metrics = self._evaluate()
            if self.devices.is_chief:
                self.folder.append_metrics(start_step, {f"eval/{name}": value for name, value in metrics.items()})
            self._say(console.results(_eval_names(metrics), self.clock.seconds(), None))
        else:
            self._say(f"exported to {self._export()}")

    def _build(self) -> replicated.Replicated:
        """The compiled model, its variables made on every replica."""
        config, strategy = self.config, self.devices.strategy
        keras.utils.clear_session()
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        with strategy.scope():
            model = self._new_model()
            brought = self.source.compile_args(self.spec)
            if "optimizer" in brought:
                self._refuse_optimizer_options()
            model.compile(
                optimizer=brought.get("optimizer") or optimizers.build(config, self.plan.train_steps),
                loss=brought["loss"] if "loss" in brought else tasks.loss(self.spec),
                # Weighted, so that the padding of the last evaluation batch, of weight 0, counts in none of them.
                weighted_metrics=brought["metrics"] if "metrics" in brought else tasks.metrics(self.spec),
                jit_compile=False,
            )
        wants_xla = config.xla == "on" or (config.xla == "auto" and self.devices.kind == "gpu")
        if config.xla == "auto" and replicated.reason_against_xla(model, strategy):
            wants_xla = False
        return replicated.Replicated(model, strategy, self._batch_spec(), xla=wants_xla)

    def _new_model(self) -> keras.Model:
        model = self.source.build(self.spec)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"build of {self.config.model} must return a keras.Model. Received: {type(model).__name__}"
            )
        return model

    def _refuse_optimizer_options(self) -> None:
        given = [name for name in OPTIMIZER_OPTIONS if getattr(self.config, name) != FIELDS[name].default]
        if given:
            raise ConfigError(
                f"the model {self.config.model} brings its own optimizer, so these have no effect; leave them out. "
                f"Received: {', '.join(given)}"
            )

    def _batch_spec(self) -> tuple:
        """(x, y) of one replica as Keras' symbolic tensors."""
        batch = self.plan.per_replica_batch_size

        def tensor(array: Array) -> keras.KerasTensor:
            return keras.KerasTensor((batch, *array.shape), dtype=array.dtype)

        x = self.spec.inputs
        if isinstance(x, Array):
            return tensor(x), tensor(self.spec.label)
        return {name: tensor(array) for name, array in x.items()}, tensor(self.spec.label)

    def _train(self, start_step: int) -> None:
        evaluates = self.config.mode in inputs.EVALUATING_MODES
        segments = self.plan.segments(start_step)
        if not segments and (not evaluates or tf.io.gfile.exists(self.folder.file(run_dir.EXPORT))):
            self._say(f"already trained to step {start_step:,}: nothing left to do")
            return
        if self.devices.is_chief:
            self._begin(start_step)
        last: dict[str, float] = {}

        def evaluate() -> replicated.Logs:
            last.update(self._evaluate())
            return last

        timer = LoopClock(self.clock, self.replicated)
        with supply.watched(self.inputs.services, grace_secs=self.config.connect_timeout_secs):
            iterator = iter(self._train_batches(start_step, self.config.seed)) if segments else iter(())
            self.clock.start_is_over()
            self.replicated.fit(
                iterator,
                segments,
                callbacks=self._callbacks(timer),
                evaluate=evaluate if evaluates else None,
                verbose=self._verbosity(),
            )
            del iterator  # see `service.watched`
        if evaluates:
            self._export()
        self._say_results(last, timer)

    def _begin(self, start_step: int) -> None:
        record = run_dir.provenance(
            self.argv, devices=self.devices.description, data=self.inputs.identity(), step=start_step
        )
        record["skipped_records"] = [str(skipped) for skipped in self.inputs.repaired.skipped]
        self.folder.start(self.config, record, step=start_step)

    def _callbacks(self, timer: LoopClock) -> list[keras.callbacks.Callback]:
        is_chief = self.devices.is_chief
        log = MetricsLog(
            self.replicated,
            self.plan.is_report,
            global_batch_size=self.plan.global_batch_size,
            append=self.folder.append_metrics if is_chief else None,
            tensorboard_dir=self.folder.file(run_dir.TENSORBOARD),
        )
        saving = SaveCheckpoint(self.replicated, self.plan.is_checkpoint, self.plan.ends_segment, self._save)
        return [timer, log, saving] if is_chief else [timer, log]

    def _save(self, step: int) -> None:
        with self.clock.measure("checkpoint"):
            self.replicated.check_integer_state()
            self.checkpoints.save(step)

    def _train_batches(self, start_step: int, seed: int) -> tf.distribute.DistributedDataset:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.reseeded(seed).train_batches(self.plan, context, start_step)

        return self.devices.strategy.distribute_datasets_from_function(batches)

    def _profile_input(self) -> None:
        """Measures the pipeline of a training run; writes what it found, and nothing that a training run writes."""
        self._say(self._summary(0))
        timed = self.inputs.train_stages(self.plan, tf.distribute.InputContext())
        handed_over = stages.Stage(
            profile_report.TRANSFER,
            lambda seed: self._train_batches(0, seed),
            timed[-1].window // self.plan.num_replicas or 1,
        )
        timed.append(handed_over)
        self._say(f"measuring {', '.join(stage.name for stage in timed)} and the model by turns, for about a minute")
        measured = profile_input.measure(
            timed, self.replicated, steps_per_loop=self.plan.steps_per_loop, seed=self.config.seed
        )
        circumstances = profile_input.circumstances(
            self.inputs.dataset,
            self.config,
            measured.images,
            device_kind=self.devices.kind,
            devices=self.devices.description,
        )
        profile = profile_report.Profile(measured.stages, measured.model, circumstances)
        self.folder.write(run_dir.INPUT_PROFILE, json.dumps(profile_report.to_json(profile), indent=2) + "\n")
        self.folder.write(run_dir.INPUT_PICTURE, profile_picture.svg(profile))
        files = [(name, self.folder.file(name)) for name in (run_dir.INPUT_PROFILE, run_dir.INPUT_PICTURE)]
        self._say(console.columns(profile_report.rows(profile)))
        self._say(console.table([*profile_report.summary(profile), *files]))

    def _evaluate(self) -> replicated.Logs:
        """Metrics over the evaluation split, each example counted once."""
        with self.clock.measure("evaluate"):
            return self.replicated.evaluate(iter(self._eval_batches), self.plan.eval_loops())

    @functools.cached_property
    def _eval_batches(self) -> tf.distribute.DistributedDataset:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.eval_batches(self.plan, context)

        return self.devices.strategy.distribute_datasets_from_function(batches)

    def _export(self) -> str:
        """Exports a copy of the model made outside the strategy, so that it serves anywhere."""
        directory = self.folder.file(run_dir.EXPORT)
        if not self.devices.is_chief:
            return directory
        with self.clock.measure("export"):
            weights = self.replicated.model.get_weights()
            model = self._new_model()
            model(keras.tree.map_structure(lambda t: tf.zeros((1, *t.shape[1:]), t.dtype), self._batch_spec()[0]))
            model.set_weights(weights)
            return export.save(model, self.spec, directory)

    def _summary(self, start_step: int) -> str:
        trains = self.config.mode in (*inputs.TRAINING_MODES, inputs.PROFILING)
        return console.start_up(
            dataset=self.inputs.describe(),
            reading=self.inputs.describe_reading(self.plan, self.devices.num_hosts) if trains else "",
            model=f"{self.config.model}: {self.replicated.model.count_params():,} parameters, {self.config.precision}",
            devices=self.devices.description,
            plan=self.plan,
            start_step=start_step,
            model_dir=self.folder.path,
        )

    def _say_results(self, metrics: dict[str, float], timer: LoopClock) -> None:
        seconds = self.clock.seconds()
        steps, busy = timer.steps_timed(), seconds["train"] + seconds["input wait"]
        rate = steps * self.plan.global_batch_size / busy if steps and busy else None
        self._say(console.results(_eval_names(metrics), seconds, rate))
        places = [
            ("checkpoints", run_dir.CHECKPOINTS),
            ("metrics", run_dir.METRICS),
            ("tensorboard", run_dir.TENSORBOARD),
        ]
        if self.config.mode == "train_and_eval":
            places.append(("export", run_dir.EXPORT))
        self._say(console.table([(name, self.folder.file(file)) for name, file in places]))

    def _verbosity(self) -> int:
        """Keras' progress bar for a person, one line a segment for a log file, silence on workers but the chief."""
        if not self.devices.is_chief:
            return 0
        return 1 if sys.stdout.isatty() else 2

    def _say(self, text: str) -> None:
        if self.devices.is_chief:
            print(text, flush=True)


def _eval_names(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval {name}": value for name, value in metrics.items()}
