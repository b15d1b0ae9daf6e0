"""From directories in TFDS format to the batches of hosts and replicas."""

import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import errors, pipeline
from data.spec import Array, Spec

HOSTS_AND_REPLICAS = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]
BATCH = 16


def batches_of_step(hosts: int, replicas: int, make) -> list[list]:
    """For every step the batches of all replicas of all hosts, host by host."""
    per_host = [list(make(host)) for host in range(hosts)]
    steps = len(per_host[0]) // replicas
    assert all(len(batches) == steps * replicas for batches in per_host)
    return [
        [batch for batches in per_host for batch in batches[step * replicas : (step + 1) * replicas]]
        for step in range(steps)
    ]


def train_numbers(data_dir: str, hosts: int, replicas: int, start_step: int = 0, steps: int = 40) -> list[list[int]]:
    """Record numbers of each global batch; 40 steps of 16 go over the end of the second epoch of 297."""
    dataset = pipeline.open_dataset("numbered", data_dir)

    def make(host: int) -> tf.data.Dataset:
        return pipeline.train_batches(
            dataset,
            "n297",
            global_batch_size=BATCH,
            per_replica_batch_size=BATCH // hosts // replicas,
            seed=1,
            shuffle_mib=0.01,
            start_step=start_step,
            host_index=host,
            num_hosts=hosts,
        ).take(steps * replicas)

    found = []
    for step in batches_of_step(hosts, replicas, make):
        for x, y in step:
            np.testing.assert_array_equal(x[:, 0], y)
        found.append(np.concatenate([y for _, y in step]).tolist())
    return found


def test_global_batches_do_not_depend_on_hosts_and_replicas(numbered):
    alone = train_numbers(numbered, 1, 1)
    for epochs in (1, 2):  # each ends within a batch, which holds the last of one and the first of the next
        whole = epochs * 297 // BATCH
        assert np.bincount(np.ravel(alone[:whole])).max() == epochs
        assert np.bincount(np.ravel(alone[: whole + 1]), minlength=297).min() == epochs
    for hosts, replicas in HOSTS_AND_REPLICAS[1:]:
        assert train_numbers(numbered, hosts, replicas) == alone, (hosts, replicas)


def test_a_later_start_step_continues(numbered):
    alone = train_numbers(numbered, 1, 1)
    for hosts, start in ((1, 1), (2, 18), (1, 19), (1, 37)):
        assert train_numbers(numbered, hosts, 1, start_step=start, steps=40 - start) == alone[start:]


@pytest.mark.parametrize("size", [1, 7, 297, 298])
def test_evaluation_counts_each_example_once(numbered, write_tfds, size):
    if size == 1:  # TFDS refuses fewer examples than shards
        features = {"x": tfds.features.Tensor(shape=(1,), dtype=np.int32), "number": tfds.features.Scalar(np.int64)}
        examples = [{"x": np.zeros(1, np.int32), "number": 0}]
        dataset = pipeline.open_dataset("single", write_tfds("single", features, ("x", "number"), {"n1": examples}))
    else:
        dataset = pipeline.open_dataset("numbered", numbered)
    for hosts, replicas in HOSTS_AND_REPLICAS:
        steps = batches_of_step(
            hosts,
            replicas,
            lambda host, hosts=hosts, replicas=replicas: pipeline.eval_batches(
                dataset,
                f"n{size}",
                global_batch_size=BATCH,
                per_replica_batch_size=BATCH // hosts // replicas,
                host_index=host,
                num_hosts=hosts,
            ),
        )
        assert len(steps) == pipeline.eval_steps(size, BATCH)
        y = np.concatenate([y for step in steps for _, y, _ in step])
        mask = np.concatenate([mask for step in steps for _, _, mask in step])
        assert mask.dtype == np.float32
        assert y[mask == 1].tolist() == list(range(size))
        assert set(mask) <= {0, 1}
        assert set(y[mask == 0]) <= set(range(size))  # padding is real examples


def test_eval_steps():
    assert [pipeline.eval_steps(n, 64) for n in (1, 63, 64, 65, 128)] == [1, 1, 1, 2, 2]


