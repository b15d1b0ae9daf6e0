"""The training pipeline up to and including each of its stages, for measuring where its time goes.

    read ─▶ shuffle ─▶ parse ─▶ decode, crop and augment
                                 = pipeline.train_batches
Shuffling and batching are one stage: rows of a batch are picked out of the shuffle window.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from data import augment, order, parse, pipeline, records

READ, SHUFFLE, PARSE = "read", "shuffle", "parse"
# The only stage of a dataset without files.
GENERATE = "generate"


@dataclasses.dataclass(frozen=True)
class Stage:
    """The pipeline up to and including one stage.

    name: of the stage.
    batches: makes it for a seed of the order: a tf.data or distributed dataset without end, each element of tensors
      [examples, ...].
    window: elements from one shuffle window.
    """

    name: str
    batches: Callable[[int], Iterable]
    window: int


def train_stages(
    dataset: pipeline.Dataset,
    split: str = "train",
    *,
    global_batch_size: int,
    per_replica_batch_size: int,
    shuffle_mib: float,
    host_index: int = 0,
    num_hosts: int = 1,
    image_size: int | None = None,
    copies: Mapping[str, str] | None = None,
    augmentation: augment.Augmentation = augment.NONE,
) -> list[Stage]:
    """The stages of `train_batches` with the same arguments, the last one being all of it.

    Elements are serialized records [records] string after "read", [b] string after "shuffle", features as stored by key
    after "parse", what `pipeline.train_batches` yields in the end.

    Raises:
      DataError: as `pipeline.train_batches`.
    """
    share = records.Share(global_batch_size, per_replica_batch_size, host_index, num_hosts)
    rows = {**dataclasses.asdict(share), "image_size": image_size}
    fields = parse.select_fields(dataset.info, image_size)
    shards, replicas = dataset.split(split).replaced(copies or {}), share.num_rows // per_replica_batch_size

    def planned(seed: int) -> order.Order:
        return pipeline.plan_order(
            dataset, split, global_batch_size=global_batch_size, seed=seed, shuffle_mib=shuffle_mib
        )

    def read(seed: int) -> tf.data.Dataset:
        return records.unshuffled_records(shards, planned(seed), share).with_options(pipeline.options())

    def picked(finish: Callable[[tf.Tensor], Any]) -> Callable[[int], tf.data.Dataset]:
        def make(seed: int) -> tf.data.Dataset:
            made = records.training_records(
                shards, planned(seed), share, lambda batch, step, row: finish(batch), records.cores()
            )
            return made.prefetch(2 * replicas).with_options(pipeline.options())

        return make

    def whole(seed: int) -> tf.data.Dataset:
        return pipeline.train_batches(
            dataset, split, seed=seed, shuffle_mib=shuffle_mib, copies=copies, augmentation=augmentation, **rows
        )

    first, end = share.streams(planned(0))
    window = planned(0).steps_per_window * replicas
    return [
        Stage(READ, read, planned(0).pieces * (end - first)),
        Stage(SHUFFLE, picked(lambda batch: batch), window),
        Stage(PARSE, picked(parse.stored_parser(fields, per_replica_batch_size)), window),
        Stage(_decoding(fields, augmentation), whole, window),
    ]


def _decoding(fields: parse.Fields, augmentation: augment.Augmentation) -> str:
    """What happens to the features of a dataset after parsing."""
    done = ["decode"]
    if augmentation.crop_area is not None or augmentation.crop_padding or parse.crops_photographs(fields):
        done.append("crop")
    elif any(field.resized for field in fields.inputs.values()):
        done.append("resize")
    if augmentation.rand_augment:
        done.append("augment")
    return " and ".join(filter(None, [", ".join(done[:-1]), done[-1]]))
