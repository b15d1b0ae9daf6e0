"""Faults of a dataset, and of the room that a run over it needs, planted in copies of the digits."""

import pathlib
import shutil

import pytest

from tests.doctor.looks import Look, look
from tests.doctor.test_machine import full_disk
from trainer.doctor import dataset
from trainer.doctor.findings import Finding

EXITS = {"how": "sys.exit(0)"}
TWO_WORKERS = '{"cluster": {"worker": [%s]}, "task": {"type": "worker", "index": 0}}'


@pytest.fixture(scope="module")
def found(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Finding]]:
    """What each look finds, by its name and the finding's."""
    directory = tmp_path_factory.mktemp("digits")

    def copy(name: str) -> pathlib.Path:
        shutil.copytree(digits_dir / "digits/1.0.0", directory / name)
        return directory / name

    sound, cut, damaged, bare = copy("sound"), copy("cut"), copy("damaged"), copy("bare")
    shard = "digits-train.tfrecord-00000-of-00004"
    (cut / shard).write_bytes((cut / shard).read_bytes()[:-100])
    content = bytearray((damaged / shard).read_bytes())
    content[20] ^= 0xFF  # of the first record
    (damaged / shard).write_bytes(content)
    (bare / "manifest.json").unlink()
    workers = TWO_WORKERS % ", ".join(f'"127.0.0.1:{port}"' for port in range(1, 7))
    small = tmp_path_factory.mktemp("small")
    (small / "sys/fs/cgroup").mkdir(parents=True)
    for name, value in ("memory.max", "1000000"), ("memory.current", "990000"):
        (small / "sys/fs/cgroup" / name).write_text(value)
    looks = {
        "sound": Look("dataset.dataset", {"dataset": str(sound)}),
        "missing": Look("dataset.dataset", {"dataset": "digit", "data_dir": str(digits_dir)}),
        "cut": Look("dataset.dataset", {"dataset": str(cut)}),
        "damaged": Look("dataset.dataset", {"dataset": str(damaged)}),
        "bare": Look("dataset.dataset", {"dataset": str(bare)}),
        "no split": Look("dataset.dataset", {"dataset": str(sound), "eval_split": "validation"}),
        "few shards": Look("dataset.dataset", {"dataset": str(sound)}, environ={"TF_CONFIG": workers}),
        "little memory": Look("dataset.dataset", {"dataset": str(sound)}, root=str(small)),
        "warm-up": Look("dataset.dataset", {"dataset": str(sound), "warmup": "200 steps"}),
        "room": Look("dataset.room", {"dataset": str(sound), "model_dir": str(directory / "run")}),
        "no room": Look("dataset.room", {"dataset": str(sound), "model_dir": str(directory / "full/run")}),
        "no room to stage": Look(
            "dataset.room",
            {"dataset": str(sound), "model_dir": "gs://bucket/run"},
            environ={"TMPDIR": str(directory / "full")},
        ),
        "bad model": Look(
            "dataset.room", {"dataset": str(sound), "model_dir": "/nowhere", "model_options": {"filter": 3}}
        ),
        "model that leaves": Look(
            "dataset.room",
            {"dataset": str(sound), "model_dir": "/nowhere", "model": "tests.models_that_fail", "model_options": EXITS},
        ),
        "a task": Look(
            "dataset.room",
            {
                "dataset": "synthetic",
                "model_dir": str(directory / "run"),
                "task": "language_model",
                "sequence_length": 4,
                "num_classes": 9,
                "model": "transformer",
                "model_options": {"width": 8, "heads": 2, "depth": 1},
            },
        ),
        "unread": Look("dataset.room", {"dataset": "/nowhere", "model_dir": "/nowhere"}),
    }
    with full_disk(directory / "full"):
        results = look(looks, {}, directory)
    return {name: {finding.name: finding for finding in findings} for name, findings in results.items()}


def statuses(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in findings.items()}


@pytest.mark.slow
def test_a_sound_dataset(found: dict[str, dict[str, Finding]]) -> None:
    assert set(statuses(found["sound"]).values()) == {"pass"}
    assert found["sound"]["split train"].what == "one record parses; files as the manifest says"
    assert "118, 11.7 an epoch, 3 of evaluation" in found["sound"]["steps"].what
    assert found["bare"]["split train"].what.endswith("there is no manifest")


@pytest.mark.slow
def test_faults_of_datasets(found: dict[str, dict[str, Finding]]) -> None:
    missing = found["missing"]["dataset.dataset"]
    assert missing.status == "fail" and "did you mean 'digits'" in missing.what
    cut, damaged = found["cut"]["split train"], found["damaged"]["split train"]
    assert cut.status == "fail" and "00000-of-00004 holds" in cut.what and "the manifest says" in cut.what
    assert damaged.status == "fail" and "00000-of-00004" in damaged.what and "record 0" in damaged.what
    assert found["damaged"]["split test"].status == "pass"
    gone = found["no split"]["split validation"]
    assert gone.status == "warn" and "--mode=train does without" in gone.remedy
    few = found["few shards"]["shards"]
    assert few.status == "warn" and "4 shards for 6 hosts" in few.what and "6 shards or a multiple" in few.remedy
    memory = found["little memory"]["input memory"]
    assert memory.status == "fail" and "0 MiB available" in memory.what and "--shuffle_mib" in memory.remedy
    assert found["warm-up"]["steps"].status == "fail" and "200 of 118" in found["warm-up"]["steps"].what


@pytest.mark.slow
def test_room_for_checkpoints(found: dict[str, dict[str, Finding]]) -> None:
    assert statuses(found["room"]) == statuses(found["a task"]) == {"checkpoint room": "pass"}
    full, stage = found["no room"]["checkpoint room"], found["no room to stage"]["checkpoint room"]
    assert full.status == "fail" and "MiB needed" in full.what
    assert (stage.status, stage.retryable) == ("fail", True) and "where it is staged" in stage.what
    assert statuses(found["bad model"]) == {"model": "fail"} and "'filter'" in found["bad model"]["model"].what
    left = found["model that leaves"]["model"]
    assert left.status == "fail" and "models_that_fail.py" in left.what and "SystemExit: 0" in left.what
    assert dataset.room_unfinished("its process ended by SIGKILL").status == "fail"
    assert dataset.room_unfinished("no answer within 28 s").status == "skipped"
    assert statuses(found["unread"]) == {"checkpoint room": "skipped"}
