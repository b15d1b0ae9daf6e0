"""digits: 1,797 handwritten digits of 43 writers, 8x8 pixels, that come inside scikit-learn. Nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49 (CC BY 4.0); its test set, as sklearn.datasets.load_digits() holds it.
"""

from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from data.datasets import _bundled

NUM_SHARDS = 4  # enough to mix and to give each of 4 hosts a file
NUM_TRAIN = 1_500  # the other 297 are the test split
_SPLIT_SEED = 0
_SOURCE_MAX = 16  # a pixel counts the dark ones among 4x4 finer pixels, hence 0..16
_NUM_CLASSES = 10
SHAPE = (8, 8, 1)
HOMEPAGE = "https://doi.org/10.24432/C50P49"


class Digits(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes image [8, 8, 1] uint8 and label (0..9) in splits train (1,500) and test (297)."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # TFDS 4.9.10 finds it out with importlib_resources, which neither it nor its dependencies install any more.
    code_path = epath.Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits, 8x8 pixels. Source values 0..16 are stored as round(value * 255 / 16).",
            homepage=HOMEPAGE,
            features=tfds.features.FeaturesDict(
                {
                    # Raw bytes of one length, unlike PNG: a whole batch decodes in one operation.
                    "image": tfds.features.Tensor(shape=SHAPE, dtype=np.uint8, encoding=tfds.features.Encoding.BYTES),
                    "label": tfds.features.ClassLabel(num_classes=_NUM_CLASSES),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        images, labels = load()
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))  # fixed: test images never move to train
        return {
            "train": self._generate_examples(images, labels, order[:NUM_TRAIN]),
            "test": self._generate_examples(images, labels, order[NUM_TRAIN:]),
        }

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> Iterator:
        for row in rows:
            yield int(row), {"image": images[row], "label": int(labels[row])}


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return Digits(data_dir=data_dir)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8, 1] uint8 over the whole range 0..255, labels [1797] int64.

    Raises:
      DataError: scikit-learn is not installed.
    """
    source = _bundled.load("digits")
    # Stretched to the range of uint8, so that the usual division by 255 gives 0..1 (16 becomes 255, exactly 1).
    images = np.rint(source.images * (np.iinfo(np.uint8).max / _SOURCE_MAX)).astype(np.uint8)
    return images.reshape(-1, *SHAPE), source.target
