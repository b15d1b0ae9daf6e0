"""The input of a run: the dataset opened, checked and repaired before anything is paid for, and its batches.

What `data/` offers as functions of a dataset is tied here to the options of one run. Everything above it asks this
object for batches and knows nothing of files, shards or quarantine.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import numpy as np
import tensorflow as tf

from data import catalog, pipeline, quarantine, records, review, service, stages, synthetic
from data.errors import DataError
from data.order import Order
from data.spec import Spec
from trainer import augmentation, tasks
from trainer.config import FIELDS, Config
from trainer.errors import ConfigError
from trainer.plan import Plan

TRAINING_MODES = ("train", "train_and_eval")
EVALUATING_MODES = ("eval", "train_and_eval")
PROFILING = "profile_input"
SWEEPING = "sweep_lr"
PARITY = "parity"
PREFLIGHT = "preflight"
# They need no hardware but this machine's CPU, whatever the flags of the run that they take name.
REHEARSING_MODES = (PARITY, PREFLIGHT)
# They keep nothing that they train.
TRYING_MODES = (PROFILING, SWEEPING, *REHEARSING_MODES)
# Options that say nothing where no record is read.
READING_OPTIONS = ("shuffle_mib", "corrupt_records", "max_corrupt_records", "data_service", "cache", "cache_dir")

_D = TypeVar("_D", pipeline.Dataset, synthetic.Dataset)


@dataclasses.dataclass(frozen=True)
class _Inputs(Generic[_D]):
    """What is the same with and without files.

    spec: an example as it reaches the device.
    repaired: what is read in place of damaged shards of the training split, and what it leaves out.
    cached: path of a training shard -> path of its copy.
    services: machines that compute the training batches (`service.read`); none: this one does.
    """

    config: Config
    dataset: _D
    spec: Spec
    repaired: quarantine.Prepared
    cached: Mapping[str, str] = dataclasses.field(default_factory=dict)
    services: tuple[str, ...] = ()

    @property
    def num_train_examples(self) -> int:
        """Examples of the training split; 0 where the mode does not read it."""
        return self._count(self.config.train_split, (*TRAINING_MODES, *TRYING_MODES))

    @property
    def num_eval_examples(self) -> int:
        """Examples of the evaluation split; 0 where the mode does not read it."""
        return self._count(self.config.eval_split, EVALUATING_MODES)

    def _count(self, split: str, modes: tuple[str, ...]) -> int:
        return self.dataset.split(split).num_examples if self.config.mode in modes else 0

    def identity(self) -> str:
        """What decides which record stands where in training: a run goes on only with the same."""
        split = self.dataset.split(self.config.train_split)
        shards = f"{split.num_examples} examples in {len(split.paths)} shards"
        return f"{self.dataset.name} {self.config.train_split}: {shards}, {self.repaired.identity()}"

    def describe(self) -> str:
        """Name and splits, for people."""
        return f"{self.dataset.name}: " + ", ".join(f"{count:,} {name}" for name, count in self.dataset.splits.items())

    def reseeded(self, seed: int) -> Self:
        """The same in another order."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, seed=seed))

    def _share(self, plan: Plan, context: tf.distribute.InputContext) -> dict[str, Any]:
        return {
            "global_batch_size": plan.global_batch_size,
            "per_replica_batch_size": plan.per_replica_batch_size,
            "host_index": context.input_pipeline_id,
            "num_hosts": context.num_input_pipelines,
            "image_size": self.config.image_size,
        }


