"""TFRecords that are there already become a dataset where they lie."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import build, pipeline
from data.datasets.sources import tfrecords
from data.spec import Array, Spec

DESCRIPTION = """
label = "label"
[features]
image = {type = "image", shape = [4, 4, 3]}
size = {type = "tensor", shape = [2], dtype = "float32"}
raw = {type = "tensor", shape = [3], dtype = "uint8", bytes = true}
count = {type = "tensor", shape = [], dtype = "int64"}
label = {type = "class", names = ["a", "b"]}
"""
LENGTHS = {"train": (5, 0, 4), "test": (3,)}


def record(number: int) -> bytes:
    image = tf.io.encode_png(np.full((4, 4, 3), number, np.uint8)).numpy()
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "size": tf.train.Feature(float_list=tf.train.FloatList(value=[number, 0.5])),
        "raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([number] * 3)])),
        "count": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 2])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(directory: pathlib.Path, form: str = "{split}-{index:05}-of-{of:05}") -> list[pathlib.Path]:
    directory.mkdir()
    paths, number = [], 0
    for split, lengths in LENGTHS.items():
        for index, length in enumerate(lengths):
            paths.append(directory / form.format(split=split, index=index, of=len(lengths)))
            with tf.io.TFRecordWriter(os.fspath(paths[-1])) as writer:
                for _ in range(length):
                    writer.write(record(number))
                    number += 1
    return paths


@pytest.fixture
def description(tmp_path) -> pathlib.Path:
    path = tmp_path / "features.toml"
    path.write_text(DESCRIPTION)
    return path


def adopt(directory: pathlib.Path, *flags: str) -> int:
    return build.main(["build", str(directory), *flags])


@pytest.mark.parametrize(
    "form",
    [
        "{split}-{index:05}-of-{of:05}",
        "mine-{split}.tfrecord-{index:05}-of-{of:05}",
        "{split}.tfrecords-{index:05}-of-{of:05}",
        "{split}-{index:05}-of-{of:05}.tfrec",
        "{split}_{index:05}.tfrecord",
    ],
)
def test_records_are_adopted_in_place(tmp_path, description, capsys, form):
    paths = write(tmp_path / "my records", form)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    assert adopt(tmp_path / "my records", f"--features={description}") == build.EXIT_DONE, capsys.readouterr().err
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths} == before
    dataset = pipeline.open_dataset(str(tmp_path / "my records"))
    assert dataset.splits == {"test": 3, "train": 9}
    assert dataset.split("train").counts == (5, 0, 4)
    inputs = {"image": Array((4, 4, 3), "uint8"), "size": Array((2,), "float32"), "raw": Array((3,), "uint8")}
    assert dataset.spec() == Spec(inputs | {"count": Array((), "int64")}, Array((), "int32"), num_classes=2)
    x, y, _ = next(iter(pipeline.eval_batches(dataset, "train", global_batch_size=9, per_replica_batch_size=9)))
    np.testing.assert_array_equal(x["count"], range(9))
    np.testing.assert_array_equal(x["raw"][:, 2], range(9))
    np.testing.assert_array_equal(x["image"][:, 3, 3, 0], range(9))
    np.testing.assert_array_equal(y, np.arange(9) % 2)
    read = tfds.builder_from_directory(tmp_path / "my records").as_dataset(split="test")
    assert sorted(int(example["count"]) for example in read) == [9, 10, 11]
    assert adopt(tmp_path / "my records", f"--features={description}") == build.EXIT_DONE
    assert "is already there" in capsys.readouterr().out


def test_another_description_is_refused_once_there_is_one(tmp_path, description, capsys):
    write(tmp_path / "r")
    assert adopt(tmp_path / "r", f"--features={description}") == build.EXIT_DONE
    description.write_text(DESCRIPTION.replace('["a", "b"]', '["a", "c"]'))
    assert adopt(tmp_path / "r", f"--features={description}") == build.EXIT_DATA
    assert "is described already, and otherwise" in capsys.readouterr().err


def test_json_and_features_of_tfds_describe_too(tmp_path, description, capsys):
    features, keys = tfrecords.read_description(str(description), None)
    assert keys == (("image", "size", "raw", "count"), "label")
    number = {"type": "tensor", "dtype": "int32"}
    own = {"inputs": ["count"], "label": "x", "features": {"count": number, "x": number, "y": number}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert tfrecords.read_description(str(tmp_path / "own.json"), None)[1] == ("count", "x")
    features.save_config(tmp_path)
    again, keys_again = tfrecords.read_description(str(tmp_path / "features.json"), "label")
    assert again.to_json() == features.to_json() and again["label"].names == ["a", "b"]
    assert set(keys_again[0]) == set(keys[0])


def test_the_last_to_appear_is_what_makes_it_a_dataset(tmp_path, description, monkeypatch):
    """Whenever it is killed, what is there either does not count as a dataset, or is whole."""
    from etils import epath

    write(tmp_path / "r")
    moved = []
    replace = type(epath.Path(tmp_path)).replace
    monkeypatch.setattr(
        type(epath.Path(tmp_path)), "replace", lambda path, to: (moved.append(to.name), replace(path, to))
    )
    assert adopt(tmp_path / "r", f"--features={description}") == build.EXIT_DONE
    # What comes behind it is not part of TFDS's format, and the next run writes it if it is not there.
    moved.remove("manifest.json")
    assert set(moved) >= {"features.json", "label.labels.txt"} and moved[-1] == "dataset_info.json"


def cut(paths: list[pathlib.Path]) -> None:
    os.truncate(paths[0], paths[0].stat().st_size - 3)


def rename(paths: list[pathlib.Path]) -> None:
    paths[0].rename(paths[0].parent / "train-part1.tfrecord")


@pytest.mark.parametrize(
    ("fault", "old", "new", "message"),
    [
        (cut, "", "", "train-00000-of-00003 is damaged"),
        (lambda paths: paths[1].unlink(), "", "", "Shards of 'train'"),
        (rename, "", "", "not named as TFDS can find them"),
        (None, 'count = {type = "tensor"', 'kount = {type = "tensor"', "The first record of"),
        (None, 'dtype = "int64"', 'dtype = "float32"', "The first record of"),
        (None, "shape = [2]", "shape = [3]", "The first record of"),
        (None, 'label = "label"', 'label = "lable"', "no feature 'lable' (did you mean 'label'?)"),
        (None, '"class"', '"klass"', "does not describe features"),
        (None, "shape = [2]", "shpae = [2]", "does not describe features"),
        (None, "[features]", "[features", "does not describe features"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(tmp_path, description, capsys, fault, old, new, message):
    paths = write(tmp_path / "r")
    if fault:
        fault(paths)
    description.write_text(DESCRIPTION.replace(old, new))
    assert adopt(tmp_path / "r", f"--features={description}") == build.EXIT_DATA
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not list((tmp_path / "r").glob("*.json"))


def test_flags_of_adoption(tmp_path, capsys):
    write(tmp_path / "r")
    assert adopt(tmp_path / "r") == build.EXIT_USAGE and "--features=FILE" in capsys.readouterr().err
    assert adopt(tmp_path / "r", "--num_shards=3") == build.EXIT_USAGE and "no effect" in capsys.readouterr().err
    assert adopt(tmp_path / "r", "--features=gone.toml") == build.EXIT_DATA and "gone.toml" in capsys.readouterr().err
    assert adopt(tmp_path / "r", "--features=x", f"--data_dir={tmp_path}") == build.EXIT_USAGE
    assert "--data_dir has no effect" in capsys.readouterr().err


def test_a_template_of_file_names_can_be_given(tmp_path, description):
    write(tmp_path / "r", "{split}.part{index:05}.rec")
    flags = (f"--features={description}", "--filename_template={SPLIT}.part{SHARD_INDEX}.rec")
    assert adopt(tmp_path / "r", *flags) == build.EXIT_DONE
    assert pipeline.open_dataset(str(tmp_path / "r")).splits == {"test": 3, "train": 9}
