"""digits_attributes: the 1,797 images of digits, each with what is true of its digit: several classes, or none.

For what learns several labels at once (`--task=multi_label`); the images and their source are those of `digits`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data.datasets import _bundled, digits

NUM_SHARDS = digits.NUM_SHARDS
ATTRIBUTES = {"even": {0, 2, 4, 6, 8}, "prime": {2, 3, 5, 7}, "loop": {0, 6, 8, 9}, "above_4": {5, 6, 7, 8, 9}}


class DigitsAttributes(_bundled.Bundled, skip_registration=True):  # type: ignore[call-arg]
    """Writes image [8, 8, 1] uint8 and label, a list of names out of `ATTRIBUTES`, in splits as of `digits`."""

    NUM_TRAIN = digits.NUM_TRAIN

    def _info(self) -> tfds.core.DatasetInfo:
        # Raw bytes of one length, unlike PNG: a whole batch decodes in one operation.
        image = tfds.features.Tensor(shape=digits.SHAPE, dtype=np.uint8, encoding=tfds.features.Encoding.BYTES)
        label = tfds.features.Sequence(tfds.features.ClassLabel(names=list(ATTRIBUTES)))
        return self.describe(
            "Handwritten digits, 8x8 pixels, and whether each is even, a prime, has a closed loop, is above 4.",
            digits.HOMEPAGE,
            {"image": image, "label": label},
            ("image", "label"),
        )

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All examples."""
        return [
            {"image": image, "label": [name for name, those in ATTRIBUTES.items() if int(digit) in those]}
            for image, digit in zip(*digits.load(), strict=True)
        ]


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return DigitsAttributes(data_dir=data_dir)
