"""The wiring of a run, readable from top to bottom: data, model, devices, plan, training, export.

Everything that can be wrong is looked at in the order of its cost: names and files first, then hardware, then the model
on it. Nothing is written to `model_dir` before all of it stands.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import tempfile
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from data import catalog, stages
from data.spec import Array
from trainer import (
    cluster,
    console,
    export,
    guard,
    hardware,
    inputs,
    internals,
    logs,
    models,
    optimizers,
    plan,
    postmortem,
    profile_input,
    profile_picture,
    profile_report,
    replicated,
    run_dir,
    storage,
    supply,
    tasks,
    training,
)
from trainer.callbacks import Callback
from trainer.callbacks.clock import Clock, LoopClock
from trainer.callbacks.events import Events
from trainer.callbacks.lines import Lines
from trainer.callbacks.metrics import MetricsFile
from trainer.callbacks.profile import Profile
from trainer.callbacks.records import Record, Records, Sink
from trainer.callbacks.slow_input import SlowInput
from trainer.checkpoints import store, weights
from trainer.config import FIELDS, Config, differences, nearest
from trainer.errors import ConfigError
from trainer.redact import redact
from trainer.watch import status
from trainer.watch.stopping import Stops

# Options that say nothing once a model brings its own optimizer.
OPTIMIZER_OPTIONS = [name for name, field in FIELDS.items() if field.metadata["group"] == "optimizer"]
_SECRETS = [name for name, field in FIELDS.items() if field.metadata["secret"]]

_log = logging.getLogger(__name__)


def run(config: Config, argv: Sequence[str], started: float, stops: Stops) -> None:
    """Runs `config` to its end.

    Args:
        config: what to run.
        argv: the command line, for the provenance.
        started: `time.monotonic()` at the start of the process.
        stops: requests to stop.

    Raises:
        TrainerError, DataError: anything its user can mend, before or while it happens.
    """
    clock = Clock(started)
    source = models.find(config.model, config.model_options)
    target = hardware.resolve(
        tpu=config.tpu, tpu_zone=config.tpu_zone, tpu_project=config.tpu_project, replicas=config.replicas
    )
    if target.workers:
        workers = {"worker_index": target.workers.index, "num_workers": len(target.workers.addresses)}
        logs.configure(config.log_format, redact=redact, **workers)
    folder = run_dir.RunDir(config.model_dir)
    profiles, trains = config.mode == inputs.PROFILING, config.mode in inputs.TRAINING_MODES
    if profiles:
        _refuse_several_machines(target)
    # Profiling leaves nothing of a training run behind, repaired shards neither.
    with tempfile.TemporaryDirectory() if profiles else contextlib.nullcontext() as elsewhere:
        read = inputs.open_inputs(config, cache_dir=elsewhere or folder.file(run_dir.REPAIRED))
        _refuse_local_paths(target, config, read)
        if trains:
            folder.check_resumable(config, read.identity())
            if _is_finished(config, folder):
                _log.info("%s holds a finished run of these options: nothing left to do", folder.path)
                return
        if target.is_chief and (profiles or trains):
            folder.check_writable()
        with contextlib.ExitStack() as stack:
            watched = None
            if trains:
                watched = stack.enter_context(guard.watching(config, folder, clock, stops, is_chief=target.is_chief))
            if profiles or trains:
                read = dataclasses.replace(
                    read, services=supply.services(config), cached=supply.copies(config, read.train_shards)
                )
            with clock.measure("connecting"):
                devices = cluster.connect(target, connect_timeout_secs=config.connect_timeout_secs)
            with storage.explained(folder.path), cluster.explained(), read.explained():
                _Run(config, argv, clock, source, read, folder, devices, stops, watched).go()


def _is_finished(config: Config, folder: run_dir.RunDir) -> bool:
    """Whether this very run has come to its end in an earlier start."""
    stored = folder.read(run_dir.CONFIG)
    found = None
    with contextlib.suppress(ValueError, tf.errors.OpError):  # what cannot be read is for others to deal with
        found = status.read(folder.path)
    if stored is None or found is None or found.state != "finished" or differences(json.loads(stored), config):
        return False
    return config.mode not in inputs.EVALUATING_MODES or tf.io.gfile.exists(folder.file(run_dir.EXPORT))


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
    """One run on its devices: what its steps share. `watched` is what watches over a training run."""

    config: Config
    argv: Sequence[str]
    clock: Clock
    source: models.ModelSource
    inputs: inputs.AnyInputs
    folder: run_dir.RunDir
    devices: cluster.Cluster
    stops: Stops
    watched: guard.Guard | None

    def __post_init__(self) -> None:
        self.spec = self.inputs.spec
        self.plan = plan.resolve(
            self.config,
            num_replicas=self.devices.num_replicas,
            num_train_examples=self.inputs.num_train_examples,
            num_eval_examples=self.inputs.num_eval_examples,
        )
        self.replicated = self._build()

    def go(self) -> None:
        """Does what `mode` says."""
        if self.config.mode == inputs.PROFILING:
            self._profile_input()
        elif self.watched is not None:
            self._train(self.watched)
        else:
            self._use_checkpoint()

    # The model.

    def _build(self) -> replicated.Replicated:
        """The compiled model, its variables made on every replica."""
        config, strategy = self.config, self.devices.strategy
        keras.utils.clear_session()
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        with strategy.scope():
            model = self._compiled_model()
        wants_xla = config.xla == "on" or (config.xla == "auto" and self.devices.kind == "gpu")
        if config.xla == "auto" and replicated.reason_against_xla(model, strategy):
            wants_xla = False
        built = replicated.Replicated(model, strategy, self._batch_spec(), xla=wants_xla)
        if config.keep_best_checkpoints and config.mode in inputs.EVALUATING_MODES:
            _refuse_unknown_metric(config.best_metric, internals.metric_names(model))
        return built

    def _compiled_model(self) -> keras.Model:
        model = self._new_model()
        brought = self.source.compile_args(self.spec)
        if "optimizer" in brought:
            self._refuse_optimizer_options()
        model.compile(
            optimizer=brought.get("optimizer") or optimizers.build(self.config, self.plan.train_steps),
            loss=brought["loss"] if "loss" in brought else tasks.loss(self.spec),
            # Weighted, so that the padding of the last evaluation batch, of weight 0, counts in none of them.
            weighted_metrics=brought["metrics"] if "metrics" in brought else tasks.metrics(self.spec),
            jit_compile=False,
        )
        return model

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

    def _copy(self, model: keras.Model) -> keras.Model:
        """`model`, new and outside the strategy, with the weights of the one that is trained."""
        model(keras.tree.map_structure(lambda t: tf.zeros((1, *t.shape[1:]), t.dtype), self._batch_spec()[0]))
        model.set_weights(self.replicated.model.get_weights())
        return model

    # Training.

    def _train(self, watched: guard.Guard) -> None:
        saves = self._checkpoints(watched)
        at = self._begin_at(saves, watched)
        if self.devices.is_chief:
            watched.take_over(num_devices=self.devices.num_replicas)
            self._write_start(at.step)
        watched.progress(at.step, "starting")
        _log.info("%s", self._summary(at.step))
        timer = LoopClock(self.clock, start_step=at.step, reached_before=watched.step_before)
        records = self._records(at.step)
        loop = self._training(at, watched, saves, records, self._callbacks(at.step, watched, timer, records))
        with (
            self.stops.deferred(self.config.grace_secs, lambda reason: self._tell_of_stop(watched, reason)),
            supply.watched(self.inputs.services, grace_secs=self.config.connect_timeout_secs),
        ):
            try:
                loop.run()
            finally:
                loop.close(silently=not watched.may_write)
                saves.close()
            if self.config.mode in inputs.EVALUATING_MODES:
                watched.progress(at.step, "exporting")
                self._export()
            watched.progress(at.step, "finished")
        self._say_results(at, watched, timer)
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in _eval_names(at.metrics).items())
        watched.outcome = f"trained to step {at.step:,}{'; ' if metrics else ''}{metrics}"

    def _tell_of_stop(self, watched: guard.Guard, reason: str) -> None:
        watched.alerts.send(
            "preempted", f"asked to stop by {reason}: saving, to go on later", step=self.stops.saved_step
        )

    def _checkpoints(self, watched: guard.Guard | None = None) -> store.Checkpoints:
        config = self.config
        return store.Checkpoints(
            self.folder.file(run_dir.CHECKPOINTS),
            keep=config.keep_checkpoints,
            keep_best=config.keep_best_checkpoints,
            best_metric=config.best_metric,
            best_goal=config.best_goal,
            fence=watched.confirm if watched else lambda: None,
            on_failure=lambda message: watched.alerts.send("failing_saves", message) if watched else None,
            on_commit=watched.saved if watched else lambda step: None,
        )

    def _begin_at(self, saves: store.Checkpoints, watched: guard.Guard) -> training.Position:
        """Puts back the newest checkpoint, or the weights to start from; says where the run is."""
        saved = saves.newest()
        if saved is not None:
            self.replicated.restore(saved.arrays, saved.path)
            watched.saved(saved.step)
            at = training.Position(step=saved.step, **saved.facts)
        else:
            at = training.Position()
            if self.config.init_from is not None:
                self._init_from(self.config.init_from)
        if self.devices.agree([at.step]) != [at.step * self.devices.num_workers]:
            raise ConfigError(
                f"the workers go on from different checkpoints, this one from step {at.step}. "
                f"Received: --model_dir={self.folder.path}. Give a directory that all of them share"
            )
        if self.devices.is_chief:
            saves.check_space(self.replicated.num_bytes())
        return at

    def _init_from(self, path: str) -> None:
        saved = store.load(path, only=replicated.MODEL)
        patterns = [pattern.strip() for pattern in self.config.init_fresh.split(",") if pattern.strip()]
        chosen, fresh = weights.choose_weights(saved.arrays, self.replicated.signature(), patterns)
        self.replicated.load_state(chosen)
        left = f"; as initialised: {', '.join(name.removeprefix('model/') for name in fresh)}" if fresh else ""
        _log.info("weights of %s, step %s%s", saved.path, f"{saved.step:,}", left)

    def _write_start(self, step: int) -> None:
        record = run_dir.provenance(
            self.argv,
            devices=self.devices.description,
            data=self.inputs.identity(),
            step=step,
            secrets=_SECRETS,
            redact=redact,
        )
        record["skipped_records"] = [str(skipped) for skipped in self.inputs.repaired.skipped]
        self.folder.start(self.config, record)

    def _training(
        self,
        at: training.Position,
        watched: guard.Guard,
        saves: store.Checkpoints,
        records: Records,
        callbacks: Sequence[Callback],
    ) -> training.Training:
        config = self.config
        evaluates = config.mode in inputs.EVALUATING_MODES
        around = training.Surroundings(
            agree=self.devices.agree,
            stop_reason=lambda: self.stops.reason,
            progress=watched.progress,
            compiling=watched.compiling,
            check=watched.check,
            measure=self.clock.measure,
            examine=self._examine,
            alert=watched.alerts.send,
        )
        policy = training.Policy(
            on_nonfinite=config.on_nonfinite,
            max_nonfinite=config.max_nonfinite,
            grace_secs=config.grace_secs,
            checkpoint_every_secs=config.checkpoint_every_secs,
            steps_per_loop=config.steps_per_loop,
            evaluates=evaluates,
        )
        return training.Training(
            at,
            self.replicated,
            self.plan,
            policy,
            around,
            batches=lambda step: iter(self._train_batches(step, config.seed)),
            evaluate=self._evaluate,
            store=saves if self.devices.is_chief else None,
            flush=records.flush,
            newest=lambda: self._newest(saves),
            callbacks=callbacks,
        )

    def _newest(self, saves: store.Checkpoints) -> tuple[int, dict] | None:
        saved = saves.newest()
        return None if saved is None else (saved.step, dict(saved.arrays))

    def _records(self, start_step: int) -> Records:
        folder = self.folder
        sinks: list[Sink] = []
        if self.devices.is_chief:
            metrics = MetricsFile(folder.file(run_dir.METRICS), functools.partial(folder.replace, run_dir.METRICS))
            sinks = [metrics, Events(folder.file(run_dir.TENSORBOARD)), Lines(self.plan.train_steps)]
        return Records(self.plan.is_report, sinks, global_batch_size=self.plan.global_batch_size, start_step=start_step)

    def _callbacks(self, start_step: int, watched: guard.Guard, timer: LoopClock, records: Records) -> list[Callback]:
        if not self.devices.is_chief:
            return [timer, records]

        def tell(message: str, step: int) -> None:
            watched.alerts.send("slow_input", message, step=step)

        profile = Profile(
            self.folder.file(run_dir.TENSORBOARD),
            steps=self.plan.profile_steps,
            requested=self.stops.take_profile_request,
            start_step=start_step,
        )
        return [timer, records, profile, SlowInput(tell)]

    def _train_batches(self, start_step: int, seed: int) -> tf.distribute.DistributedDataset:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.reseeded(seed).train_batches(self.plan, context, start_step)

        return self.devices.strategy.distribute_datasets_from_function(batches)

    def _examine(self, step: int) -> str:
        """The post-mortem of a step, written down by the chief."""
        if not self.devices.is_chief:
            return f"loss or gradients of step {step:,} are not finite; the chief examines it"
        trained = self.replicated.model
        model = self._copy(self._compiled_model())
        names = {id(mine): theirs.name for mine, theirs in zip(*map(internals.layers, (model, trained)), strict=True)}
        names |= {id(mine): theirs.path for mine, theirs in zip(model.weights, trained.weights, strict=True)}
        alone = dataclasses.replace(self.inputs, services=())
        batches = alone.train_batches(self.plan, tf.distribute.InputContext(), step)
        found = postmortem.examine(
            model,
            list(batches.take(self.plan.num_replicas)),
            [postmortem.Record(path, index) for path, index in self.inputs.records_of(self.plan, step)],
            names,
            step=step,
            learning_rate=self.replicated.learning_rate(),
        )
        name = f"{run_dir.POSTMORTEM}-{step}.json"
        self.folder.replace(name, found.to_json())
        return f"{found} More: {self.folder.file(name)}"

    # Evaluation, export, profile.

    def _use_checkpoint(self) -> None:
        """Evaluates or exports what was trained."""
        saves = self._checkpoints()
        saved = saves.best() if self.config.checkpoint == "best" else saves.newest()
        if saved is None:
            which = "evaluated checkpoint" if self.config.checkpoint == "best" else "checkpoint"
            raise ConfigError(
                f"there is no {which} to {self.config.mode}. Received: --model_dir={self.config.model_dir}. "
                "Train first, or name the model_dir of a trained run"
            )
        self.replicated.restore(saved.arrays, saved.path)
        _log.info("%s", self._summary(saved.step))
        self.clock.start_is_over()
        if self.config.mode == "export":
            _log.info("exported to %s", self._export())
            return
        metrics = self._evaluate() or {}
        if self.devices.is_chief:
            folder = self.folder
            file = MetricsFile(folder.file(run_dir.METRICS), functools.partial(folder.replace, run_dir.METRICS))
            file.write(Record(saved.step, {f"eval/{name}": value for name, value in metrics.items()}))
            file.close()
        _log.info("%s", console.results(_eval_names(metrics), None, console.account(self.clock.seconds())))

    def _evaluate(self, goes_on: Callable[[], bool] = lambda: True) -> replicated.Logs | None:
        """Metrics over the evaluation split, each example counted once; None where `goes_on` said no."""
        with self.clock.measure("evaluation"):
            return self.replicated.evaluate(iter(self._eval_batches), self.plan.eval_loops(), goes_on)

    @functools.cached_property
    def _eval_batches(self) -> tf.distribute.DistributedDataset:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.eval_batches(self.plan, context)

        return self.devices.strategy.distribute_datasets_from_function(batches)

    def _export(self) -> str:
        """Exports a copy of the model made outside the strategy, so that it serves anywhere."""
        directory = self.folder.file(run_dir.EXPORT)
        if self.devices.is_chief:
            with self.clock.measure("export"):
                export.save(self._copy(self._new_model()), self.spec, directory)
        return directory

    def _profile_input(self) -> None:
        """Measures the pipeline of a training run; writes what it found, and nothing that a training run writes."""
        _log.info("%s", self._summary(0))
        timed = self.inputs.train_stages(self.plan, tf.distribute.InputContext())
        handed_over = stages.Stage(
            profile_report.TRANSFER,
            lambda seed: self._train_batches(0, seed),
            timed[-1].window // self.plan.num_replicas or 1,
        )
        timed.append(handed_over)
        names = ", ".join(stage.name for stage in timed)
        _log.info("measuring %s and the model by turns, for about a minute", names)
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
        _log.info("%s", console.columns(profile_report.rows(profile)))
        _log.info("%s", console.table([*profile_report.summary(profile), *files]))

    # What is said.

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

    def _say_results(self, at: training.Position, watched: guard.Guard, timer: LoopClock) -> None:
        speed = timer.steps_per_sec()
        rate = speed * self.plan.global_batch_size if speed else None
        account = watched.receipt.rows() if watched.receipt else []
        _log.info("%s", console.results(_eval_names(at.metrics), rate, account))
        places = [run_dir.CHECKPOINTS, run_dir.METRICS, run_dir.TENSORBOARD, run_dir.RECEIPT]
        if self.config.mode in inputs.EVALUATING_MODES:
            places.append(run_dir.EXPORT)
        _log.info("%s", console.table([(name.partition(".")[0], self.folder.file(name)) for name in places]))


def _refuse_unknown_metric(name: str, known: Sequence[str]) -> None:
    if known and name not in known:
        raise ConfigError(
            f"best_metric must be a metric of the evaluation: {', '.join(known)}. "
            f"Received: {name!r}{nearest(name, known)}"
        )


def _eval_names(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval {name}": value for name, value in metrics.items()}
