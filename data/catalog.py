"""From the name of a dataset to its directory, without TensorFlow (a gs:// path needs it, and only then imports it).

A prepared dataset is a directory in TensorFlow Datasets' format: it holds dataset_info.json, features.json and shards.
TFDS lays them out as DATA_DIR/name/version or DATA_DIR/name/config/version.
"""

import difflib
import os
import pathlib
import re
from collections.abc import Iterator

from etils import epath

from data import errors

INFO_FILE = "dataset_info.json"  # a directory with one is a dataset
# Any other name is no finished version: TFDS builds in "incomplete.XXXXXX_1.0.0" and renames it at the end.
_VERSION = re.compile(r"\d+\.\d+\.\d+")
# Batches without files (synthetic.py): "synthetic", or "synthetic:NAME" with the shapes of NAME.
SYNTHETIC = "synthetic"
_BUILDERS = pathlib.Path(__file__).parent / "datasets"


def default_data_dir() -> str:
    """Where TFDS itself keeps datasets unless told otherwise: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    return os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")


def is_remote(path: str | None) -> bool:
    """True for a path that needs a network file system, such as gs://bucket/dir."""
    return path is not None and "://" in path


def is_there(directory: str) -> bool:
    """Whether a dataset's directory is there; on gs://, which fills it object by object, whether it is whole."""
    path = epath.Path(directory)
    return bool((path / INFO_FILE if is_remote(directory) else path).exists())


def buildable() -> list[str]:
    """Names that `python -m data.build` can build: the files under data/datasets, found without importing them."""
    return sorted(path.stem for path in _BUILDERS.glob("*.py") if not path.stem.startswith("_"))


def nearest(name: str, names: list[str]) -> str:
    """ " (did you mean X?)" for the name closest to a misspelt one, else the empty string."""
    found = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def is_synthetic(dataset: str) -> bool:
    """True for "synthetic" and "synthetic:NAME"; a directory of that name needs a path, such as ./synthetic."""
    return dataset == SYNTHETIC or dataset.startswith(f"{SYNTHETIC}:")


def described_by(dataset: str) -> str | None:
    """The dataset whose description is needed: itself, NAME of "synthetic:NAME", or None for "synthetic"."""
    if not is_synthetic(dataset):
        return dataset
    return dataset.removeprefix(f"{SYNTHETIC}:") if ":" in dataset else None


def check_local(dataset: str, data_dir: str | None) -> None:
    """Raises DataError as `locate` does, but only about paths on this machine: fit for checks before TensorFlow."""
    needed = described_by(dataset)
    if needed is not None and not is_remote(needed) and not is_remote(data_dir):
        locate(needed, data_dir)


def locate(dataset: str, data_dir: str | None) -> epath.Path:
    """Finds the directory of a prepared dataset.

    Args:
      dataset: "name", "name/config", "name/1.0.0", "name:1.0.0" under `data_dir`, or the path of a directory (of one
        version, or of all versions of a dataset). Without a version the newest is taken.
      data_dir: where datasets are kept; None means `default_data_dir()`.

    Returns:
      The directory that holds dataset_info.json.

    Raises:
      DataError: nothing prepared there; says what is, and how to build it.
    """
    root = epath.Path(os.path.expanduser(data_dir or default_data_dir()))
    places = [epath.Path(os.path.expanduser(dataset))]
    if dataset and not is_remote(dataset):
        places.insert(0, root / dataset.replace(":", "/"))  # an absolute `dataset` replaces the root
    if dataset:
        for place in places:
            found = _newest_version(place)
            if found is not None:
                return found
    raise errors.DataError(_not_found(dataset, root))


def _directories(path: epath.Path) -> list[epath.Path]:
    if not path.is_dir():
        path.exists()  # is_dir takes a bucket that does not answer for no directory; this passes its error on
        return []
    return sorted(child for child in path.iterdir() if child.is_dir())


def _newest_version(path: epath.Path) -> epath.Path | None:
    """`path` itself if it is a version, else the newest version directly below it."""
    if (path / INFO_FILE).exists():
        return path
    versions = [child for child in _directories(path) if _VERSION.fullmatch(child.name)]
    versions = [version for version in versions if (version / INFO_FILE).exists()]
    return max(versions, key=lambda version: tuple(map(int, version.name.split("."))), default=None)


def _prepared(root: epath.Path) -> Iterator[str]:
    """Names of what is prepared under `root`: "name" or "name/config"."""
    for child in _directories(root):
        if _newest_version(child) is not None:
            yield child.name
            continue
        configs = (config for config in _directories(child) if _newest_version(config) is not None)
        yield from (f"{child.name}/{config.name}" for config in configs)


def _not_found(dataset: str, root: epath.Path) -> str:
    if is_remote(dataset):
        return (
            f"No dataset {dataset!r}: neither it nor a version below it holds {INFO_FILE}. Mend the path, or build "
            f"one: python -m data.build SOURCE --data_dir={os.path.dirname(dataset.rstrip('/'))}"
        )
    there = list(_prepared(root))
    holds = f"{root} holds {', '.join(there)}" if there else f"{root} holds no dataset"
    name = re.split(r"[/:]", dataset)[0]
    guess = nearest(dataset, there)
    if name in buildable():
        remedy = f"Build it: python -m data.build {name} --data_dir={root}"
    else:
        guess = guess or nearest(name, buildable())
        remedy = (
            "Give the name of one of these, the path of a directory in TFDS format, or build it: "
            f"python -m data.build NAME --data_dir={root} ({', '.join(buildable())}), "
            f"or tfds build NAME --data_dir={root}"
        )
    return f"No dataset {dataset!r}{guess}: {holds}. {remedy}"
