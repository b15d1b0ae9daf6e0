"""What the datasets that come inside scikit-learn share. Nothing is downloaded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from data import errors

_SPLIT_SEED = 0


def load(name: str, **options: Any) -> Any:
    """What `sklearn.datasets.load_<name>(**options)` returns.

    Raises:
      DataError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise errors.DataError(
            f"The dataset {name} comes inside scikit-learn, which is not installed. Install it: pip install '.[digits]'"
        ) from error
    return getattr(datasets, f"load_{name}")(**options)


class Bundled(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes the splits train (the first `NUM_TRAIN` of a fixed permutation) and test (the rest)."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # TFDS 4.9.10 finds it out with importlib_resources, which neither it nor its dependencies install any more.
    code_path = epath.Path(__file__)
    NUM_TRAIN = 0

    def describe(self, description: str, homepage: str, features: Mapping, keys: tuple) -> tfds.core.DatasetInfo:
        """The info, of which `keys` are the supervised_keys."""
        return tfds.core.DatasetInfo(
            builder=self,
            description=description,
            homepage=homepage,
            features=tfds.features.FeaturesDict(dict(features)),
            supervised_keys=keys,
        )

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All examples, in the order of scikit-learn."""
        raise NotImplementedError

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        rows = self.rows()
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows))  # fixed: test examples never move to train
        return {
            "train": self._generate_examples(rows, order[: self.NUM_TRAIN]),
            "test": self._generate_examples(rows, order[self.NUM_TRAIN :]),
        }

    def _generate_examples(self, rows: Sequence[Mapping[str, Any]], chosen: np.ndarray) -> Iterator:
        for row in chosen:
            yield int(row), rows[row]
