"""python -m data.build SOURCE --data_dir=DIR: builds a dataset in TensorFlow Datasets' format.

SOURCE is the name of a file under data/datasets, the name of a TFDS dataset, or the path of raw data:

    digits, mnist, imagenet_resized/8x8   a module with `builder(data_dir)` and NUM_SHARDS, or TFDS's own
    photos/                               class/file.jpg or train/class/file.jpg     sources/image_folder.py
    people.csv, tables/, people.parquet   columns                                    sources/table.py
    mnist.npz                             arrays                                     sources/npz.py
    corpus/ --tokenizer=bytes             .txt, .jsonl or .parquet, as tokens        sources/text.py
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

from data import build_flags, catalog, errors
from data.build_flags import Settings, UsageError

_SHOWN = 5  # faults printed; the audit prints all
EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_DATA = 78


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

    from data import findings, review

    info = tfds.builder_from_directory(directory).info
    report = review.audit(info, [], threads=len(os.sched_getaffinity(0)))
    manifest.write(directory, manifest.build(info, report.reports))
    faults = [finding for finding in report.findings if finding.kind not in findings.HARMLESS]
    for fault in faults[:_SHOWN]:
        print(fault, file=sys.stderr)
    repeated = len(report.findings) - len(faults)
    what = [f"{len(faults):,} faults"] if faults else []
    what += [f"{repeated:,} records that repeat an earlier one, which may be meant so"] if repeated else []
    if what:
        print(f"{', '.join(what)}. See all: python -m data.audit {directory}", file=sys.stderr)


def _build(name: str, data_dir: str, settings: Settings) -> tuple[str, bool]:
    if settings.beam_options and not settings.beam_runner:
        raise UsageError("--beam_options has no effect without --beam_runner. Give both or none.")
    if settings.beam_runner and settings.workers:
        raise UsageError("--workers has no effect on a Beam pipeline. Leave it out.")
    path = os.path.expanduser(name)
    if name in catalog.buildable():
        settings.check(f"the dataset {name}", build_flags.SHARDING | build_flags.ALWAYS)
        module = importlib.import_module(f"data.datasets.{name}")
        if not build_flags.SHARDING & set(settings.given()):
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
    settings.check(f"the TFDS dataset {name}", build_flags.SHARDING | build_flags.BEAM | build_flags.ALWAYS)

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

    kind: Any = tfrecords if settings.filename_template else kinds.of(path, as_text=settings.tokenizer is not None)
    settings.check(
        f"a source of kind {kind.KIND}", kind.OPTIONS | (frozenset() if kind is tfrecords else build_flags.OF_SOURCES)
    )
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
            options=kind.OPTIONS_TYPE(**given),
            sharding={name: value for name, value in settings.given().items() if name in build_flags.SHARDING},
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
        directory, built = _prepare(make, data_dir, settings)
    remark = source.remark(directory) if built else ""
    if remark:
        print(remark, file=sys.stderr)
    return directory, built


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
    sharding = {name: value for name, value in settings.given().items() if name in build_flags.SHARDING}
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
    options = build_flags.define()
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
            directory, built = build(name, data_dir, build_flags.settings(options))
    except (errors.DataError, OSError) as error:
        print(error, file=sys.stderr)
        if isinstance(error, errors.StorageError):
            return EXIT_RETRY
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_DATA
    print(f"{name} {'is built' if built else 'is already there'}: {directory}")
    return EXIT_DONE


def _quieten() -> None:
    """Leaves TFDS its progress bar; log lines of libraries tell a user nothing he can act on."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
    absl_logging.set_verbosity(absl_logging.ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
