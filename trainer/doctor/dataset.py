"""The dataset: it opens, its files are those of its manifest, one record of each split parses; and what it asks for."""

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

from data import catalog
from data.errors import DataError
from trainer import diagnose
from trainer.config import Config
from trainer.doctor import accelerator, locations, machine
from trainer.doctor.findings import NO_ANSWER, Case, Finding, failed, passed, refused, skipped, warned
from trainer.errors import ConfigError, RetryError

_MIB = 1 << 20


def dataset(case: Case) -> Iterator[Finding]:
    """Opens it, and looks at each split that training and evaluation read."""
    if why := _not_looked_at(case):
        yield skipped("dataset", why)
        return
    locations.before_tensorflow(case)
    from trainer import storage

    with storage.explained(case.config.dataset):
        yield from _dataset(case)


def dataset_unfinished(how: str) -> Finding:
    """The files have not been read in time."""
    return failed("dataset", f"it was not opened and read: {how}", "Check where it lies; run again", retryable=True)


def _dataset(case: Case) -> Iterator[Finding]:
    from data import pipeline

    config = case.config
    if catalog.is_synthetic(config.dataset):
        yield passed("dataset", f"{config.dataset}: no record is read")
        return
    opened = pipeline.open_dataset(config.dataset, config.data_dir)
    counts = ", ".join(f"{count:,} {name}" for name, count in opened.splits.items())
    yield passed("dataset", f"{opened.directory}: {counts}")
    for name, needed in ((config.train_split, True), (config.eval_split, False)):
        try:
            yield _split(opened, name, config)
        except DataError as error:
            finding = refused(f"split {name}", error)
            if not needed and name not in opened.splits:
                finding = warned(finding.name, finding.what, "--mode=train does without; else give --eval_split")
            yield finding
    if config.train_split not in opened.splits:
        return
    split = opened.split(config.train_split)
    yield _shards(config.train_split, split, accelerator.num_hosts(case))
    yield _memory(case, split)
    yield _steps(config, opened)


def _not_looked_at(case: Case) -> str | None:
    if not case.config.dataset:
        return "not given"
    if "tensorflow" not in case.facts:
        return "it is read through TensorFlow, which cannot be used here"
    return None


def _split(opened: Any, name: str, config: Config) -> Finding:
    """Its files against the manifest, and its first record read as evaluation reads it."""
    import tensorflow as tf

    from data import pipeline, quarantine, review

    opened.split(name)
    skips = config.corrupt_records == "skip" and name == config.train_split
    compared = "its files are not compared: what --corrupt_records=skip reads is found out by the run"
    if not skips:
        prepared = quarantine.prepare(opened.info, name, skip=False, max_records=0, cache_dir="", threads=1)
        compared = "files as the manifest says" if prepared.checksum else "all files there; there is no manifest"
    one = pipeline.eval_batches(
        opened, name, global_batch_size=1, per_replica_batch_size=1, image_size=config.image_size
    )
    try:
        next(iter(one.take(1)))
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        message = review.explain(opened.info, name, error)
        if message is None:
            raise
        raise DataError(message) from error
    return passed(f"split {name}", f"one record parses; {compared}")


def _shards(name: str, split: Any, num_hosts: int) -> Finding:
    count = len(split.filled)
    if count >= num_hosts:
        return passed("shards", f"{count} of {name}, read by {num_hosts} host(s)")
    what = f"{name} has {count} shards for {num_hosts} hosts: hosts read the same files, each a part of the records"
    return warned("shards", what, f"Build it anew in {num_hosts} shards or a multiple, for each host to read its own")


def _memory(case: Case, split: Any) -> Finding:
    """Room for shuffling, which holds one epoch at most, and for --cache=memory."""
    total = split.record_bytes * split.num_examples
    needed = min(case.config.shuffle_mib * _MIB, total) + (total if case.config.cache == "memory" else 0)
    available = machine.available_memory(case.root)
    what = f"{needed / _MIB:,.0f} MiB for shuffling and cache, {available / _MIB:,.0f} MiB available"
    if needed < available:
        return passed("input memory", what)
    return failed("input memory", what, "Lower --shuffle_mib, leave out --cache=memory, or take a larger machine")


def _steps(config: Config, opened: Any) -> Finding:
    from trainer import plan

    counts = [opened.splits.get(name, 0) for name in (config.train_split, config.eval_split)]
    try:
        # Steps do not depend on replicas; whether the batch divides over them is another line.
        found = plan.resolve(config, num_replicas=1, num_train_examples=counts[0], num_eval_examples=counts[1])
    except ConfigError as error:
        return refused("steps", error)
    a_run = f"{found.train_steps:,}, {found.steps_per_epoch:,.1f} an epoch, {found.eval_steps:,} of evaluation"
    return passed("steps", a_run)


