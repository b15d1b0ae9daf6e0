"""breast_cancer: 569 tumours, 30 measurements of their cells each, malignant or benign. Comes inside scikit-learn.

Source: W. Wolberg, O. Mangasarian, N. Street, W. Street, "Breast Cancer Wisconsin (Diagnostic)", UCI Machine Learning
Repository, 1993, https://doi.org/10.24432/C5DW2B (CC BY 4.0), as sklearn.datasets.load_breast_cancer() holds it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data.datasets import _bundled

NUM_SHARDS = 2
NUM_TRAIN = 455  # the other 114 are the test split


class BreastCancer(_bundled.Bundled, skip_registration=True):  # type: ignore[call-arg]
    """Writes 30 columns of float32 and label ("malignant", "benign") in splits train (455) and test (114)."""

    NUM_TRAIN = NUM_TRAIN

    def _info(self) -> tfds.core.DatasetInfo:
        source = _bundled.load("breast_cancer")
        columns = [_name(column) for column in source.feature_names]
        features = {column: tfds.features.Scalar(np.float32) for column in columns}
        label = tfds.features.ClassLabel(names=[str(name) for name in source.target_names])
        return self.describe(
            "Measurements of cell nuclei in images of tumours, and whether the tumour was malignant.",
            "https://doi.org/10.24432/C5DW2B",
            {**features, "label": label},
            ({column: column for column in columns}, "label"),
        )

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All examples."""
        source = _bundled.load("breast_cancer")
        columns = [_name(column) for column in source.feature_names]
        return [
            {**dict(zip(columns, map(float, values), strict=True)), "label": int(label)}
            for values, label in zip(source.data, source.target, strict=True)
        ]


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return BreastCancer(data_dir=data_dir)


def _name(column: str) -> str:
    return column.replace(" ", "_")
