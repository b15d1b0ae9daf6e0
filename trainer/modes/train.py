"""`--mode=train` and `--mode=train_and_eval`: a training loop with all that surrounds it."""

import dataclasses
import functools
import logging
import os
import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer import (
    console,
    guard,
    inputs,
    internals,
    logs,
    platforms,
    postmortem,
    progress,
    run_dir,
    supply,
    terminal,
    training,
)
from trainer.assembly import Assembly
from trainer.callbacks import Callback, evaluations, hypertune
from trainer.callbacks.clock import DOING, LoopClock
from trainer.callbacks.events import Events
from trainer.callbacks.lines import Lines
from trainer.callbacks.metrics import MetricsFile
from trainer.callbacks.pace import Pace
from trainer.callbacks.profile import Profile
from trainer.callbacks.programs import KeepPrograms
from trainer.callbacks.records import Records, Sink
from trainer.callbacks.slow_input import SlowInput
from trainer.callbacks.underflow import Underflow
from trainer.checkpoints import store
from trainer.config import FIELDS
from trainer.errors import EXIT_OK, ConfigError
from trainer.modes import initial, worst
from trainer.modes.promote import close_run, evaluate
from trainer.redact import redact
from trainer.series import Series
from trainer.watch.stopping import Stops

_SHOWN_FILES = (run_dir.CHECKPOINTS, run_dir.METRICS, run_dir.RECEIPT, run_dir.REPORT)
_SOON_SECS = 1.0  # what takes less is not worth a word at the bottom of the terminal
_SECRETS = [name for name, field in FIELDS.items() if field.metadata["secret"]]

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Train:
    """A training run; `go` does it.

    `watched` watches over it from outside, `series` is what it is one of, `publish` keeps the programs compiled so far.
    """

    run: Assembly
    watched: guard.Guard
    stops: Stops
    argv: Sequence[str]
    series: Series | None
    publish: Callable[[], None] | None = None

    def go(self) -> None:
        """Trains, evaluates, exports, and says what came of it."""
        for remark in self.run.remarks():
            _log.warning("%s", remark)
        saves = self._checkpoints()
        at = self._begin_at(saves)
        if self.run.devices.is_chief:
            self.watched.take_over(num_devices=self.run.devices.num_replicas)
            self._write_start(at.step)
        self.watched.progress(at.step, "starting")
        if at.step == 0:
            self.run.adapt()
        _log.info("%s", self.run.summary(at.step))
        timer = LoopClock(self.run.clock, start_step=at.step, reached_before=self.watched.step_before)
        pace = self._pace(at.step)
        records = self._records(at.step, pace)
        loop = self._training(at, saves, records, self._callbacks(at.step, timer, pace, records))
        terminal.show(functools.partial(self._live, pace))
        with (
            self.stops.deferred(self.run.config.grace_secs, self._tell_of_stop),
            supply.watched(self.run.inputs.services, grace_secs=self.run.config.connect_timeout_secs),
        ):
            try:
                loop.run()
            finally:
                loop.close(silently=not self.watched.may_write)
                saves.close()
            if self.run.config.mode in inputs.EVALUATING_MODES:
                self.watched.progress(at.step, "exporting")
                self.run.export()
                worst.write_examples(self.run, at.step, functools.partial(self._goes_on_looking, at.step))
            self._say_results(at, timer)
            if self.series is not None:
                self.watched.progress(at.step, "comparing with what serves")
                close_run(
                    self.series,
                    self.run.folder,
                    at.step,
                    at.metrics,
                    functools.partial(evaluate, self.run),
                    is_chief=self.run.devices.is_chief,
                )
            self.watched.end(EXIT_OK)
            # A worker that has finished is not started again, and without it no other could go on: none leaves before
            # it stands written that there is nothing left to do.
            self.run.devices.agree([0])

    def _goes_on_looking(self, step: int) -> bool:
        self.watched.check()
        self.watched.progress(step, "looking at examples")
        return self.stops.reason is None

    def _tell_of_stop(self, reason: str) -> None:
        message = f"asked to stop by {reason}: the run saves where it is, to go on later"
        self.watched.alerts.send("preempted", message, step=self.watched.step, saved_step=self.stops.saved_step)

    def _checkpoints(self) -> store.Checkpoints:
        config = self.run.config
        return store.Checkpoints(
            self.run.folder.file(run_dir.CHECKPOINTS),
            keep=config.keep_checkpoints,
            keep_best=config.keep_best_checkpoints,
            best_metric=config.best_metric,
            best_goal=config.best_goal,
            evaluations=lambda: evaluations.metrics_by_arrays(self.run.folder.file(run_dir.EVALUATIONS)),
            fence=self.watched.confirm,
            on_failure=self.watched.tell_of_trouble,
            on_commit=self.watched.saved,
        )

    def _begin_at(self, saves: store.Checkpoints) -> training.Position:
        """Puts back the newest checkpoint, or the weights to start from; says where the run is."""
        saved = saves.newest()
        if saved is not None:
            self.run.replicated.restore(saved.arrays, saved.path)
            self.watched.saved(saved.step)
            at = training.Position(step=saved.step, **saved.facts)
        else:
            at = training.Position()
            if self.run.config.init_from is not None:
                initial.load_weights(self.run, self.run.config.init_from)
        devices = self.run.devices
        mine = [at.step, zlib.crc32(self.run.folder.path.encode()), int(devices.has_evaluator)]
        *positions, with_evaluator = devices.agree(mine)
        if with_evaluator not in (0, devices.num_workers):  # some would evaluate in the loop, and wait for the others
            raise ConfigError(
                f"{with_evaluator} of the {devices.num_workers} workers know of an evaluator. Name it in TF_CONFIG or "
                "CLUSTER_SPEC of all of them or of none"
            )
        if positions != [value * devices.num_workers for value in mine[:-1]]:
            raise ConfigError(
                f"the workers go on from different runs or checkpoints, this one from step {at.step}. "
                f"Received: --model_dir={self.run.folder.path}. Give a directory that all of them share"
            )
        if devices.is_chief:
            saves.check_space(self.run.replicated.num_bytes())
        return at

    def _write_start(self, step: int) -> None:
        record = run_dir.provenance(
            self.argv,
            devices=self.run.devices.description,
            data=self.run.inputs.identity(),
            step=step,
            origins=self.run.origins,
            platform_ids=platforms.identity(os.environ),
            secrets=_SECRETS,
            redact=redact,
        )
        record["skipped_records"] = [str(skipped) for skipped in self.run.inputs.repaired.skipped]
        self.run.folder.start(self.run.config, record)

    def _training(
        self,
        at: training.Position,
        saves: store.Checkpoints,
        records: Records,
        callbacks: Sequence[Callback],
    ) -> training.Training:
        config = self.run.config
        around = training.Surroundings(
            agree=self.run.devices.agree,
            stop_reason=lambda: self.stops.reason,
            progress=self.watched.progress,
            compiling=self.watched.compiling,
            check=self.watched.check,
            measure=self.run.clock.measure,
            examine=self._examine,
            alert=self.watched.alerts.send,
        )
        return training.Training(
            at,
            self.run.replicated,
            self.run.plan,
            config,
            around,
            batches=lambda step: iter(self.run.train_batches(step, config.seed)),
            evaluate=self.run.evaluate if config.mode in inputs.EVALUATING_MODES else None,
            store=saves,
            is_chief=self.run.devices.is_chief,
            has_evaluator=self.run.devices.has_evaluator,
            flush=records.flush,
            callbacks=callbacks,
        )

    def _pace(self, start_step: int) -> Pace:
        plan = self.run.plan
        every = plan.train_steps if self.run.devices.has_evaluator else plan.eval_every_steps
        evaluates = self.run.config.mode in inputs.EVALUATING_MODES
        return Pace(plan, self.run.clock, start_step=start_step, evaluate_every_steps=every if evaluates else None)

    def _live(self, pace: Pace, columns: int) -> str:
        """The line at the bottom of a terminal."""
        part, secs = self.run.clock.current()
        doing = f"{DOING[part]} {progress.duration(secs)}" if part in DOING and secs >= _SOON_SECS else ""
        return progress.live(columns, doing, pace.progress())

    def _records(self, start_step: int, pace: Pace) -> Records:
        folder = self.run.folder
        sinks: list[Sink] = []
        if self.run.devices.is_chief:
            metrics = MetricsFile(folder.file(run_dir.METRICS), functools.partial(folder.replace, run_dir.METRICS))
            sinks = [metrics, Events(folder.tensorboard_dir), Lines(self.run.plan.train_steps, pace.progress)]
        plan = self.run.plan
        return Records(
            plan.is_report,
            sinks,
            global_batch_size=plan.global_batch_size,
            start_step=start_step,
            sequence_length=self.run.spec.sequence_length,
        )

    def _callbacks(self, start_step: int, timer: LoopClock, pace: Pace, records: Records) -> list[Callback]:
        keeping = [KeepPrograms(self.publish)] if self.publish else []
        if not self.run.devices.is_chief:
            return [timer, records, *keeping]

        def tell(event: str, message: str, step: int) -> None:
            self.watched.alerts.send(event, message, step=step)

        profile = Profile(
            self.run.folder.tensorboard_dir,
            steps=self.run.plan.profile_steps,
            requested=self.stops.take_profile_request,
            start_step=start_step,
        )
        trouble = [SlowInput(functools.partial(tell, "slow_input")), Underflow(functools.partial(tell, "underflow"))]
        callbacks = [timer, pace, records, profile, *trouble, *keeping]
        return [*callbacks, hypertune.Hypertune()] if hypertune.is_wanted() else callbacks

    def _examine(self, step: int) -> str:
        """The post-mortem of a step, written down by the chief."""
        if not self.run.devices.is_chief:
            return f"loss or gradients of step {step:,} are not finite; the chief examines it"
        trained = self.run.replicated.model
        model = self.run.copy(self.run.compiled_model())
        names = {id(mine): theirs.name for mine, theirs in zip(*map(internals.layers, (model, trained)), strict=True)}
        names |= {id(mine): theirs.path for mine, theirs in zip(model.weights, trained.weights, strict=True)}
        alone = dataclasses.replace(self.run.inputs, services=())
        batches = alone.train_batches(self.run.plan, tf.distribute.InputContext(), step)
        found = postmortem.examine(
            model,
            [self.run.prepared(share) for share in batches.take(self.run.plan.num_replicas).as_numpy_iterator()],
            [postmortem.Record(path, index) for path, index in self.run.inputs.records_of(self.run.plan, step)],
            names,
            step=step,
            learning_rate=self.run.replicated.learning_rate(),
        )
        name = f"{run_dir.POSTMORTEM}-{step}.json"
        self.run.folder.replace(name, found.to_json())
        return f"{found} More: {self.run.folder.file(name)}"

    def _say_results(self, at: training.Position, timer: LoopClock) -> None:
        speed = timer.steps_per_sec()
        rate = speed * self.run.plan.global_batch_size if speed else None
        account = self.watched.receipt.rows() if self.watched.receipt else []
        _log.log(logs.RESULT, "%s", console.results(at.metrics, rate, account))
        folder = self.run.folder
        places = [(name.partition(".")[0], folder.file(name)) for name in _SHOWN_FILES]
        places.append((run_dir.TENSORBOARD, folder.tensorboard_dir))
        if self.run.config.mode in inputs.EVALUATING_MODES:
            places.append((run_dir.EXPORT, folder.export_dir))
        _log.info("%s", console.table(places))
        found = "".join(f", {name} {value:.4g}" for name, value in at.metrics.items())
        self.watched.outcome = f"trained to step {at.step:,}{found}"
