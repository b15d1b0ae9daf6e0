"""diabetes: 442 patients, age, sex, blood values, and how far their diabetes has gone on a year later: a number.

Source: B. Efron, T. Hastie, I. Johnstone, R. Tibshirani, "Least Angle Regression", Annals of Statistics 32(2), 2004,
https://doi.org/10.1214/009053604000000067, as sklearn.datasets.load_diabetes(scaled=False) holds it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data.datasets import _bundled

NUM_SHARDS = 2
NUM_TRAIN = 342  # the other 100 are the test split
_COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
_CATEGORY = "sex"  # 1 or 2; the source does not say which is which


class Diabetes(_bundled.Bundled, skip_registration=True):  # type: ignore[call-arg]
    """Writes sex (a category), 9 columns of float32, label (float32, 25..346) in splits train (342) and test (100)."""

    NUM_TRAIN = NUM_TRAIN

    def _info(self) -> tfds.core.DatasetInfo:
        features: dict[str, Any] = {column: tfds.features.Scalar(np.float32) for column in _COLUMNS}
        features[_CATEGORY] = tfds.features.ClassLabel(names=["1", "2"])
        return self.describe(
            "Ten values of each patient in their own units, and a measure of the disease one year later.",
            "https://doi.org/10.1214/009053604000000067",
            {**features, "label": tfds.features.Scalar(np.float32)},
            ({column: column for column in _COLUMNS}, "label"),
        )

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All examples."""
        source = _bundled.load("diabetes", scaled=False)
        found = [dict(zip(_COLUMNS, map(float, values), strict=True)) for values in source.data]
        return [
            {**values, _CATEGORY: str(int(values[_CATEGORY])), "label": float(label)}
            for values, label in zip(found, source.target, strict=True)
        ]


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return Diabetes(data_dir=data_dir)