class Inputs(_Inputs[pipeline.Dataset]):
    """The splits that a run reads, ready to be read."""

    @property
    def train_shards(self) -> list[str]:
        """Paths of the files that training reads, without those that a repaired copy replaces."""
        shards = self.dataset.split(self.config.train_split).filled
        return [path for path, _ in shards if path not in self.repaired.copies]

    @property
    def _copies(self) -> dict[str, str]:
        return {**self.cached, **self.repaired.copies}

    def describe_reading(self, plan: Plan, num_hosts: int) -> str:
        """How hosts share the reading of the training split, for people."""
        share = records.Share(plan.global_batch_size, plan.per_replica_batch_size, 0, num_hosts)
        return share.describe(self._order(plan))

    def records_of(self, plan: Plan, step: int) -> list[tuple[str, int]]:
        """Which records a training step reads, by row of the global batch: path of the shard, number in it."""
        paths = [path for path, _ in self.dataset.split(self.config.train_split).filled]
        [ids] = self._order(plan).record_ids(step, 1).numpy()  # [B, 2]
        return [(paths[shard], int(record)) for shard, record in ids]

    def _order(self, plan: Plan) -> Order:
        return pipeline.plan_order(
            self.dataset,
            self.config.train_split,
            global_batch_size=plan.global_batch_size,
            seed=self.config.seed,
            shuffle_mib=self.config.shuffle_mib,
        )

    def train_batches(self, plan: Plan, context: tf.distribute.InputContext, start_step: int) -> tf.data.Dataset:
        """This host's batches from step `start_step` on, without end: what `augmentation.prepare` makes (x, y) of."""
        batches = functools.partial(
            pipeline.train_batches,
            self.dataset,
            self.config.train_split,
            seed=self.config.seed,
            shuffle_mib=self.config.shuffle_mib,
            start_step=start_step,
            copies=self._copies,
            augmentation=augmentation.of(self.config),
            **self._share(plan, context),
        )
        if self.services:
            return service.read(self.services, lambda k, num_services: batches(part=(k, num_services)))
        return batches()

    def is_first_epoch(self, plan: Plan, steps: int) -> np.ndarray:
        """[steps, B] bool: which rows of the first batches are of the first epoch; where it ends, rows of both mix."""
        order = self._order(plan)
        stream, place = np.divmod(np.arange(plan.global_batch_size), order.block)
        return order.epoch_at(stream, np.arange(steps)[:, np.newaxis] * order.block + place) == 0

    def train_stages(self, plan: Plan, context: tf.distribute.InputContext) -> list[stages.Stage]:
        """The stages of this host's pipeline, for measuring; orders depend on the seeds that these are given."""
        return stages.train_stages(
            self.dataset,
            self.config.train_split,
            shuffle_mib=self.config.shuffle_mib,
            copies=self._copies,
            augmentation=augmentation.of(self.config),
            **self._share(plan, context),
        )

    def eval_batches(self, plan: Plan, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """This host's batches of `(x, y, mask)`, pass after pass without end.

        Without end, so that tf.distribute need not ask all workers at each step whether one has run out.
        """
        return pipeline.eval_batches(self.dataset, self.config.eval_split, **self._share(plan, context)).repeat()

    def local_paths(self) -> Mapping[str, str]:
        """Option -> path on this machine, which a worker on another one could not read."""
        directory = str(self.dataset.directory)
        return {} if catalog.is_remote(directory) else {"dataset": directory}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns TensorFlow's error about a record into one that names file, record and byte.

        Raises:
            DataError: a record that is damaged, of another schema, or missing.
        """
        try:
            yield
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            splits = (self.config.train_split, self.config.eval_split)
            found = (
                review.explain(self.dataset.info, split, error) for split in splits if split in self.dataset.splits
            )
            message = next(filter(None, found), None)
            if message is None:
                raise
            raise DataError(message) from error


class SyntheticInputs(_Inputs[synthetic.Dataset]):
    """Examples without files, see `data.synthetic`."""

    train_shards: tuple[str, ...] = ()

    def describe_reading(self, plan: Plan, num_hosts: int) -> str:
        """Nothing is read."""
        return "nothing: examples are made up"

    def records_of(self, plan: Plan, step: int) -> list[tuple[str, int]]:
        """None."""
        return []

    def train_batches(self, plan: Plan, context: tf.distribute.InputContext, start_step: int) -> tf.data.Dataset:
        """This host's batches, as those of records."""
        return synthetic.train_batches(
            self.dataset,
            self.config.train_split,
            seed=self.config.seed,
            start_step=start_step,
            augmentation=augmentation.of(self.config),
            **self._share(plan, context),
        )

    def is_first_epoch(self, plan: Plan, steps: int) -> np.ndarray:
        """[steps, B] bool: all, as no example is another one the second time."""
        return np.ones([steps, plan.global_batch_size], bool)

    def train_stages(self, plan: Plan, context: tf.distribute.InputContext) -> list[stages.Stage]:
        """The only stage there is."""
        made = stages.Stage(stages.GENERATE, lambda seed: self.train_batches(plan, context, 0), 1)
        return [made]

    def eval_batches(self, plan: Plan, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """This host's batches of `(x, y, mask)`, pass after pass without end."""
        return synthetic.eval_batches(self.dataset, self.config.eval_split, **self._share(plan, context)).repeat()

    def local_paths(self) -> Mapping[str, str]:
        """None."""
        return {}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """There is nothing to explain."""
        yield


AnyInputs = Inputs | SyntheticInputs


def first_examples(inputs: AnyInputs, plan: Plan, count: int) -> tf.data.Dataset:
    """(x, y) of the first `count` examples of the training order, each once, on this host all of them.

    In batches of any size, 0 too; `count` is at most the number of examples.
    """
    steps = -(-count // plan.global_batch_size)
    first = inputs.is_first_epoch(plan, steps).ravel()
    wanted = (first & (first.cumsum() <= count)).reshape(-1, plan.per_replica_batch_size)
    alone = dataclasses.replace(inputs, services=())
    batches = alone.train_batches(plan, tf.distribute.InputContext(), 0)

    def cut(batch: tuple, wanted: tf.Tensor) -> tuple:
        return tf.nest.map_structure(lambda values: tf.boolean_mask(values, wanted), batch)

    return tf.data.Dataset.zip((batches, tf.data.Dataset.from_tensor_slices(wanted))).map(cut)


def open_inputs(config: Config, cache_dir: str) -> AnyInputs:
    """Opens and checks what `config` reads.

    Args:
        config: of the run.
        cache_dir: where repaired copies of damaged shards are put; hosts may share it.

    Raises:
        DataError: a dataset that is missing, damaged or of the wrong shape.
        ConfigError: options that do not fit the dataset.
    """
    if catalog.is_synthetic(config.dataset):
        return _open_synthetic(config)
    dataset = pipeline.open_dataset(config.dataset, config.data_dir)
    spec = spec_of(dataset, config)
    repaired = quarantine.Prepared({}, [], "")
    if config.mode in (*TRAINING_MODES, *TRYING_MODES) and config.mode != PREFLIGHT:  # which reads no record
        dataset.split(config.train_split)
        repaired = quarantine.prepare(
            dataset.info,
            config.train_split,
            skip=config.corrupt_records == "skip",
            max_records=config.max_corrupt_records,
            cache_dir=cache_dir,
            threads=os.cpu_count() or 1,
        )
    if config.mode in EVALUATING_MODES:
        # Never repaired: every example counts exactly once.
        dataset.split(config.eval_split)
        quarantine.prepare(dataset.info, config.eval_split, skip=False, max_records=0, cache_dir="", threads=1)
    return Inputs(config, dataset, spec, repaired)


def _open_synthetic(config: Config) -> SyntheticInputs:
    # Of one that is like no other not even a description is read.
    names = READING_OPTIONS if catalog.described_by(config.dataset) else (*READING_OPTIONS, "data_dir")
    given = [name for name in names if getattr(config, name) != FIELDS[name].default]
    if given:
        raise ConfigError(
            f"no record of --dataset={config.dataset} is read, so these have no effect; leave them out. "
            f"Received: {', '.join(given)}"
        )
    dataset = synthetic.open_dataset(config.dataset, config.data_dir, config.num_classes, config.sequence_length)
    return SyntheticInputs(config, dataset, spec_of(dataset, config), quarantine.Prepared({}, [], ""))


def spec_of(dataset: pipeline.Dataset | synthetic.Dataset, config: Config) -> Spec:
    """What a run trains on: the dataset's spec with the run's classes and task.

    Raises:
        ConfigError: num_classes, task or augmentation that the data cannot have.
    """
    spec = dataset.spec(config.image_size)
    if config.num_classes not in (None, spec.label.below):
        if spec.label.below is not None or spec.label.dtype != "int32":
            raise ConfigError(
                f"the label of {dataset.name} is not one class; leave out num_classes. "
                f"Received: {config.num_classes}, label {spec.label}"
            )
        if spec.num_classes is not None and config.num_classes < spec.num_classes:
            raise ConfigError(
                f"num_classes must hold every class of {dataset.name}, which has {spec.num_classes}. "
                f"Received: {config.num_classes}"
            )
        spec = dataclasses.replace(spec, num_classes=config.num_classes)
    spec = dataclasses.replace(spec, task=tasks.choose(config.task, spec))
    augmentation.check(config, spec)
    return spec
