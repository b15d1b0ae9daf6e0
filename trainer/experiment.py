"""A run from its config to its end: what is looked at, in which order, and which mode does the rest.

Everything that can be wrong is looked at in the order of its cost: names and files first, then hardware, then the model
on it. Nothing is written to `model_dir` before all of it stands.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

import tensorflow as tf

from data import catalog
from trainer import (
    cluster,
    compile_cache,
    diagnose,
    export,
    guard,
    hardware,
    inputs,
    logs,
    models,
    progress,
    run_dir,
    series,
    storage,
    supply,
    terminal,
)
from trainer.assembly import Assembly
from trainer.callbacks.clock import DOING, Clock
from trainer.config import Config, differences
from trainer.errors import ConfigError
from trainer.modes import parity, report
from trainer.modes.follow import Follow
from trainer.modes.measure_input import measure_input
from trainer.modes.preflight import preflight
from trainer.modes.sweep_lr import sweep_lr
from trainer.modes.train import Train
from trainer.modes.use_checkpoint import use_checkpoint
from trainer.redact import redact
from trainer.watch import status
from trainer.watch.stopping import Stops

_NOTHING_NEW = "nothing new in the data since the last run of {} that finished: nothing to do"

# Modes that neither train nor use a checkpoint, as those left do.
_ON_DEVICES = {inputs.PROFILING: measure_input, inputs.SWEEPING: sweep_lr}

_log = logging.getLogger(__name__)


def run(
    config: Config, origins: Mapping[str, Mapping[str, str]], argv: Sequence[str], started: float, stops: Stops
) -> None:
    """Runs `config` to its end.

    Args:
        config: what to run.
        origins: who said what of it, as `flags.origins` has it.
        argv: the command line, for the provenance.
        started: `time.monotonic()` at the start of the process.
        stops: requests to stop.

    Raises:
        TrainerError, DataError: anything its user can mend, before or while it happens.
    """
    clock = Clock(started)
    terminal.show(functools.partial(_live, clock, config.mode))
    start = _Start(config, origins, argv, clock, models.find(config.model, config.model_options), stops)
    if config.mode in inputs.REHEARSING_MODES:
        stops.when = f"during {config.mode}"
        _rehearse(start)
        return
    target = hardware.resolve(
        tpu=config.tpu,
        tpu_zone=config.tpu_zone,
        tpu_project=config.tpu_project,
        replicas=config.replicas,
        backend=config.backend,
    )
    target = cluster.locate(target, timeout_secs=config.connect_timeout_secs)
    if target.workers:
        workers = {"worker_index": target.workers.index, "num_workers": len(target.workers.addresses)}
        logs.configure(config.log_format, redact=redact, quiet=config.quiet, **workers)
        terminal.leave()  # workers may share one
    _refuse_idle_evaluator(target, config)
    if config.mode == inputs.PROFILING:
        _refuse_several_machines(target)
    if target.evaluation == "only":
        stops.when = "while it evaluated"
        _follow(start, target)
    else:
        _run_on(start, target)


def _live(clock: Clock, mode: str, columns: int) -> str:
    """The line at the bottom of a terminal, as long as nothing is trained."""
    part, secs = clock.current()
    if part not in DOING or part == "start_up":  # all that no part claims
        secs = sum(clock.seconds().values())
        part = "other" if mode in inputs.TRYING_MODES else part
    return progress.live(columns, f"{DOING.get(part, mode)} {progress.duration(secs)}")


@dataclasses.dataclass(frozen=True)
class _Start:
    """What a start of this program is given, as `run` has it."""

    config: Config
    origins: Mapping[str, Mapping[str, str]]
    argv: Sequence[str]
    clock: Clock
    source: models.ModelSource
    stops: Stops

    def connect(self, target: hardware.Target) -> cluster.Cluster:
        with self.clock.measure("connecting"):
            return cluster.connect(target, connect_timeout_secs=self.config.connect_timeout_secs)


def _run_on(start: _Start, target: hardware.Target) -> None:
    """The modes that run on the devices asked for: training, trying its parts, and using what was trained."""
    mode, stops = start.config.mode, start.stops
    tries, trains = mode in inputs.TRYING_MODES, mode in inputs.TRAINING_MODES
    if not trains:
        stops.when = f"during {mode}"
    # Trying leaves nothing of a training run behind, repaired shards neither, if it is this machine that reads them.
    with contextlib.ExitStack() as stack:
        stack.enter_context(storage.explained(start.config.model_dir))
        elsewhere = stack.enter_context(tempfile.TemporaryDirectory()) if tries and not target.is_remote else None
        config, of_series, read = _open(start.config, elsewhere)
        folder = _folder(config)
        stack.enter_context(diagnose.kept(folder.path, redact))
        _refuse_local_paths(target, config, read)
        if trains and (reason := _nothing_to_do(config, folder, of_series, read.identity())):
            _log.log(logs.RESULT, "%s", reason)
            return
        if target.is_chief and (tries or trains):
            folder.check_writable()
        watched = None
        if trains:
            watching = guard.watching(
                config,
                folder,
                start.clock,
                stops,
                is_chief=target.is_chief,
                afterwards=lambda: report.leave(folder, stops.remaining_secs()),
            )
            watched = stack.enter_context(watching)
            # By here, so that the guard hears what the user will hear.
            stack.enter_context(storage.explained(folder.path))
        if tries or trains:
            services = supply.services(config)
            read = dataclasses.replace(read, services=services, cached=supply.copies(config, read.train_shards))
        publish = None
        if config.compile_cache is not None:
            publish = stack.enter_context(compile_cache.opened(config.compile_cache)).publish
        devices = start.connect(target)
        stack.enter_context(read.explained())
        stack.enter_context(devices.watched(stops.end))
        assembly = Assembly(config, start.clock, start.source, read, folder, devices, start.origins)
        if watched is not None:
            Train(assembly, watched, stops, start.argv, of_series, publish).go()
        else:
            _ON_DEVICES.get(mode, use_checkpoint)(assembly)


def _open(config: Config, elsewhere: str | None) -> tuple[Config, series.Series | None, inputs.AnyInputs]:
    """The run that this start is of, where `config` names a series of them, and its inputs."""
    now, data = datetime.datetime.now(datetime.UTC), None
    while True:
        chosen, of = config, None
        if config.mode in inputs.TRAINING_MODES:
            chosen, of = series.choose(config, os.environ, now, data)
        read = inputs.open_inputs(chosen, cache_dir=elsewhere or _folder(chosen).file(run_dir.REPAIRED))
        if of is None or data is not None or of.can_go_on_with(read.identity()):
            return chosen, of, read
        data = read.identity()


def _folder(config: Config) -> run_dir.RunDir:
    return run_dir.RunDir(config.model_dir, export_dir=config.export_dir, tensorboard_dir=config.tensorboard_dir)


def _nothing_to_do(config: Config, folder: run_dir.RunDir, of: series.Series | None, data: str) -> str | None:
    """Why this start has nothing to do, if it has not.

    Raises:
        ConfigError: a run was begun here with other options or data.
    """
    finished = _is_finished(config, folder)
    if of is None or not finished:  # of a series, a run that has finished with older data is done with
        folder.check_resumable(config, data)
    if finished:
        return f"{folder.path} holds a finished run of these options: nothing left to do"
    if of is not None and of.has_nothing_new(data):
        return _NOTHING_NEW.format(of.root)
    if of is not None and of.current is not None:
        _log.info("%s has not finished: going on with it", folder.path)
    return None


def _rehearse(start: _Start) -> None:
    """The modes that need nothing but this machine's CPU and leave nothing but their report."""
    config, folder = start.config, _folder(start.config)
    with diagnose.kept(folder.path, redact), storage.explained(folder.path), tempfile.TemporaryDirectory() as elsewhere:
        start.stops.on_exit(lambda reason: shutil.rmtree(elsewhere, ignore_errors=True))
        read = inputs.open_inputs(config, cache_dir=elsewhere)
        folder.check_writable()

        def assemble(config: Config, devices: cluster.Cluster) -> Assembly:
            return Assembly(config, start.clock, start.source, read, folder, devices)

        with read.explained():
            if config.mode == inputs.PREFLIGHT:
                preflight(config, assemble, read, folder, elsewhere)
            else:
                clusters = cluster.rehearse(config.replicas or parity.DEFAULT_REPLICAS)
                parity.compare_replicas(config, assemble, clusters, folder)


