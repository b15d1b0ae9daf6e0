"""A run on data with a damaged record: stopped with its place named, or trained without it, by choice."""

import json
import pathlib
import shutil

import pytest

from tests.conftest import Trainer

pytestmark = pytest.mark.slow

FLAGS = ["--model=mlp", "--train_steps=30", "--eval_every_steps=30"]
RECORD = 3


@pytest.fixture
def damaged(digits_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The digits with one flipped bit in a record of a training shard."""
    data_dir = tmp_path / "data"
    shutil.copytree(digits_dir, data_dir)
    (shard,) = data_dir.glob("digits/*/digits-train.tfrecord-00001-of-00004")
    content = bytearray(shard.read_bytes())
    length = len(content) // 375  # all records of a shard are of one length
    content[RECORD * length + length // 2] ^= 1
    shard.write_bytes(content)
    return data_dir


def test_default_stops_and_names_the_record(trainer: Trainer, damaged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = trainer.run(f"--data_dir={damaged}", f"--model_dir={tmp_path}/run", *FLAGS, code=78)
    assert "digits-train.tfrecord-00001-of-00004, record 3 at byte" in done.stderr
    assert "Traceback" not in done.stderr


def test_skip_trains_without_it_and_says_so(trainer: Trainer, damaged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    skip = ["--corrupt_records=skip", "--max_corrupt_records=1"]
    trainer.run(f"--data_dir={damaged}", f"--model_dir={tmp_path}/run", *FLAGS, *skip)
    (start,) = json.loads((tmp_path / "run" / "provenance.json").read_text())["starts"]
    (skipped,) = start["skipped_records"]
    assert "record 3" in skipped
    assert "1 left out" in start["data"]


def test_more_than_the_budget_is_refused(trainer: Trainer, damaged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (shard,) = damaged.glob("digits/*/digits-train.tfrecord-00002-of-00004")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    skip = ["--corrupt_records=skip", "--max_corrupt_records=1"]
    done = trainer.run(f"--data_dir={damaged}", f"--model_dir={tmp_path}/run", *FLAGS, *skip, code=78)
    assert "2" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
