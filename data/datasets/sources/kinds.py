"""Which kind of source lies at a path."""

from typing import Any

from etils import epath

from data import errors
from data.datasets.sources import image_folder, npz, table, tfrecords


def of(path: str) -> Any:
    """The class, or for TFRecords the module, for what lies at a path: by suffix, or by what a directory holds.

    Raises:
      DataError: none reads it.
    """
    place = epath.Path(path)
    if place.is_dir():
        names = [child.name for child in place.iterdir()]
        if tfrecords.is_adoptable(path):
            return tfrecords
        return table.Table if any(name.endswith(table.SUFFIXES) for name in names) else image_folder.ImageFolder
    if path.endswith(table.SUFFIXES):
        return table.Table
    if path.endswith(npz.SUFFIX):
        return npz.Npz
    raise errors.DataError(
        f"No dataset is built from {path}: a source is a .csv, .parquet or .npz file, or a directory of images, tables "
        "or TFRecords."
    )
