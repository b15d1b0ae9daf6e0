"""Names to directories."""

import os
import pathlib
import subprocess
import sys

import pytest

from data import catalog, errors


def prepare(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir(parents=True)
    (directory / "dataset_info.json").write_text("{}")
    return directory


@pytest.fixture
def data_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    prepare(tmp_path / "mnist" / "3.0.9")
    prepare(tmp_path / "mnist" / "3.0.10")
    prepare(tmp_path / "mnist" / "incomplete.ABC_9.0.0")
    prepare(tmp_path / "glue" / "cola" / "1.0.0")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mnist", "mnist/3.0.10"),
        ("mnist/3.0.9", "mnist/3.0.9"),
        ("mnist:3.0.9", "mnist/3.0.9"),
        ("glue/cola", "glue/cola/1.0.0"),
    ],
)
def test_names_and_paths_are_found(data_dir, name, found):
    assert os.fspath(catalog.locate(name, str(data_dir))) == str(data_dir / found)
    assert os.fspath(catalog.locate(str(data_dir / name.replace(":", "/")), None)) == str(data_dir / found)


def test_the_default_data_dir_is_that_of_tfds(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert os.fspath(catalog.locate("mnist", None)) == str(data_dir / "mnist/3.0.10")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digits", "No dataset 'digits': .*holds glue/cola, mnist.*Build it: python -m data.build digits --data_dir="),
        ("mnits", "did you mean 'mnist'.*tfds build"),
        ("digts", "did you mean 'digits'"),
        ("glue", "No dataset 'glue'.*holds glue/cola"),
        ("", "No dataset ''"),
    ],
)
def test_unknown_names_say_what_there_is(data_dir, name, message):
    with pytest.raises(errors.DataError, match=message):
        catalog.locate(name, str(data_dir))
    with pytest.raises(errors.DataError, match=message):
        catalog.check_local(name, str(data_dir))


def test_the_check_before_tensorflow_imports_none_and_leaves_remote_paths_alone(data_dir):
    code = (
        "import sys; from data import catalog, spec; catalog.check_local('mnist', sys.argv[1]); "
        "catalog.check_local('mnist', 'gs://nowhere'); catalog.check_local('gs://nowhere/mnist', None); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(data_dir)], check=True)


def test_builders_are_found_by_file_name():
    assert "digits" in catalog.buildable()
    assert all(not name.startswith("_") for name in catalog.buildable())
