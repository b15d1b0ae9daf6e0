"""python -m data.build SOURCE --data_dir=DIR: builds a dataset in TensorFlow Datasets' format.

SOURCE is the name of a file under data/datasets, the name of a TFDS dataset, or the path of raw data:

    digits, mnist, imagenet_resized/8x8   a module with `builder(data_dir)` and NUM_SHARDS, or TFDS's own
    photos/                               class/file.jpg or train/class/file.jpg     sources/image_folder.py
    people.csv, tables/, people.parquet   columns                                    sources/table.py
    mnist.npz                             arrays                                     sources/npz.py
    records/ --features=features.toml     TFRecords, adopted in place                sources/tfrecords.py
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from absl import flags
from absl import logging as absl_logging

from data import catalog, errors

_SHOWN = 5  # faults printed; the audit prints all
EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_DATA = 78

_SHARDING = frozenset({"num_shards", "shard_mib"})
_BEAM = frozenset({"beam_runner", "beam_options"})
_ALWAYS = frozenset({"data_dir"})
_OF_SOURCES = frozenset({"name", "version", "splits", "workers"}) | _SHARDING | _BEAM | _ALWAYS


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


def build(name: str, data_dir: str, settings: Settings | None = None) -> tuple[str, bool]:
    """Builds a dataset; nothing happens where it is already there.

    A killed build leaves nothing that looks finished: TFDS writes into a directory of another name and renames it. For
    gs:// see `staging.py`.

    Args:
      name: of a file under data/datasets, of a TFDS dataset, or path of raw data.
      data_dir: directory in which name/version is made.
      settings: the options.

    Returns:
      Its directory, and whether it was built now.

    Raises:
      UsageError: unknown name, or options that make no sense.
      DataError: a source that is not there or is damaged, or another dataset of that name and version.
      OSError, tf.errors.OpError: `data_dir` cannot be written.
    """
    directory, built = _build(name, data_dir, settings or Settings())
    _describe(directory)
    return directory, built


def _describe(directory: str) -> None:
    """Writes the manifest of a dataset that has none: one reading of what was written, which checks it too.

    Faults that it finds, in records that were adopted rather than written, stand in the manifest and stop a training
    before it begins.
    """
    from data import manifest

    if manifest.read(directory) is not None:
        return
    import tensorflow_datasets as tfds

    from data import review

    info = tfds.builder_from_directory(directory).info
    report = review.audit(info, [], threads=len(os.sched_getaffinity(0)))
    manifest.write(directory, manifest.build(info, report.reports))
    for finding in report.findings[:_SHOWN]:
        print(finding, file=sys.stderr)
    if report.findings:
        print(f"{len(report.findings)} faults. See all: python -m data.audit {directory}", file=sys.stderr)


def _build(name: str, data_dir: str, settings: Settings) -> tuple[str, bool]:
    if settings.beam_options and not settings.beam_runner:
        raise UsageError("--beam_options has no effect without --beam_runner. Give both or none.")
    if settings.beam_runner and settings.workers:
        raise UsageError("--workers has no effect on a Beam pipeline. Leave it out.")
    path = os.path.expanduser(name)
    if name in catalog.buildable():
        settings.check(f"the dataset {name}", _SHARDING | _ALWAYS)
        module = importlib.import_module(f"data.datasets.{name}")
        if not _SHARDING & set(settings.given()):
            settings = dataclasses.replace(settings, num_shards=module.NUM_SHARDS)
        return _prepare(module.builder, data_dir, settings)
    if _exists(path):
        return _build_path(path, data_dir, settings)
    if name.startswith((".", "~", "/")) or catalog.is_remote(name) or name.endswith((".csv", ".parquet", ".npz")):
        raise errors.DataError(f"There is no file or directory {name}. Check the path.")
    return _build_named(name, data_dir, settings)


def _exists(path: str) -> bool:
    if not catalog.is_remote(path):
        return os.path.exists(path)
    from etils import epath

    return bool(epath.Path(path).exists())


def _build_named(name: str, data_dir: str, settings: Settings) -> tuple[str, bool]:
    """A dataset that TFDS knows how to build."""
    import tensorflow_datasets as tfds

    known = tfds.list_builders(with_community_datasets=False)
    first = re.split(r"[/:]", name)[0]
    if first not in known:
        # Ours first: a slip in a short name has a neighbour among TFDS's thousand.
        guess = catalog.nearest(first, catalog.buildable()) or catalog.nearest(first, known)
        raise UsageError(
            f"Unknown dataset {name!r}{guess}. Can be built: {', '.join(catalog.buildable())}, any dataset of TFDS, "
            "or the path of raw data."
        )
    settings.check(f"the TFDS dataset {name}", _SHARDING | _BEAM | _ALWAYS)

    def make(data_dir: str) -> Any:
        try:
            return tfds.builder(name, data_dir=data_dir)
        except (ValueError, AssertionError, tfds.core.registered.DatasetNotFoundError) as error:  # no such version
            raise UsageError(f"TFDS cannot build {name!r}: {error}") from error

    try:
        return _prepare(make, data_dir, settings)
    except AssertionError as error:  # raw files that have to be fetched by hand
        raise errors.DataError(f"TFDS cannot build {name!r}: {error}") from error


def _build_path(path: str, data_dir: str, settings: Settings) -> tuple[str, bool]:
    """A dataset from raw data."""
    from data.datasets.sources import builder as builders
    from data.datasets.sources import kinds, tfrecords
    from data.datasets.sources import source as sources

    kind: Any = tfrecords if settings.filename_template else kinds.of(path)
    settings.check(f"a source of kind {kind.KIND}", kind.OPTIONS | (frozenset() if kind is tfrecords else _OF_SOURCES))
    if kind is tfrecords:
        if settings.features is None:
            raise UsageError(f"{path} holds TFRecords: tell what is in them by --features=FILE.")
        built = tfrecords.adopt(
            path, settings.features, label=settings.label, template=settings.filename_template, name=settings.name
        )
        return path, built
    given = {name: value for name, value in settings.given().items() if name in kind.OPTIONS}
    try:
        plan = builders.Plan(
            name=settings.name or _default_name(path),
            version=settings.version or "1.0.0",
            fractions=sources.Splits.parse(settings.splits) if settings.splits else sources.Splits(),
            workers=settings.workers or len(os.sched_getaffinity(0)),
            options=sources.Options(**given),
            sharding={name: value for name, value in settings.given().items() if name in _SHARDING},
        )
    except errors.DataError as error:
        raise UsageError(str(error)) from error
    source = kind(path, plan.options)
    if source.own_splits and settings.splits:
        raise UsageError(f"{path} comes with splits of its own, {', '.join(source.own_splits)}: leave --splits out.")
    for note in source.notes:
        print(note, file=sys.stderr)
    builder_class = builders.BeamSourceBuilder if settings.beam_runner else builders.SourceBuilder
    make = functools.partial(builder_class, source, plan)
    builder = make(data_dir)
    builder.check_same()
    with builders.alone(builder):
        return _prepare(make, data_dir, settings)


def _default_name(path: str) -> str:
    """people.csv -> people; My Photos/ -> my_photos."""
    stem = os.path.basename(os.path.abspath(path)).split(".")[0].lower()
    return re.sub(r"\W+", "_", stem).strip("_")


def _prepare(make: Callable[[str], Any], data_dir: str, settings: Settings) -> tuple[str, bool]:
    """Lets TFDS do it, by the builder that `make` makes for a data_dir, unless it is done."""
    import tensorflow_datasets as tfds

    from data import shard_writer, staging

    builder = make(data_dir)
    directory = os.fspath(builder.data_path)
    if catalog.is_there(directory):
        return directory, False
    if min(settings.num_shards or 1, settings.shard_mib or 1) <= 0:
        raise UsageError(f"Shards must be more than 0. Received: {settings.num_shards} of {settings.shard_mib} MiB.")
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()  # in a log file a bar is a hundred lines
    sharding = {name: value for name, value in settings.given().items() if name in _SHARDING}
    config = shard_writer.DownloadConfig(
        # A copy from TFDS's bucket would come in shards of its own.
        try_download_gcs=False,
        shards=shard_writer.Shards(**sharding),
        **_beam(settings, directory),
    )
    if catalog.is_remote(directory):
        staging.prepare(make, data_dir, directory, config)
    else:
        builder.download_and_prepare(download_config=config)
    return directory, True


def _beam(settings: Settings, directory: str) -> dict[str, Any]:
    """The arguments for Beam, if it is asked for."""
    if settings.beam_runner is None:
        return {}
    if importlib.util.find_spec("apache_beam") is None:
        raise UsageError(
            "Apache Beam is not installed. It needs older packages than constraints.txt has: give it an environment "
            "of its own, pip install '.[cpu,beam]' there, without constraints. For Dataflow see setup.cfg."
        )
    if settings.beam_runner == "DataflowRunner" and not catalog.is_remote(directory):
        raise UsageError(f"Dataflow's machines cannot write to {directory}. Name a bucket: --data_dir=gs://BUCKET/DIR.")
    from apache_beam.options import pipeline_options

    given = [f"--{option}" for option in (settings.beam_options or "").split(",") if option]
    return {"beam_runner": settings.beam_runner, "beam_options": pipeline_options.PipelineOptions(flags=given)}


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    options = _options()
    usage = (
        "usage: python -m data.build SOURCE [--data_dir=DIR] [--help]\n"
        f"SOURCE is one of: {', '.join(catalog.buildable())}; the name of a TFDS dataset; the path of raw data"
    )
    try:
        names = options(argv)[1:]
    except flags.Error as error:
        print(f"{error}\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    if options.help:
        print(f"{usage}\n{options.get_help()}")
        return EXIT_DONE
    if len(names) != 1:
        print(f"Name one source. Received: {' '.join(names) or 'none'}.\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    name, data_dir = names[0], os.path.expanduser(options.data_dir)
    _quieten()
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "TensorFlow is not installed. Install one of its builds: pip install '.[cpu]', gpu or tpu.", file=sys.stderr
        )
        return EXIT_DATA
    from data import faults

    try:
        # TFDS prints that it downloads, whatever it does; its progress bar goes to stderr.
        with contextlib.redirect_stdout(None), faults.explained():
            directory, built = build(name, data_dir, _settings(options))
    except (errors.DataError, OSError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, errors.StorageError):
            return EXIT_RETRY
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_DATA
    print(f"{name} {'is built' if built else 'is already there'}: {directory}")
    return EXIT_DONE


def _options() -> flags.FlagValues:
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
    text("label", "Column or array to predict. Default: label of a table, y of an .npz.")
    words = "Whether the label's whole numbers are classes or quantities."
    flags.DEFINE_enum("label_kind", None, ["class", "number"], words, flag_values=values)
    text("key", "Column or array that names each example; by default its content does.")
    flags.DEFINE_list("categorical", None, "Columns of names, though they look like numbers.", flag_values=values)
    flags.DEFINE_list("exclude", None, "Columns or arrays to leave out.", flag_values=values)
    words = "Rows that lack a value: an error, or left out. Default: error."
    flags.DEFINE_enum("missing", None, ["error", "drop"], words, flag_values=values)
    flags.DEFINE_integer("channels", None, "Of images, 1 or 3. Default: 3.", flag_values=values)
    text("features", "File (TOML or JSON) that tells what TFRecords hold; see data/datasets/sources/tfrecords.py.")
    text("filename_template", "Of TFRecords, e.g. {SPLIT}-{SHARD_X_OF_Y}.rec; by default it is found.")
    return values


def _settings(options: flags.FlagValues) -> Settings:
    values: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    if not options["data_dir"].present:
        values["data_dir"] = None
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Settings(**{**values, **lists})


def _quieten() -> None:
    """Leaves TFDS its progress bar; log lines of libraries tell a user nothing he can act on."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
    absl_logging.set_verbosity(absl_logging.ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
