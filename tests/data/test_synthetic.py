"""Batches without files: shapes of the real thing, content by position whatever the hosts and replicas."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from data import catalog, errors, pipeline, synthetic
from data.spec import Array, Spec

BATCH = 16
SPEC = Spec(
    inputs={"bytes": Array((3, 2), "uint8"), "tokens": Array((5,), "int64"), "real": Array((2,), "float32")},
    label=Array((), "int32"),
    num_classes=7,
)


def rows(batches, hosts: int, replicas: int) -> list[list[np.ndarray]]:
    """For each step the components of the global batch, put together from all hosts' replicas."""
    per_host = [list(batches(host)) for host in range(hosts)]
    steps = len(per_host[0]) // replicas
    found = []
    for step in range(steps):
        shares = [batch for host in per_host for batch in host[step * replicas : (step + 1) * replicas]]
        flat = [[batch[0][name].numpy() for name in SPEC.inputs] + [t.numpy() for t in batch[1:]] for batch in shares]
        found.append([np.concatenate(component) for component in zip(*flat, strict=True)])
    return found


def training(hosts: int = 1, replicas: int = 1, start_step: int = 0, steps: int = 9):
    dataset = synthetic.Dataset("synthetic", {"train": 100}, lambda image_size: SPEC)

    def batches(host: int):
        made = synthetic.train_batches(
            dataset,
            global_batch_size=BATCH,
            per_replica_batch_size=BATCH // hosts // replicas,
            start_step=start_step,
            host_index=host,
            num_hosts=hosts,
        )
        return made.take(steps * replicas)

    return rows(batches, hosts, replicas)


def same(one, other) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a == b).all() for step, others in pairs for a, b in zip(step, others, strict=True))


def test_content_depends_on_the_position_alone() -> None:
    whole = training()
    for hosts, replicas in [(1, 4), (2, 2), (4, 1)]:
        assert same(training(hosts, replicas), whole), (hosts, replicas)
    assert same(training(start_step=4, steps=5), whole[4:])
    assert same(training(2, 2, start_step=4, steps=5), whole[4:])
    assert all(not same([whole[0]], [step]) for step in whole[1:]), "every step is another batch"


def test_values_fit_what_a_model_expects() -> None:
    images, tokens, real, labels = (np.concatenate(component) for component in zip(*training(), strict=True))
    assert images.dtype == np.uint8
    assert images.max() > 200
    assert set(tokens.ravel()) == {0, 1}
    assert 0 <= real.min() < real.max() < 1
    assert set(labels) == set(range(7))
    example_of = {}
    for image, label in zip(images, labels, strict=True):
        assert example_of.setdefault(image.tobytes(), label) == label, "an example keeps its label"
    assert len(example_of) == synthetic.DISTINCT


@pytest.mark.parametrize(("hosts", "replicas"), [(1, 1), (2, 2)])
def test_evaluation_counts_the_examples_of_the_split(hosts: int, replicas: int) -> None:
    dataset = synthetic.Dataset("synthetic", {"test": 2 * BATCH + 5}, lambda image_size: SPEC)

    def batches(host: int):
        return synthetic.eval_batches(
            dataset,
            global_batch_size=BATCH,
            per_replica_batch_size=BATCH // hosts // replicas,
            host_index=host,
            num_hosts=hosts,
        )

    steps = rows(batches, hosts, replicas)
    masks = np.concatenate([step[-1] for step in steps])
    np.testing.assert_array_equal(masks, np.arange(3 * BATCH) < 2 * BATCH + 5)
    assert same([step[:-1] for step in steps], training(steps=3))


def test_it_has_the_shapes_of_a_real_dataset(write_tfds) -> None:
    features = {
        "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=4),
    }
    example = {"image": np.zeros((5, 9, 3), np.uint8), "label": 1}
    data_dir = write_tfds("pictured", features, ("image", "label"), {"train": [example] * 3, "val": [example]})
    dataset = synthetic.open_dataset("synthetic:pictured", data_dir)
    assert dataset.name == "synthetic:pictured/1.0.0"
    assert dataset.splits == {"train": 3, "val": 1}
    assert dataset.spec(6) == pipeline.open_dataset("pictured", data_dir).spec(6)
    with pytest.raises(errors.DataError, match="set image_size"):
        dataset.spec()
    with pytest.raises(errors.DataError, match="no split 'vla'.*'val'"):
        dataset.split("vla")


def test_without_a_dataset_it_is_sized_by_options() -> None:
    dataset = synthetic.open_dataset("synthetic", num_classes=10)
    assert dataset.spec(32) == Spec(Array((32, 32, 3), "uint8"), Array((), "int32"), 10)
    assert synthetic.open_dataset("synthetic").spec() == Spec(Array((224, 224, 3), "uint8"), Array((), "int32"), 1000)


def test_only_the_described_dataset_must_be_there(tmp_path) -> None:
    catalog.check_local("synthetic", None)
    with pytest.raises(errors.DataError, match="No dataset 'nowhere'"):
        catalog.check_local("synthetic:nowhere", str(tmp_path))
    assert not catalog.is_synthetic("synthetically")
    assert not catalog.is_synthetic("./synthetic")
