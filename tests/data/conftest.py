"""Small datasets, written by TFDS itself."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds


class _Written(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset of given examples."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # there is no package around the examples

    def __init__(self, name: str, features: Any, keys: Any, splits: dict[str, Iterable], **kwargs: Any):
        self.name, self._features, self._keys, self._splits = name, features, keys, splits
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=self._keys, disable_shuffling=True
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterable]:
        return {name: enumerate(examples) for name, examples in self._splits.items()}

    def _generate_examples(self) -> None:
        raise NotImplementedError


@pytest.fixture(scope="session")
def write_tfds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """write(name, features, supervised_keys, {split: examples}, num_shards=1) -> data_dir."""

    def write(name: str, features: Any, keys: Any, splits: dict[str, Iterable], num_shards: int = 1) -> str:
        data_dir = str(tmp_path_factory.mktemp(name))
        tfds.disable_progress_bar()
        builder = _Written(name, features, keys, splits, data_dir=data_dir)
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=num_shards))
        return data_dir

    return write


@pytest.fixture(scope="session")
def numbered(write_tfds: Callable[..., str]) -> str:
    """data_dir of "numbered": splits of 7, 297, 298 examples in 3 shards; x and label are the example's number."""
    features = {"x": tfds.features.Tensor(shape=(1,), dtype=np.int32), "number": tfds.features.Scalar(np.int64)}
    splits = {
        f"n{size}": [{"x": np.array([row], np.int32), "number": row} for row in range(size)] for size in (7, 297, 298)
    }
    return write_tfds("numbered", features, ("x", "number"), splits, num_shards=3)
