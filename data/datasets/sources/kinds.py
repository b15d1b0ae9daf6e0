"""Which kind of source lies at a path."""

from typing import Any

from etils import epath

from data import errors
from data.datasets.sources import image_folder, npz, table, text, tfrecords


def of(path: str, *, as_text: bool = False) -> Any:
    """The class, or for TFRecords the module, for what lies at a path: by suffix, or by what a directory holds.

    `as_text`: a tokenizer was named, so that what else would be a table holds texts.

    Raises:
      DataError: none reads it.
    """
    place = epath.Path(path)
    if as_text or path.endswith(text.OWN_SUFFIXES):
        return text.Text
    if place.is_dir():
        names = [child.name for child in place.iterdir()]
        if tfrecords.is_adoptable(path):
            return tfrecords
        if any(name.endswith(text.OWN_SUFFIXES) for name in names):
            return text.Text
        return table.Table if any(name.endswith(table.SUFFIXES) for name in names) else image_folder.ImageFolder
    if path.endswith(table.SUFFIXES):
        return table.Table
    if path.endswith(npz.SUFFIX):
        return npz.Npz
    raise errors.DataError(
        f"No dataset is built from {path}: a source is a .csv, .parquet, .npz, .txt or .jsonl file, or a directory of "
        "images, tables, texts or TFRecords."
    )
