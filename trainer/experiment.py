"""The wiring of a run, readable from top to bottom: data, model, devices, plan, training, export.

Everything that can be wrong is looked at in the order of its cost: names and files first, then hardware, then the model
on it. Nothing is written to `model_dir` before all of it stands.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from data import catalog, pipeline
from data.spec import Array, Spec
from trainer import (
    checkpoints,
    cluster,
    console,
    export,
    hardware,
    models,
    optimizers,
    plan,
    replicated,
    run_dir,
    tasks,
)
from trainer.callbacks.checkpoint import SaveCheckpoint
from trainer.callbacks.clock import Clock, LoopClock
from trainer.callbacks.metrics import MetricsLog
from trainer.config import FIELDS, Config
from trainer.errors import ConfigError

TRAINING_MODES = ("train", "train_and_eval")
EVALUATING_MODES = ("eval", "train_and_eval")

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
    dataset = pipeline.open_dataset(config.dataset, config.data_dir)
    spec = _spec(dataset, config)
    folder = run_dir.RunDir(config.model_dir)
    trains = config.mode in TRAINING_MODES
    if trains:
        folder.check_resumable(config, _training_data(dataset, config))
    target = hardware.resolve(
        tpu=config.tpu, tpu_zone=config.tpu_zone, tpu_project=config.tpu_project, replicas=config.replicas
    )
    _refuse_local_paths(target, config, dataset)
    if target.is_chief and trains:
        folder.check_writable()
    devices = cluster.connect(target, connect_timeout_secs=config.connect_timeout_secs)
    _Run(config, argv, clock, source, dataset, spec, folder, devices).go()


def _spec(dataset: pipeline.Dataset, config: Config) -> Spec:
    spec = dataset.spec(config.image_size)
    if config.num_classes is None:
        return spec
    if spec.num_classes is not None and config.num_classes < spec.num_classes:
        raise ConfigError(
            f"num_classes must hold every class of {dataset.name}, which has {spec.num_classes}. "
            f"Received: {config.num_classes}"
        )
    return dataclasses.replace(spec, num_classes=config.num_classes)


def _training_data(dataset: pipeline.Dataset, config: Config) -> str:
    """What decides which record stands where: a run goes on only with the same."""
    split = dataset.split(config.train_split)
    return f"{dataset.name} {config.train_split}: {split.num_examples} examples in {len(split.paths)} shards"


def _refuse_local_paths(target: hardware.Target, config: Config, dataset: pipeline.Dataset) -> None:
    """A worker on another machine reads the data and writes checkpoints itself, and sees none of our disks."""
    paths = {"dataset": str(dataset.directory), "model_dir": config.model_dir}
    local = [f"{name}={path}" for name, path in paths.items() if not catalog.is_remote(path)]
    if target.is_remote and local:
        raise ConfigError(
            f"a TPU worker on another machine cannot see local paths; use gs://. Received: {', '.join(local)}"
        )


@dataclasses.dataclass
class _Run:
    """One run on its devices: what its steps share."""

    config: Config
    argv: Sequence[str]
    clock: Clock
    source: models.ModelSource
    dataset: pipeline.Dataset
    spec: Spec
    folder: run_dir.RunDir
    devices: cluster.Cluster

    def __post_init__(self) -> None:
        mode = self.config.mode
        self.plan = plan.resolve(
            self.config,
            num_replicas=self.devices.num_replicas,
            num_train_examples=self._examples(self.config.train_split, needed=mode in TRAINING_MODES),
            num_eval_examples=self._examples(self.config.eval_split, needed=mode in EVALUATING_MODES),
        )
        self.replicated = self._build()
        self.checkpoints = checkpoints.Checkpoints(
            self.folder.file(run_dir.CHECKPOINTS), self.replicated.variables(), self.config.keep_checkpoints
        )

    def _examples(self, split: str, *, needed: bool) -> int:
        return self.dataset.split(split).num_examples if needed else 0

    def go(self) -> None:
        """Does what `mode` says."""
        start_step = self.checkpoints.restore()
        self._say(self._summary(start_step or 0))
        if self.config.mode in TRAINING_MODES:
            self._train(start_step or 0)
            return
        if start_step is None:
            raise ConfigError(
                f"there is no checkpoint to {self.config.mode}. Received: --model_dir={self.config.model_dir}. "
                "Train first, or name the model_dir of a trained run"
            )
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

        inputs = self.spec.inputs
        x = tensor(inputs) if isinstance(inputs, Array) else {name: tensor(array) for name, array in inputs.items()}
        return x, tensor(self.spec.label)

    def _train(self, start_step: int) -> None:
        evaluates = self.config.mode in EVALUATING_MODES
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
        iterator = self._train_batches(start_step) if segments else iter(())
        self.clock.start_is_over()
        self.replicated.fit(
            iterator,
            segments,
            callbacks=self._callbacks(timer),
            evaluate=evaluate if evaluates else None,
            verbose=self._verbosity(),
        )
        if evaluates:
            self._export()
        self._say_results(last, timer)

    def _begin(self, start_step: int) -> None:
        data = _training_data(self.dataset, self.config)
        record = run_dir.provenance(self.argv, devices=self.devices.description, data=data, step=start_step)
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

    def _train_batches(self, start_step: int) -> Iterator:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return pipeline.train_batches(
                self.dataset,
                self.config.train_split,
                seed=self.config.seed,
                shuffle_window=self.config.shuffle_window_examples,
                start_step=start_step,
                **self._share(context),
            )

        return iter(self.devices.strategy.distribute_datasets_from_function(batches))

    def _evaluate(self) -> replicated.Logs:
        """Metrics over the evaluation split, each example counted once."""
        with self.clock.measure("evaluate"):
            return self.replicated.evaluate(iter(self._eval_batches), self.plan.eval_loops())

    @functools.cached_property
    def _eval_batches(self) -> tf.distribute.DistributedDataset:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Repeated, so that tf.distribute need not ask all workers at each step whether one has run out.
            return pipeline.eval_batches(self.dataset, self.config.eval_split, **self._share(context)).repeat()

        return self.devices.strategy.distribute_datasets_from_function(batches)

    def _share(self, context: tf.distribute.InputContext) -> dict:
        """This host's share of every global batch."""
        return {
            "global_batch_size": self.plan.global_batch_size,
            "per_replica_batch_size": self.plan.per_replica_batch_size,
            "host_index": context.input_pipeline_id,
            "num_hosts": context.num_input_pipelines,
            "image_size": self.config.image_size,
        }

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
        splits = ", ".join(f"{count:,} {name}" for name, count in self.dataset.splits.items())
        return console.start_up(
            dataset=f"{self.dataset.name}: {splits}",
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
