"""The same build as an Apache Beam pipeline, in an environment of its own: Beam clashes with constraints.txt."""

import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import build

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def beam_python(tmp_path_factory) -> pathlib.Path:
    """Python of an environment with the extra `beam`; $BEAM_PYTHON names one that is there already."""
    if "BEAM_PYTHON" in os.environ:
        return pathlib.Path(os.environ["BEAM_PYTHON"])
    directory = tmp_path_factory.mktemp("beam")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--editable", f"{ROOT}[cpu,beam]"], check=True)
    return python


def write_photos(path: pathlib.Path) -> None:
    for i in range(40):
        image = tf.io.encode_png(np.full((3, 3 + i % 2, 3), i, np.uint8)).numpy()
        (path / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (path / "ab"[i % 2] / f"{i}.png").write_bytes(image)


def write_table(path: pathlib.Path) -> None:
    rows = [f"{i},{'xyz'[i % 3]},{i / 7},{'no' if i % 2 else 'yes'}" for i in range(200)]
    rows += rows[:30]  # rows that are there twice
    random.Random(0).shuffle(rows)
    path.write_text("\n".join(["a,b,c,label", *rows]))


def write_arrays(path: pathlib.Path) -> None:
    np.savez(path, x_train=np.arange(80.0).reshape(40, 2), y_train=np.arange(40.0), x_test=np.eye(2), y_test=np.ones(2))


def records(directory: pathlib.Path) -> dict[str, list[bytes]]:
    """The records of each split, sorted."""
    builder = tfds.builder_from_directory(directory)
    found = {}
    for name, split in builder.info.splits.items():
        paths = [os.fspath(path) for path in split.filepaths]
        found[name] = sorted(tf.data.TFRecordDataset(paths).as_numpy_iterator())
        assert len(found[name]) == split.num_examples
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("write", "name", "flags"),
    [
        (write_photos, "photos", ["--splits=train=0.5,test=0.5"]),
        (write_table, "table.csv", []),
        (write_table, "table.csv", ["--key=a", "--missing=drop"]),
        (write_arrays, "arrays.npz", []),
    ],
)
def test_beam_writes_the_same_records(beam_python, tmp_path, write, name, flags):
    write(tmp_path / name)
    if "--key=a" in flags:
        lines = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([*dict.fromkeys(lines), "500,x,,yes"]))
    arguments = [str(tmp_path / name), "--name=d", *flags]
    assert build.main(["build", *arguments, f"--data_dir={tmp_path / 'local'}"]) == build.EXIT_DONE
    command = [beam_python, "-m", "data.build", *arguments, f"--data_dir={tmp_path / 'beam'}"]
    subprocess.run([*command, "--beam_runner=DirectRunner"], cwd=ROOT, check=True)
    local, beam = tmp_path / "local" / "d" / "1.0.0", tmp_path / "beam" / "d" / "1.0.0"
    assert records(beam) == records(local)
    for file in ("features.json", "metadata.json", *(path.name for path in local.glob("*.labels.txt"))):
        assert (beam / file).read_text() == (local / file).read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_dataflow_needs_a_bucket(beam_python, tmp_path):
    write_table(tmp_path / "t.csv")
    command = [beam_python, "-m", "data.build", str(tmp_path / "t.csv"), f"--data_dir={tmp_path}"]
    done = subprocess.run([*command, "--beam_runner=DataflowRunner"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == build.EXIT_USAGE and "--data_dir=gs://BUCKET/DIR" in done.stderr


def test_without_beam_its_environment_is_told(tmp_path, capsys):
    write_table(tmp_path / "t.csv")
    arguments = ["build", str(tmp_path / "t.csv"), f"--data_dir={tmp_path / 'out'}", "--beam_runner=DirectRunner"]
    assert build.main(arguments) == build.EXIT_USAGE
    assert "pip install '.[cpu,beam]'" in capsys.readouterr().err