def test_several_inputs_and_png_images(write_tfds):
    rng = np.random.default_rng(0)
    examples = [
        {"photo": rng.integers(0, 256, (6, 5, 3), np.uint8), "area": np.full(2, row, np.float32), "kind": row % 3}
        for row in range(5)
    ]
    features = {
        "photo": tfds.features.Image(shape=(6, 5, 3), encoding_format="png"),
        "area": tfds.features.Tensor(shape=(2,), dtype=np.float32, encoding="zlib"),
        "kind": tfds.features.ClassLabel(names=["a", "b", "c"]),
    }
    data_dir = write_tfds("pairs", features, (("photo", "area"), "kind"), {"train": examples})
    dataset = pipeline.open_dataset("pairs", data_dir)
    assert dataset.spec() == Spec(
        {"photo": Array((6, 5, 3), "uint8"), "area": Array((2,), "float32")}, Array((), "int32"), num_classes=3
    )
    batches = pipeline.eval_batches(dataset, "train", global_batch_size=5, per_replica_batch_size=5)
    assert batches.element_spec == (
        {"photo": tf.TensorSpec((5, 6, 5, 3), tf.uint8), "area": tf.TensorSpec((5, 2), tf.float32)},
        tf.TensorSpec((5,), tf.int32),
        tf.TensorSpec((5,), tf.float32),
    )
    x, y, _ = next(iter(batches))
    np.testing.assert_array_equal(x["photo"], [example["photo"] for example in examples])
    np.testing.assert_array_equal(x["area"], [example["area"] for example in examples])
    np.testing.assert_array_equal(y, [example["kind"] for example in examples])
    resized = pipeline.train_batches(
        dataset, global_batch_size=2, per_replica_batch_size=2, seed=0, shuffle_mib=1, image_size=4
    )
    assert next(iter(resized))[0]["photo"].shape == (2, 4, 4, 3)


def test_images_of_varying_size_need_an_image_size(write_tfds):
    flat = [np.full((height, 9, 3), 40 * height, np.uint8) for height in (4, 5, 6)]  # one colour stays one colour
    features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=2)}
    examples = [{"image": image, "label": 1} for image in flat]
    dataset = pipeline.open_dataset("photos", write_tfds("photos", features, ("image", "label"), {"train": examples}))
    with pytest.raises(errors.DataError, match="'image' of photos/1.0.0 varies in shape.*set image_size"):
        dataset.spec()
    assert dataset.spec(image_size=8).inputs == Array((8, 8, 3), "uint8")
    x, _, _ = next(
        iter(pipeline.eval_batches(dataset, "train", global_batch_size=3, per_replica_batch_size=3, image_size=8))
    )
    assert x.dtype == tf.uint8
    np.testing.assert_array_equal(x, np.broadcast_to(np.reshape([160, 200, 240], (3, 1, 1, 1)), (3, 8, 8, 3)))


def test_datasets_that_cannot_be_batched_are_named(write_tfds, numbered):
    scalar = tfds.features.Scalar(np.int64)
    cases = [
        ("nokeys", {"x": scalar, "y": scalar}, None, {"x": 1, "y": 1}, "supervised_keys=None"),
        ("text", {"x": tfds.features.Text(), "y": scalar}, ("x", "y"), {"x": "a", "y": 1}, "'x' of text/1.0.0 is text"),
        ("ragged", {"x": tfds.features.Sequence(scalar), "y": scalar}, ("x", "y"), {"x": [1], "y": 1}, "one shape"),
    ]
    for name, features, keys, example, message in cases:
        dataset = pipeline.open_dataset(name, write_tfds(name, features, keys, {"train": [example]}))
        with pytest.raises(errors.DataError, match=message):
            dataset.spec()
    with pytest.raises(errors.DataError, match="image_size=8 has no effect"):
        pipeline.open_dataset("numbered", numbered).spec(image_size=8)


def test_missing_splits_and_files_are_named(numbered, tmp_path):
    with pytest.raises(errors.DataError, match="no split 'n8' .did you mean 'n298'.*It has: n7, n297, n298"):
        pipeline.open_dataset("numbered", numbered).split("n8")
    shutil.copytree(f"{numbered}/numbered", tmp_path / "numbered")
    dataset = pipeline.open_dataset(str(tmp_path / "numbered"))
    shards = sorted(pathlib.Path(dataset.directory).glob("*n297*"))
    shards[1].write_bytes(b"")
    with pytest.raises(errors.DataError, match="1 of 3 shards are empty files.*00001-of-00003"):
        dataset.split("n297")
    shards[2].unlink()
    with pytest.raises(errors.DataError, match="1 of 3 shards are missing.*00002-of-00003"):
        dataset.split("n297")
    info = pathlib.Path(dataset.directory) / "features.json"
    info.write_text("{")
    with pytest.raises(errors.DataError, match="does not open as a TFDS dataset"):
        pipeline.open_dataset(str(tmp_path / "numbered"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch_size": 10}, "multiple of .* = 4. Received: 10; the nearest that fits is 8"),
        ({"per_replica_batch_size": 0}, "at least 1"),
        ({"host_index": 2}, r"in \[0, 2\). Received: 2"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_named(numbered, changed, message):
    arguments = {"global_batch_size": 8, "per_replica_batch_size": 2, "host_index": 0, "num_hosts": 2} | changed
    with pytest.raises(errors.DataError, match=message):
        pipeline.eval_batches(pipeline.open_dataset("numbered", numbered), "n7", **arguments)
