"""What is read, and how."""

import dataclasses

from trainer.options.field import TRAINING, TRYING, option


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What is read, and how."""

    dataset: str = option(
        "",
        "dataset in TensorFlow Datasets' format: a name in data_dir, or a directory; for measuring without reading "
        "files: synthetic (images of image_size, num_classes; for language_model tokens of sequence_length), or "
        "synthetic:NAME, of the shapes of NAME",
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
    adapt_examples: int = option(
        100_000,
        "training examples, the first ones of the order, from which Normalization layers take mean and variance before "
        "the first step; all, where there are no more",
        group="data",
        minimum=1,
        modes=(*TRAINING, *TRYING),
    )
    sequence_length: int | None = option(
        None, "positions of a synthetic record of tokens, of num_classes different ones", group="data", minimum=1
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
