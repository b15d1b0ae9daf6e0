"""manifest.json: what it says, and what a run is told before it begins when the files have changed since."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import audit, errors, manifest, pipeline

SHARD = "photos-train.tfrecord-00001-of-00003"


@pytest.fixture(scope="module")
def clean(write_tfds: Callable[..., str]) -> pathlib.Path:
    """A dataset of images as TFDS writes it, without a manifest."""
    features = {
        "image": tfds.features.Image(shape=(None, None, 1), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
    }
    examples = [
        {"image": np.full((4 + number % 2, 10, 1), number, np.uint8), "label": number % 3 % 2} for number in range(12)
    ]
    splits = {
        "train": examples,
        "test": [{"image": np.full((3, 3, 1), 77 + number, np.uint8), "label": 1} for number in range(3)],
    }
    return pathlib.Path(write_tfds("photos", features, ("image", "label"), splits, num_shards=3)) / "photos/1.0.0"


@pytest.fixture
def dataset(clean, tmp_path) -> pathlib.Path:
    """A copy to spoil."""
    return pathlib.Path(shutil.copytree(clean, tmp_path / "photos" / "1.0.0"))


@pytest.fixture
def described(dataset, capsys) -> pathlib.Path:
    """A copy to spoil, with a manifest."""
    assert audit.main(["audit", str(dataset), "--write_manifest"]) == audit.EXIT_CLEAN
    assert f"wrote {dataset}/manifest.json" in capsys.readouterr().out
    return dataset


def verify(directory: pathlib.Path, *splits: str, **arguments) -> manifest.Manifest | None:
    return manifest.verify(pipeline.open_dataset(str(directory)).info, splits, **arguments)


def edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_it_says_what_is_there(described):
    found = verify(described)
    assert found == manifest.read(str(described))
    assert found.dataset == "photos/1.0.0" and "num_classes=2" in found.features["label"]
    train = found.splits["train"]
    assert train.records == 12 and train.labels == {"0": 8, "1": 4} and not train.findings
    assert train.images == {"height": 4.5, "width": 10, "channels": 1}
    assert found.splits["test"].images == {"height": 3, "width": 3, "channels": 1}
    for shard in train.shards:
        path = described / shard.file
        assert shard.bytes == path.stat().st_size
        assert shard.records == sum(1 for _ in tf.data.TFRecordDataset(str(path)))


def test_tensors_that_are_images_have_a_size(digits_dir, tmp_path):
    directory = shutil.copytree(digits_dir / "digits", tmp_path / "digits")
    assert audit.main(["audit", str(directory), "--write_manifest"]) == audit.EXIT_CLEAN
    found = verify(directory)
    assert found.splits["train"].images == {"height": 8, "width": 8, "channels": 1}
    assert sum(found.splits["train"].labels.values()) == 1500


def test_checksums_depend_on_records_and_their_order_only(described):
    before = manifest.read(str(described)).splits["train"].shards
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(described / SHARD))]

    def rewritten(changed: list[bytes]) -> tuple:
        with tf.io.TFRecordWriter(str(described / SHARD)) as writer:
            for record in changed:
                writer.write(record)
        audit.main(["audit", str(described), "--write_manifest"])
        return manifest.read(str(described)).splits["train"].shards

    assert rewritten(records) == before
    after = rewritten(records[::-1])
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]


def test_without_a_manifest_sizes_must_be_those_of_dataset_info(dataset):
    assert verify(dataset) is None
    os.truncate(dataset / SHARD, (dataset / SHARD).stat().st_size - 1)
    with pytest.raises(
        errors.DataError, match="split 'train'.*at least one is truncated.*data.audit .* --splits=train"
    ):
        verify(dataset)
    assert verify(dataset, "test") is None


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), f"1 of 6 shards are missing, the first is .*{SHARD}"),
        (lambda path: path.write_bytes(b""), f"1 of 6 shards are empty files, the first is .*{SHARD}"),
    ],
)
def test_missing_and_empty_shards_are_named(request, has_manifest, spoil, message):
    directory = request.getfixturevalue("described" if has_manifest else "dataset")
    spoil(directory / SHARD)
    with pytest.raises(errors.DataError, match=message):
        verify(directory)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: os.truncate(d / SHARD, 50), f"{SHARD} holds 50 bytes, the manifest says .*--write_manifest"),
        (lambda d: edit(d / "features.json", "png", "jpeg"), "features.json .* is not the one"),
        (
            lambda d: edit(d / "manifest.json", '"records": 4,', '"records": 3,'),
            "holds 3 records by the manifest, 4 by dataset_info.json",
        ),
        (lambda d: edit(d / "manifest.json", SHARD, "other"), f"{SHARD} is not in the manifest"),
        (lambda d: edit(d / "manifest.json", '"format": 1', '"format": 0'), "its format is 0, this program knows 1"),
        (lambda d: edit(d / "manifest.json", '"schema"', '"scheme"'), "is no manifest: .*--write_manifest"),
        (lambda d: (d / "manifest.json").write_text("{"), "is no manifest: .*--write_manifest"),
        (lambda d: (d / "manifest.json").write_text("[]"), "is no manifest: .*--write_manifest"),
    ],
)
def test_what_has_changed_is_named(described, spoil, message):
    spoil(described)
    with pytest.raises(errors.DataError, match=message):
        verify(described)


def test_damaged_files_which_the_caller_knows_pass(described):
    os.truncate(described / SHARD, 50)
    assert verify(described, known=[SHARD]) is not None


def test_faults_of_the_audit_stop_a_run_on_their_split(dataset):
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(dataset / SHARD))]
    with tf.io.TFRecordWriter(str(dataset / SHARD)) as writer:
        for record in records[:-1]:
            writer.write(record)
        example = tf.train.Example.FromString(records[-1])
        example.features.feature["label"].int64_list.value[0] = 2
        writer.write(example.SerializeToString())
    assert audit.main(["audit", str(dataset), "--write_manifest"]) == audit.EXIT_DATA
    with pytest.raises(errors.DataError, match="split 'train' in .* found faults: 1 label_range.*--write_quarantine"):
        verify(dataset)
    assert verify(dataset, "test") is not None
    assert audit.main(["audit", str(dataset), "--write_manifest", "--write_quarantine"]) == audit.EXIT_DATA
    assert verify(dataset) is not None  # the list answers for it


def test_it_is_written_whole_or_not_at_all(described, monkeypatch):
    before = (described / "manifest.json").read_text()
    found = manifest.read(str(described))

    def fail(content, **arguments):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(OSError, match="disk full"):
        manifest.write(str(described), found)
    assert (described / "manifest.json").read_text() == before