# --- room for checkpoints ---


def room(case: Case) -> Iterator[Finding]:
    """Builds the model on the CPU to know how large a checkpoint is, and looks for room for it."""
    config = case.config
    if not config.model_dir or _not_looked_at(case):
        yield skipped("checkpoint room", "it takes --dataset, --model_dir and TensorFlow to know")
        return
    locations.before_tensorflow(case)
    from trainer import storage

    try:
        trains, read = _inputs(config)
    except (DataError, *storage.FILE_ERRORS):  # another check says so
        yield skipped("checkpoint room", "it takes the dataset to know, and that does not open")
        return
    except ConfigError as error:
        yield refused("model", error)
        return
    try:
        num_bytes = _checkpoint_bytes(trains, read)
    except BaseException as error:  # whatever the code of the user's model raises, sys.exit() too
        yield refused("model", diagnose.explain(error))
        return
    what = f"a checkpoint takes {num_bytes / _MIB:,.0f} MiB"
    if catalog.is_remote(config.model_dir):
        directory = machine.staging_directory(case.environ)
        free = storage.free_bytes(directory)
        if free < num_bytes:
            what = f"{what}, and TMPDIR={directory}, where it is staged, has {free / _MIB:,.0f} MiB"
            yield failed("checkpoint room", what, "Make room there, or give another TMPDIR", retryable=True)
        else:
            yield passed("checkpoint room", f"{what}; TMPDIR={directory} has {free / _MIB:,.0f} MiB")
        return
    yield _local_room(config, num_bytes, what)


def room_unfinished(how: str) -> Finding:
    """A large model takes long to build, which is no fault; one that ends its process is."""
    if how.startswith(NO_ANSWER):
        return skipped("checkpoint room", f"the model was not built to the end, so its size is not known: {how}")
    return failed("model", f"building it does not come to an end: {how}", "Mend what --model names")


def _local_room(config: Config, num_bytes: int, what: str) -> Finding:
    from trainer import run_dir, storage
    from trainer.checkpoints import store

    directory = run_dir.RunDir(config.model_dir).file(run_dir.CHECKPOINTS)
    try:
        store.Checkpoints(
            directory,
            keep=config.keep_checkpoints,
            keep_best=config.keep_best_checkpoints,
            best_metric=config.best_metric,
            best_goal=config.best_goal,
        ).check_space(num_bytes)
    except (ConfigError, RetryError) as error:
        return refused("checkpoint room", error)
    count = config.keep_checkpoints + config.keep_best_checkpoints + 1  # the new one stands before an old one goes
    free = storage.free_bytes(directory)
    what = f"{what}, {count} of them {count * num_bytes / _MIB:,.0f} MiB; {free / _MIB:,.0f} MiB free"
    # A directory that is there holds some of them already.
    if free < count * num_bytes and not os.path.isdir(directory):
        return warned("checkpoint room", what, "Lower --keep_checkpoints, or make room")
    return passed("checkpoint room", what)


def _inputs(config: Config) -> tuple[Config, Any]:
    """The dataset, and the training run that the model is built for."""
    from data import pipeline, quarantine, synthetic
    from trainer import inputs

    # The size depends on none of these, and other checks judge them.
    trains = dataclasses.replace(config, mode="train_and_eval", tpu=None, tpu_zone=None, tpu_project=None)
    trains = dataclasses.replace(
        trains, replicas=None, schedule="constant", warmup=None, decay_at=None, decay_every=None
    )
    untouched = quarantine.Prepared({}, [], "")
    if catalog.is_synthetic(config.dataset):
        made = synthetic.open_dataset(config.dataset, config.data_dir, config.num_classes, config.sequence_length)
        return trains, inputs.SyntheticInputs(trains, made, inputs.spec_of(made, trains), untouched)
    opened = pipeline.open_dataset(config.dataset, config.data_dir)
    return trains, inputs.Inputs(trains, opened, inputs.spec_of(opened, trains), untouched)


def _checkpoint_bytes(config: Config, read: Any) -> int:
    from trainer import cluster, hardware, models, run_dir
    from trainer.assembly import Assembly
    from trainer.callbacks.clock import Clock

    alone = hardware.Target(None, None, None, None, None, "the doctor")
    devices = cluster.connect(alone, connect_timeout_secs=config.connect_timeout_secs)
    source = models.find(config.model, config.model_options)
    folder = run_dir.RunDir(config.model_dir)
    return Assembly(config, Clock(time.monotonic()), source, read, folder, devices).replicated.num_bytes()
