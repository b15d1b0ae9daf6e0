"""What a dataset says of categories and of several labels at once reaches models."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from data import pipeline, synthetic
from data.datasets import digits_attributes
from data.spec import Array, Spec

NAMES = ["a", "b", "c"]


@pytest.fixture
def spec_and_batch(write_tfds, request: pytest.FixtureRequest):
    """Spec of a dataset with a label feature, and the labels of its four examples."""
    feature, labels = request.param
    features = {"city": tfds.features.ClassLabel(num_classes=40), "label": feature}
    examples = [{"city": row, "label": label} for row, label in enumerate(labels)]
    dataset = pipeline.open_dataset("labels", write_tfds("labels", features, ("city", "label"), {"train": examples}))
    [(x, y, _)] = pipeline.eval_batches(dataset, "train", global_batch_size=4, per_replica_batch_size=4)
    assert x.numpy().tolist() == [0, 1, 2, 3]
    return dataset.spec(), y.numpy()


CLASSES = tfds.features.ClassLabel(names=NAMES)
LISTS = [[0, 2], [], [1, 1], ["c", "b", "a"]]
BITS = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("spec_and_batch", "label", "values"),
    [
        ((tfds.features.Sequence(CLASSES), LISTS), Array((3,), "float32", below=2), BITS),
        ((tfds.features.Sequence(CLASSES), [[]] * 4), Array((3,), "float32", below=2), [[0, 0, 0]] * 4),
        ((tfds.features.Tensor(shape=(3,), dtype=np.bool_), np.array(BITS, bool)), Array((3,), "float32", 2), BITS),
        # Whole and real numbers may be anything.
        ((tfds.features.Tensor(shape=(3,), dtype=np.uint8), np.array(BITS, np.uint8)), Array((3,), "int32"), BITS),
        ((tfds.features.Tensor(shape=(3,), dtype=np.float32), np.float32(BITS)), Array((3,), "float32"), BITS),
        ((tfds.features.Scalar(np.bool_), [True, False, False, True]), Array((), "int32", below=2), [1, 0, 0, 1]),
    ],
    indirect=["spec_and_batch"],
)
def test_labels(spec_and_batch: tuple[Spec, np.ndarray], label: Array, values: list) -> None:
    spec, found = spec_and_batch
    assert spec == Spec(Array((), "int32", below=40), label, None)
    assert found.dtype == label.dtype
    np.testing.assert_array_equal(found, values)


def test_made_up_examples_keep_within_their_bounds() -> None:
    spec = Spec({"city": Array((), "int32", below=40)}, Array((3,), "float32", below=2), None)
    dataset = synthetic.Dataset("synthetic", {"train": 64}, lambda image_size: spec)
    [(x, y)] = synthetic.train_batches(dataset, global_batch_size=64, per_replica_batch_size=64).take(1)
    assert 0 <= x["city"].numpy().min() < 20 < x["city"].numpy().max() < 40
    assert set(y.numpy().ravel()) == {0.0, 1.0}


def test_attributes_of_digits() -> None:
    true_of = {
        digit: {name for name, those in digits_attributes.ATTRIBUTES.items() if digit in those} for digit in range(10)
    }
    assert true_of[1] == set(), "an example may have none"
    assert true_of[6] == {"even", "loop", "above_4"}