def _follow(start: _Start, target: hardware.Target) -> None:
    """Evaluates what others train, from a directory of its own within theirs."""
    with storage.explained(start.config.model_dir):
        config, of, read = _open(start.config, None)
        if of is not None and of.has_nothing_new(read.identity()):
            _log.log(logs.RESULT, "%s", _NOTHING_NEW.format(of.root))
            return
    folder = _folder(config)
    own = run_dir.RunDir(folder.file(run_dir.EVALUATOR))
    with (
        diagnose.kept(folder.path, redact),
        storage.explained(folder.path),
        guard.watching(config, own, start.clock, start.stops, is_chief=True) as watched,
        storage.explained(folder.path),  # as in `_run_on`
    ):
        devices = start.connect(target)
        with read.explained():
            Follow(Assembly(config, start.clock, start.source, read, folder, devices, start.origins), watched).go()


def _is_finished(config: Config, folder: run_dir.RunDir) -> bool:
    """Whether this very run has come to its end in an earlier start."""
    stored = folder.read(run_dir.CONFIG)
    found = None
    with contextlib.suppress(ValueError, tf.errors.OpError):  # what cannot be read is for others to deal with
        found = status.read(folder.path)
    if stored is None or found is None or found.state != "finished" or differences(json.loads(stored), config):
        return False
    return config.mode not in inputs.EVALUATING_MODES or export.is_there(folder.export_dir)


def _refuse_idle_evaluator(target: hardware.Target, config: Config) -> None:
    if target.evaluation != "here" and config.mode != "train_and_eval":
        raise ConfigError(
            "TF_CONFIG or CLUSTER_SPEC has an evaluator, which evaluates the checkpoints of a run with "
            f"--mode=train_and_eval and has nothing to do in others. Received: --mode={config.mode}. Leave it out"
        )


def _refuse_several_machines(target: hardware.Target) -> None:
    if target.is_remote or target.workers:
        raise ConfigError(
            "profile_input measures the pipeline of the machine that it runs on, and here others read too. Received: "
            f"{f'{target.workers.source} with several workers' if target.workers else target.source}. Run it on one of "
            "them, with --tpu=local on a TPU VM, and without TF_CONFIG and CLUSTER_SPEC"
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
