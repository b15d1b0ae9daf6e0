"""The command line of `python -m data.build`: what may be asked for, once, and what of it has an effect on what."""

import dataclasses
from typing import Any

from absl import flags

from data import catalog, errors

SHARDING = frozenset({"num_shards", "shard_mib"})
BEAM = frozenset({"beam_runner", "beam_options"})
ALWAYS = frozenset({"data_dir"})
OF_SOURCES = frozenset({"name", "version", "splits", "workers"}) | SHARDING | BEAM | ALWAYS


class UsageError(errors.DataError):
    """A command line that makes no sense, whatever the data."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for: the flags of the same names (--help tells of each), None where not given.

    `data_dir` is here only to tell whether it was given.
    """

    data_dir: str | None = None
    name: str | None = None
    version: str | None = None
    splits: str | None = None
    shard_mib: float | None = None
    num_shards: int | None = None
    workers: int | None = None
    beam_runner: str | None = None
    beam_options: str | None = None
    label: str | None = None
    label_kind: str | None = None
    key: str | None = None
    categorical: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    missing: str | None = None
    channels: int | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    text: str | None = None
    features: str | None = None
    filename_template: str | None = None

    def given(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check(self, what: str, allowed: frozenset[str]) -> None:
        """Raises UsageError if one was given that has no effect."""
        idle = sorted(set(self.given()) - allowed)
        if idle:
            raise UsageError(f"--{idle[0]} has no effect on {what}. Leave it out.")


def define() -> flags.FlagValues:
    """Flags of this command alone: absl's global ones belong to the trainer."""
    values = flags.FlagValues()

    def text(name: str, words: str, default: str | None = None) -> None:
        flags.DEFINE_string(name, default, words, flag_values=values)

    text("data_dir", "Directory in which NAME/VERSION is made.", catalog.default_data_dir())
    flags.DEFINE_boolean("help", False, "Show this help.", flag_values=values)
    text("name", "Name of the dataset; by default that of the file or directory.")
    text("version", "Version of the dataset. Default: 1.0.0.")
    text("splits", "Fractions, by a hash of each key. Default: train=0.8,validation=0.1,test=0.1.")
    flags.DEFINE_float("shard_mib", None, "Size in MiB that no shard should exceed. Default: 128.", flag_values=values)
    flags.DEFINE_integer("num_shards", None, "Shards of each split; default: a power of two.", flag_values=values)
    flags.DEFINE_integer("workers", None, "Processes that write. Default: one for each core.", flag_values=values)
    text("beam_runner", "Build with Apache Beam: DirectRunner, DataflowRunner, ...")
    text("beam_options", "Options of the Beam pipeline, e.g. project=my-project,region=europe-west4.")
    text("label", "Column, array or field to predict. Default: label of a table, y of an .npz, no field of texts.")
    words = "Whether the label's whole numbers are classes or quantities."
    flags.DEFINE_enum("label_kind", None, ["class", "number"], words, flag_values=values)
    text("key", "Column or array that names each example; by default its content does.")
    flags.DEFINE_list("categorical", None, "Columns of names, though they look like numbers.", flag_values=values)
    flags.DEFINE_list("exclude", None, "Columns or arrays to leave out.", flag_values=values)
    words = "Rows that lack a value: an error, or left out. Default: error."
    flags.DEFINE_enum("missing", None, ["error", "drop"], words, flag_values=values)
    flags.DEFINE_integer("channels", None, "Of images, 1 or 3. Default: 3.", flag_values=values)
    text("tokenizer", "Makes texts to tokens: bytes, or a SentencePiece model (FILE.model).")
    words = "Tokens of a record. Documents are packed into it; with --label, each text is cut or filled up to it."
    flags.DEFINE_integer("sequence_length", None, words, flag_values=values)
    text("text", "Field or column that holds the texts of .jsonl or .parquet. Default: text.")
    text("features", "File (TOML or JSON) that tells what TFRecords hold; see data/datasets/sources/tfrecords.py.")
    text("filename_template", "Of TFRecords, e.g. {SPLIT}-{SHARD_X_OF_Y}.rec; by default it is found.")
    return values


def settings(options: flags.FlagValues) -> Settings:
    """What was asked for, of flags that were read."""
    values: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    if not options["data_dir"].present:
        values["data_dir"] = None
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Settings(**{**values, **lists})
