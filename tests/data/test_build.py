"""python -m data.build, and every dataset it can build."""

import importlib.util
import os
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from data import build, catalog, pipeline
from data.spec import Array, Spec


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Holds every dataset that can be built here."""
    directory = str(tmp_path_factory.mktemp("built"))
    for name in catalog.buildable():
        assert build.main(["build", name, f"--data_dir={directory}"]) == build.EXIT_DONE
    return directory


@pytest.mark.parametrize("name", catalog.buildable())
def test_every_dataset_opens_and_trains(data_dir, name):
    dataset = pipeline.open_dataset(name, data_dir)
    spec = dataset.spec()
    assert {"train", "test"} <= set(dataset.splits)
    arguments = {"global_batch_size": 4, "per_replica_batch_size": 2}
    _, y = next(iter(pipeline.train_batches(dataset, seed=0, shuffle_mib=1, **arguments)))
    assert y.shape == (2, *spec.label.shape)
    assert len(next(iter(pipeline.eval_batches(dataset, **arguments)))) == 3


def test_digits_are_those_of_scikit_learn(data_dir):
    from sklearn import datasets

    dataset = pipeline.open_dataset("digits", data_dir)
    assert dataset.spec() == Spec(Array((8, 8, 1), "uint8"), Array((), "int32"), num_classes=10)
    assert dataset.spec(image_size=32).inputs == Array((32, 32, 1), "uint8")
    assert dataset.splits == {"train": 1500, "test": 297}
    assert dataset.split("train").counts == (375,) * 4
    found = []
    for split, size in dataset.splits.items():
        batches = pipeline.eval_batches(dataset, split, global_batch_size=size, per_replica_batch_size=size)
        x, y, _ = next(iter(batches))
        found += [(image.tobytes(), label) for image, label in zip(x.numpy(), y.numpy(), strict=True)]
    source = datasets.load_digits()
    scaled = np.rint(source.images / 16 * 255).astype(np.uint8)
    assert scaled.max() == 255
    expected = [(image.tobytes(), label) for image, label in zip(scaled, source.target, strict=True)]
    assert sorted(found) == sorted(expected)


def test_tfds_reads_what_is_built(data_dir):
    builder = tfds.builder_from_directory(f"{data_dir}/digits/1.0.0")
    file_order = tfds.ReadConfig(interleave_cycle_length=1)
    examples = builder.as_dataset(split="test", as_supervised=True, read_config=file_order)
    images, labels = zip(*tfds.as_numpy(examples), strict=True)
    dataset = pipeline.open_dataset(f"{data_dir}/digits")
    x, y, mask = next(iter(pipeline.eval_batches(dataset, global_batch_size=297, per_replica_batch_size=297)))
    assert mask.numpy().all()
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, labels)


def test_digits_are_resized(data_dir):
    dataset = pipeline.open_dataset("digits", data_dir)
    arguments = {"global_batch_size": 9, "per_replica_batch_size": 9}
    small, _, _ = next(iter(pipeline.eval_batches(dataset, **arguments)))
    large, _, _ = next(iter(pipeline.eval_batches(dataset, image_size=16, **arguments)))
    assert large.shape == (9, 16, 16, 1) and large.dtype == small.dtype
    # Bilinear at twice the size leaves the corners as they are, also after the way to float32 and back.
    corners = large.numpy()[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    np.testing.assert_array_equal(corners, small.numpy()[:, [0, 0, -1, -1], [0, -1, 0, -1]])


def test_a_second_run_says_that_it_is_there(data_dir, capsys):
    assert build.main(["build", "digits", f"--data_dir={data_dir}"]) == build.EXIT_DONE
    out, err = capsys.readouterr()
    assert out == f"digits is already there: {data_dir}/digits/1.0.0\n"
    assert not err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digts"], "Unknown dataset 'digts' (did you mean 'digits'?). Can be built: "),
        ([], "Name one source. Received: none."),
        (["a", "b"], "Received: a b."),
        (["digits", "--datadir=x"], "Unknown command line flag 'datadir'"),
    ],
)
def test_slips_are_one_clear_line(tmp_path, capsys, arguments, message):
    assert build.main(["build", *arguments]) == build.EXIT_USAGE
    out, err = capsys.readouterr()
    assert message in err and not out
    assert len(err.splitlines()) <= 3  # the line and how it is used


def test_help_names_the_datasets(capsys):
    assert build.main(["build", "--help"]) == build.EXIT_DONE
    assert "digits" in capsys.readouterr().out


def test_without_scikit_learn_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert build.main(["build", "digits", f"--data_dir={tmp_path}"]) == build.EXIT_DATA
    err = capsys.readouterr().err
    assert "pip install '.[digits]'" in err and len(err.splitlines()) == 1
    assert not os.path.exists(tmp_path / "digits" / "1.0.0")


def test_without_tensorflow_the_extra_is_named(tmp_path, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorflow" else find_spec(name))
    assert build.main(["build", "digits", f"--data_dir={tmp_path}"]) == build.EXIT_DATA
    assert "pip install '.[cpu]'" in capsys.readouterr().err
