"""Datasets on gs://: built from and to a bucket, audited, repaired, and read by runs."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import gcs
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from tests.data.test_service import Machine
from tests.gcs import NO_BUCKETS_GET, Fault, Gcs

pytestmark = pytest.mark.slow

RUN = ["--model=mlp", "--mode=train", "--train_steps=20"]
DENIED = {"code": 403, "times": None}
UNWELL = {"code": 503, "times": None}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    with gcs.serve(tmp_path_factory.mktemp("gcs")) as server:
        server.set_faults(NO_BUCKETS_GET)
        yield server


@pytest.fixture(scope="module")
def dataset(bucket: Gcs, digits_dir: pathlib.Path) -> str:
    """The data_dir, on gs://, of digits that were built there, by the command whose first process was killed.

    What that one left is no dataset.
    """
    url = f"{bucket.url}/data"
    with hurt(bucket, Fault(delay_secs=GUARD_SECS, times=None, path="rewriteTo.*o/data/digits/1.0.0/digits-train")):
        process = subprocess.Popen(build_command("digits", f"--data_dir={url}"), cwd=ROOT, env=environ(bucket))
        try:
            for name in ("digits-train", "features.json"):  # the last of the objects by name
                wait_for_request(bucket, f"/rewriteTo/b/{gcs.BUCKET}/o/data/digits/1.0.0/{name}", process)
        finally:
            process.kill()
        assert process.wait(GUARD_SECS) == -signal.SIGKILL
    there = [name for name in bucket.objects() if name.startswith("data/digits/1.0.0/")]
    assert there and "data/digits/1.0.0/dataset_info.json" not in there
    again = build(bucket, "digits", f"--data_dir={url}")
    assert "digits is built" in again.stdout and "gcloud storage rm -r gs://" in again.stderr
    # Not by their bytes: TFDS leaves the order of a record's features to protobuf, where it changes between processes.
    expected = {path.name: path.stat().st_size for path in (digits_dir / "digits" / "1.0.0").iterdir()}
    built = {name: size for name, size in bucket.objects().items() if name.startswith("data/digits/1.0.0/")}
    assert {name.rpartition("/")[2]: size for name, size in built.items()} == expected
    return url


def environ(bucket: Gcs) -> dict[str, str]:
    return clean_environ() | bucket.environ(max_retries=2) | {"NO_GCE_CHECK": "true"}


def build_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "data.build", *arguments]


def build(bucket: Gcs, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    return command(bucket, "data.build", *arguments, code=code)


def command(bucket: Gcs, module: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environ(bucket),
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def train(bucket: Gcs, data_dir: str, name: str, *flags: str, code: int = 0) -> subprocess.CompletedProcess:
    trainer = Trainer(data_dir)  # type: ignore[arg-type]
    return trainer.run(f"--model_dir={bucket.url}/{name}", *RUN, *flags, code=code, environ=environ(bucket))


@contextlib.contextmanager
def hurt(bucket: Gcs, *faults: Fault) -> Iterator[None]:
    bucket.set_faults(*faults, NO_BUCKETS_GET)
    try:
        yield
    finally:
        bucket.set_faults(NO_BUCKETS_GET)


def wait_for_request(bucket: Gcs, part: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + GUARD_SECS
    while not any(part in request["path"] for request in bucket.log()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_bad_records_are_found_and_left_out_of_a_run(bucket: Gcs, dataset: str) -> None:
    name = "data/digits/1.0.0/digits-train.tfrecord-00001-of-00004"
    sound = bucket.read(name)
    bucket.write(name, sound[:500] + bytes([sound[500] ^ 1]) + sound[501:])
    try:
        found = command(bucket, "data.audit", f"{dataset}/digits", "--write_quarantine", code=78).stdout
        assert "digits-train.tfrecord-00001-of-00004" in found and "data_crc" in found
        flags = ["--corrupt_records=skip", "--max_corrupt_records=1", "--cache=memory"]
        train(bucket, dataset, "repaired", *flags)
        repaired = [path for path in bucket.objects() if path.startswith("repaired/repaired/")]
        assert len(repaired) == 1 and repaired[0].endswith("-digits-train.tfrecord-00001-of-00004")
        starts = json.loads(bucket.read("repaired/provenance.json"))["starts"]
        assert ["digits-train.tfrecord-00001-of-00004, record 1" in text for text in starts[0]["skipped_records"]]
    finally:
        bucket.write(name, sound)
        bucket.remove("data/digits/1.0.0/quarantine.json")


@pytest.mark.nightly
def test_what_is_built_is_not_built_again_and_bad_records_are_refused_by_default(bucket: Gcs, dataset: str) -> None:
    assert "digits is already there: gs://" in build(bucket, "digits", f"--data_dir={dataset}").stdout
    quarantine = "data/digits/1.0.0/quarantine.json"
    file = "digits-train.tfrecord-00001-of-00004"
    entry = {"bytes": bucket.objects()[f"data/digits/1.0.0/{file}"], "records": {"3": "data_crc"}}
    bucket.write(quarantine, json.dumps({"format": 1, "shards": {file: entry}}).encode())
    try:
        assert "lists 1 bad records" in train(bucket, dataset, "refused", code=78).stderr
    finally:
        bucket.remove(quarantine)


@pytest.mark.nightly
def test_a_table_on_gs_builds_the_same_records_as_a_local_one(bucket: Gcs, tmp_path: pathlib.Path) -> None:
    rows = "".join(f"{number % 50},{number * 3 % 17}.5,{'yes' if number % 3 else 'no'}\n" for number in range(300))
    (tmp_path / "people.csv").write_text(f"age,height,label\n{rows}")
    bucket.write("raw/people.csv", (tmp_path / "people.csv").read_bytes())
    build(bucket, f"{tmp_path}/people.csv", f"--data_dir={tmp_path}")
    build(bucket, f"{bucket.url}/raw/people.csv", f"--data_dir={bucket.url}/tables")
    shards = sorted((tmp_path / "people" / "1.0.0").glob("*.tfrecord*"))
    assert len(shards) > 3
    for path in shards:
        assert bucket.read(f"tables/people/1.0.0/{path.name}") == path.read_bytes()


TRAIN_SHARD = "digits-train.tfrecord-00002-of-00004(?!.*fields)"  # its content


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault(**DENIED, path="data/digits/dataset_info"), 78, "storage.objects.get is missing for gs://"),
        (Fault(**DENIED, path=TRAIN_SHARD), 78, "is missing for gs://loopback-bucket/data/digits/1.0.0/digits-train"),
        (
            Fault(**DENIED, path=TRAIN_SHARD, message="sa@x does not have storage.objects.get access to it."),
            78,
            "no permission: storage.objects.get is missing for gs://loopback-bucket/data/digits/1.0.0/digits-train",
        ),
        (Fault(**DENIED, path="denied", method="DELETE"), 78, "storage.objects.delete is missing for gs://"),
        (Fault(**DENIED, path="denied", method="POST|PUT"), 78, "storage.objects.create is missing for gs://"),
        (Fault(**DENIED, path="prefix=denied"), 78, "storage.objects.list is missing for gs://loopback-bucket/denied"),
        (Fault(code=401, times=None, message="Invalid Credentials"), 78, "gcloud auth application-default login"),
        (Fault(code=400, times=None, message="Bucket is requester pays bucket but no user project"), 78, "bills its"),
        (Fault(**UNWELL, path=TRAIN_SHARD), 75, "503"),
        (Fault(drop="response", times=None, path=TRAIN_SHARD), 75, "libcurl code 18"),
        (Fault(code=429, times=None, path="data/digits/dataset_info"), 75, "429"),
        (Fault(**UNWELL, path="denied/config.json"), 75, "503"),
    ],
)
def test_what_a_bucket_refuses_is_told_in_a_line(
    bucket: Gcs, dataset: str, fault: Fault, code: int, words: str
) -> None:
    with hurt(bucket, fault):
        err = train(bucket, dataset, "denied", code=code).stderr
    assert words in err.splitlines()[-1] and "Traceback" not in err
    assert "export" not in err.splitlines()[-1]


@pytest.mark.nightly
def test_a_bucket_that_is_not_there_is_told_and_not_waited_for(bucket: Gcs, dataset: str) -> None:
    trainer = Trainer(dataset)  # type: ignore[arg-type]
    nowhere = "gs://no-such-bucket/x"
    err = trainer.run(f"--model_dir={nowhere}", *RUN, code=78, environ=environ(bucket)).stderr
    assert "there is no bucket gs://no-such-bucket." in err
    assert "there is no bucket" in build(bucket, "digits", f"--data_dir={nowhere}", code=78).stderr
    assert "No dataset" in command(bucket, "data.audit", f"{nowhere}/digits", code=78).stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "code"), [(DENIED, 78), (UNWELL, 75)], ids=["denied", "unwell"])
def test_commands_on_data_tell_what_a_bucket_refuses(bucket: Gcs, dataset: str, fault: dict, code: int) -> None:
    with hurt(bucket, Fault(**fault, path="other|digits")):
        for done in (
            build(bucket, "digits", f"--data_dir={bucket.url}/other", code=code),
            command(bucket, "data.audit", f"{dataset}/digits", code=code),
        ):
            assert len(done.stderr.splitlines()) == 1 and "gs://" in done.stderr


@pytest.mark.nightly
def test_other_sources_are_read_from_gs(bucket: Gcs, tmp_path: pathlib.Path) -> None:
    import io

    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(0)
    for number in range(60):
        image = io.BytesIO()
        Image.fromarray(chance.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(image, "PNG")
        bucket.write(f"raw/photos/{'cat' if number % 2 else 'dog'}/{number}.png", image.getvalue())
    arrays = io.BytesIO()
    np.savez(arrays, x=chance.normal(size=(200, 4)).astype("f4"), y=chance.integers(0, 3, 200))
    bucket.write("raw/arrays.npz", arrays.getvalue())
    data_dir = f"--data_dir={bucket.url}/sources"
    build(bucket, f"{bucket.url}/raw/photos", data_dir)
    build(bucket, f"{bucket.url}/raw/arrays.npz", "--label_kind=class", data_dir)
    for name in ("photos", "arrays"):
        assert "Clean" in command(bucket, "data.audit", f"{bucket.url}/sources/{name}").stdout


@pytest.mark.nightly
def test_copies_of_shards_on_gs(bucket: Gcs, dataset: str, tmp_path: pathlib.Path) -> None:
    train(bucket, dataset, "cached", "--cache=disk", f"--cache_dir={tmp_path}")
    assert sum("digits-train" in path.name for path in tmp_path.iterdir()) == 4
    err = train(bucket, dataset, "uncached", "--cache=disk", f"--cache_dir={bucket.url}/cache", code=78).stderr
    assert "cache_dir must be on a disk of this machine. Received: 'gs://" in err


@pytest.mark.nightly
def test_machines_that_help_read_gs_too(bucket: Gcs, dataset: str) -> None:
    helper = Machine(environ=bucket.environ())
    try:
        train(bucket, dataset, "helped", f"--data_service={helper.wait().address}")
        train(bucket, dataset, "alone")
        assert losses(bucket, "helped") == losses(bucket, "alone")
    finally:
        helper.end()


def losses(bucket: Gcs, name: str) -> list[float]:
    return [json.loads(line)["train/loss"] for line in bucket.read(f"{name}/metrics.jsonl").decode().splitlines()]
