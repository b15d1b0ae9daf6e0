"""Datasets built on gs://, where TFDS's rename of a finished directory copies its objects one by one.

dataset_info.json, by which a dataset is known, would be among the first of them. So TFDS works below a directory of
another name, and from there the objects are moved with dataset_info.json last.
"""

import contextlib
import functools
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from etils import epath

from data import catalog, faults, objects

_UNFINISHED = "incomplete."  # as TFDS names them, which it knows to be no version


def prepare(make: Callable[[str], Any], data_dir: str, directory: str, config: Any) -> None:
    """Builds a dataset.

    Args:
      make: makes a builder that writes below the data_dir it is given.
      data_dir: of the dataset, on gs://; what is downloaded for it is kept there too.
      directory: of the dataset, in `data_dir`.
      config: tfds.download.DownloadConfig.

    Raises:
      tf.errors.OpError: what the bucket says.
    """
    parent, version = os.path.split(directory.rstrip("/"))
    downloads = f"{data_dir.rstrip('/')}/downloads"
    for path in (parent, downloads):
        # In a directory that is there TFDS's makedirs does not ask for the bucket around it, see objects.py.
        faults.retry(functools.partial(tf.io.gfile.mkdir, path), faults.RETRY_WAITS_SECS, faults.is_passing)
    _tell_of_others(parent, version)
    staged = f"{parent}/{_UNFINISHED}{uuid.uuid4().hex[:8]}_{version}"
    try:
        builder = make(staged)
        builder.download_and_prepare(download_dir=downloads, download_config=config)
        objects.replace_directory(os.fspath(builder.data_path), directory, catalog.INFO_FILE)
    finally:
        with contextlib.suppress(*faults.FILE_ERRORS):
            if objects.entries(staged):
                epath.Path(staged).rmtree()


def _tell_of_others(parent: str, version: str) -> None:
    """No lock tells whether they are still at work, so they are left alone."""
    for name in objects.entries(parent):
        if name.startswith(_UNFINISHED) and name.rstrip("/").endswith(f"_{version}"):
            print(
                f"{parent}/{name} is of another build, killed or still at work. If it was killed: "
                f"gcloud storage rm -r {parent}/{name}",
                file=sys.stderr,
            )
