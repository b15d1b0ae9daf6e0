"""python -m data.build NAME --data_dir=DIR: builds a dataset in TensorFlow Datasets' format.

Every file under data/datasets is one NAME. Its module holds `builder(data_dir)`, which returns a
tfds.core.DatasetBuilder, and NUM_SHARDS, the number of files per split.
"""

import contextlib
import importlib.util
import os
import sys
from typing import Any

from absl import flags
from absl import logging as absl_logging

from data import catalog, errors

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_DATA = 78


def build(name: str, data_dir: str) -> tuple[str, bool]:
    """Builds a dataset; nothing happens where it is already there.

    A killed build leaves nothing that looks finished: TFDS writes into a directory of another name and renames it.

    Args:
      name: one of `catalog.buildable()`.
      data_dir: directory in which name/version is made.

    Returns:
      Its directory, and whether it was built now.

    Raises:
      DataError: unknown name, or its source is not there.
      OSError: `data_dir` cannot be written.
    """
    names = catalog.buildable()
    if name not in names:
        raise errors.DataError(
            f"Unknown dataset {name!r}{catalog.nearest(name, names)}. Can be built: {', '.join(names)}."
        )
    module = importlib.import_module(f"data.datasets.{name}")
    builder: Any = module.builder(data_dir)
    directory = os.fspath(builder.data_path)
    if builder.data_path.exists():
        return directory, False

    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()  # in a log file a bar is a hundred lines
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=module.NUM_SHARDS))
    return directory, True


def main(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    options = _options()
    usage = f"usage: python -m data.build NAME [--data_dir=DIR]\nNAME is one of: {', '.join(catalog.buildable())}"
    try:
        names = options(argv)[1:]
    except flags.Error as error:
        print(f"{error}\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    if options.help:
        print(f"{usage}\n{options.get_help()}")
        return EXIT_DONE
    if len(names) != 1:
        print(f"Name one dataset. Received: {' '.join(names) or 'none'}.\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    name, data_dir = names[0], os.path.expanduser(options.data_dir)
    _quieten()
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "TensorFlow is not installed. Install one of its builds: pip install '.[cpu]', gpu or tpu.", file=sys.stderr
        )
        return EXIT_DATA
    try:
        # TFDS prints that it downloads, whatever it does; its progress bar goes to stderr.
        with contextlib.redirect_stdout(None):
            directory, built = build(name, data_dir)
    except (errors.DataError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_DATA if name in catalog.buildable() else EXIT_USAGE
    print(f"{name} {'is built' if built else 'is already there'}: {directory}")
    return EXIT_DONE


def _options() -> flags.FlagValues:
    """Flags of this command alone: absl's global ones belong to the trainer."""
    values = flags.FlagValues()
    default = catalog.default_data_dir()
    flags.DEFINE_string("data_dir", default, "Directory in which NAME/VERSION is made.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this help.", flag_values=values)
    return values


def _quieten() -> None:
    """Leaves TFDS its progress bar; log lines of libraries tell a user nothing he can act on."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
    absl_logging.set_verbosity(absl_logging.ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
