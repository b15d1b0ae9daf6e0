"""Corrupt records in training: a stop that names the record, or repaired shards that move no other record."""

import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import audit, errors, manifest, pipeline, quarantine, review, scan

SHARDS, RECORDS = 3, 10
BAD = f"counted-train.tfrecord-00001-of-0000{SHARDS}"


@pytest.fixture(scope="module")
def clean(write_tfds: Callable[..., str]) -> pathlib.Path:
    """30 records of uneven length in 3 shards; number is their position in the split."""
    features = {"x": tfds.features.Text(), "number": tfds.features.Scalar(np.int64)}
    examples = [{"x": "x" * number, "number": number} for number in range(SHARDS * RECORDS)]
    directory = write_tfds("counted", features, ("number", "number"), {"train": examples}, num_shards=SHARDS)
    return pathlib.Path(directory) / "counted/1.0.0"


@pytest.fixture
def dataset(clean, tmp_path) -> pathlib.Path:
    """A copy to spoil."""
    return pathlib.Path(shutil.copytree(clean, tmp_path / "counted" / "1.0.0"))


def info_of(directory: pathlib.Path):
    return pipeline.open_dataset(str(directory)).info


def records_of(path: str | pathlib.Path) -> list[bytes]:
    return [record.numpy() for record in tf.data.TFRecordDataset(str(path))]


def numbers_of(path: str | pathlib.Path) -> list[int]:
    examples = [tf.train.Example.FromString(record) for record in records_of(path)]
    return [example.features.feature["number"].int64_list.value[0] for example in examples]


def begin(path: pathlib.Path, number: int) -> int:
    data, offset = path.read_bytes(), 0
    for _ in range(number):
        offset += int.from_bytes(data[offset : offset + 8], "little") + 16
    return offset


def flip(path: pathlib.Path, *numbers: int, at: int = 12) -> None:
    """One bit of the data (`at` 12) or length (0) of records."""
    places = [begin(path, number) + at for number in numbers]
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


def rewrite(path: pathlib.Path, number: int, edit: Callable[[bytes], bytes]) -> None:
    """Writes a shard with one record changed."""
    records = records_of(path)
    records[number] = edit(records[number])
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def lose_feature(path: pathlib.Path, number: int) -> None:
    """In as many bytes, as a missing byte would already be told by dataset_info.json."""
    rewrite(path, number, lambda record: record.replace(b"number", b"nubmer"))


def prepare(directory: pathlib.Path, skip: bool = True, max_records: int = 3, cache: str = "cache"):
    return quarantine.prepare(
        info_of(directory),
        "train",
        skip=skip,
        max_records=max_records,
        cache_dir=str(directory.parent / cache),
        threads=2,
    )


def bad_records(found: quarantine.Prepared) -> list[tuple[str, int, str]]:
    return [(os.path.basename(record.path), record.record, record.reason) for record in found.skipped]


def test_clean_data_is_read_as_it_is(dataset):
    assert prepare(dataset, max_records=0) == quarantine.Prepared({}, [], "")
    assert prepare(dataset, skip=False) == quarantine.Prepared({}, [], "")


def test_identity_tells_whether_a_run_goes_on_with_the_same_records(dataset, capsys):
    assert prepare(dataset).identity() == "records without a manifest, none left out"
    assert audit.main(["audit", str(dataset), "--write_manifest"]) == audit.EXIT_CLEAN
    sound = prepare(dataset).identity()
    assert sound == prepare(dataset).identity() and "none left out" in sound
    flip(dataset / BAD, 2)
    one = prepare(dataset).identity()
    flip(dataset / BAD, 3)
    two = prepare(dataset).identity()
    assert "1 left out" in one and "2 left out" in two


def test_a_bad_record_is_replaced_and_no_other_moves(dataset):
    flip(dataset / BAD, 2, 7)
    found = prepare(dataset)
    assert bad_records(found) == [(BAD, 2, "data_crc"), (BAD, 7, "data_crc")]
    (copy,) = found.copies.values()
    assert list(found.copies) == [str(dataset / BAD)]
    # Good ones are 0 1 3 4 5 6 8 9; the first bad one takes good one 0, the second good one 4.
    assert numbers_of(copy) == [10, 11, 10, 13, 14, 15, 16, 15, 18, 19]


@pytest.mark.parametrize(
    ("spoil", "bad", "numbers"),
    [
        (lambda p: flip(p, 0), {0: "data_crc"}, [11, 11, 12, 13, 14, 15, 16, 17, 18, 19]),
        (lambda p: flip(p, 3, at=0), {3: "length_crc"}, [10, 11, 12, 10, 14, 15, 16, 17, 18, 19]),
        (
            lambda p: os.truncate(p, begin(p, 8) + 20),
            {8: "truncated", 9: "missing_record"},
            [10, 11, 12, 13, 14, 15, 16, 17, 10, 14],
        ),
        (
            lambda p: os.truncate(p, begin(p, 9)),
            {9: "missing_record"},
            [10, 11, 12, 13, 14, 15, 16, 17, 18, 10],
        ),
        (
            lambda p: p.write_bytes(p.read_bytes() + p.read_bytes()[: begin(p, 1)]),
            {10: "surplus_record"},
            list(range(10, 20)),
        ),
    ],
)
@pytest.mark.parametrize("lists", [True, False])
def test_shards_of_every_fault_keep_their_count(dataset, capsys, spoil, bad, numbers, lists):
    spoil(dataset / BAD)
    if lists:
        assert audit.main(["audit", str(dataset), "--write_quarantine"]) == audit.EXIT_DATA
    found = prepare(dataset)
    assert bad_records(found) == [(BAD, number, reason) for number, reason in bad.items()]
    assert numbers_of(found.copies[str(dataset / BAD)]) == numbers


def test_more_bad_records_than_good_ones_take_turns(dataset):
    flip(dataset / BAD, 0, 1, 2, 4, 5, 6, 8, 9)
    copies = prepare(dataset, max_records=8).copies
    assert numbers_of(copies[str(dataset / BAD)]) == [13] * 5 + [17] * 5


def test_every_host_and_every_restart_gets_the_same_copy(dataset):
    flip(dataset / BAD, 2, 7)
    (first,) = prepare(dataset, cache="host_0").copies.values()
    (second,) = prepare(dataset, cache="host_1").copies.values()
    assert first != second and pathlib.Path(first).read_bytes() == pathlib.Path(second).read_bytes()
    written = os.stat(first).st_mtime_ns
    assert prepare(dataset, cache="host_0").copies == {str(dataset / BAD): first}
    assert os.stat(first).st_mtime_ns == written  # found again, not written again
    flip(dataset / BAD, 5)
    (third,) = prepare(dataset, cache="host_0").copies.values()
    assert third != first
    assert os.listdir(pathlib.Path(first).parent) and not list(pathlib.Path(first).parent.glob("*.incomplete"))


def test_a_changed_shard_with_the_same_bad_records_gets_a_new_copy(clean, dataset):
    flip(dataset / BAD, 2)
    (before,) = prepare(dataset).copies.values()
    shutil.copy(clean / BAD, dataset / BAD)
    rewrite(dataset / BAD, 4, lambda record: record.replace(b"xx", b"yy"))
    flip(dataset / BAD, 2)
    (after,) = prepare(dataset).copies.values()
    assert before != after and records_of(after)[4] == records_of(before)[4].replace(b"xx", b"yy")


def test_the_quarantine_list_is_honoured_also_for_what_no_sum_tells(dataset, capsys):
    lose_feature(dataset / BAD, 4)
    assert prepare(dataset).skipped == []  # its bytes are sound
    assert audit.main(["audit", str(dataset), "--write_quarantine", "--write_manifest"]) == audit.EXIT_DATA
    found = prepare(dataset, max_records=1)
    assert bad_records(found) == [(BAD, 4, "missing_feature")]
    assert numbers_of(found.copies[str(dataset / BAD)])[3:6] == [13, 10, 15]
    with pytest.raises(errors.DataError, match=f"lists 1 bad records.*{BAD}, record 4 .*--max_corrupt_records=1"):
        prepare(dataset, skip=False)


def test_duplicates_are_not_left_out(dataset, capsys):
    rewrite(dataset / BAD, 1, lambda record: records_of(dataset / BAD)[0])
    assert audit.main(["audit", str(dataset), "--write_quarantine", "--write_manifest"]) == audit.EXIT_DATA
    assert prepare(dataset, max_records=0).skipped == []


def test_more_than_the_budget_is_refused(dataset):
    flip(dataset / BAD, 2, 7)
    with pytest.raises(errors.DataError, match=f"2 bad records .*max_corrupt_records=1: .*{BAD}, record 2 .data_crc"):
        prepare(dataset, max_records=1)


def test_a_shard_with_nothing_good_is_refused(dataset, capsys):
    flip(dataset / BAD, *range(RECORDS))
    with pytest.raises(errors.DataError, match="holds no good record"):
        prepare(dataset, max_records=99)
    assert audit.main(["audit", str(dataset), "--write_quarantine"]) == audit.EXIT_DATA
    assert "too many bad records to leave out: 10 or more of 10" in capsys.readouterr().err
    (dataset / BAD).unlink()
    with pytest.raises(errors.DataError, match=f"{BAD} is missing or empty"):
        prepare(dataset)


def test_a_list_of_other_files_is_refused(dataset, capsys):
    flip(dataset / BAD, 2)
    assert audit.main(["audit", str(dataset), "--write_quarantine"]) == audit.EXIT_DATA
    os.truncate(dataset / BAD, 200)
    with pytest.raises(errors.DataError, match=f"out of date: .*{BAD} holds 200 bytes"):
        prepare(dataset)
    (dataset / quarantine.FILE).write_text('{"format": 1}')
    with pytest.raises(errors.DataError, match="is no quarantine list"):
        prepare(dataset)


def test_known_damage_passes_the_manifest_and_new_damage_does_not(dataset, capsys):
    os.truncate(dataset / BAD, begin(dataset / BAD, 9))
    assert audit.main(["audit", str(dataset), "--write_quarantine", "--write_manifest"]) == audit.EXIT_DATA
    assert len(prepare(dataset).skipped) == 1
    other = dataset / BAD.replace("00001-", "00002-")
    os.truncate(other, 100)
    with pytest.raises(errors.DataError, match="00002-of.* holds 100 bytes, the manifest says"):
        prepare(dataset)


def train(directory: pathlib.Path, hosts: int, start_step: int = 0, copies: dict | None = None) -> list[list[int]]:
    """Numbers of the global batches of 6 up to step 12, which is in the third epoch of 30."""
    dataset = pipeline.open_dataset(str(directory))
    shares = [
        pipeline.train_batches(
            dataset,
            global_batch_size=6,
            per_replica_batch_size=6 // hosts,
            seed=1,
            shuffle_mib=0.001,
            start_step=start_step,
            host_index=host,
            num_hosts=hosts,
            copies=copies,
        ).take(12 - start_step)
        for host in range(hosts)
    ]
    return [np.concatenate([y for _, y in batches]).tolist() for batches in zip(*shares, strict=True)]


def test_positions_epochs_hosts_and_restarts_keep_their_arithmetic(dataset):
    sound = train(dataset, hosts=1)
    flip(dataset / BAD, 2, 7)
    copies = prepare(dataset).copies
    repaired = train(dataset, hosts=1, copies=copies)
    stand_ins = {12: 10, 17: 15}
    assert repaired == [[stand_ins[number] if number in stand_ins else number for number in step] for step in sound]
    assert train(dataset, hosts=2, start_step=7, copies=copies) == repaired[7:]


def test_a_shard_of_another_count_is_named(dataset):
    os.truncate(dataset / BAD, begin(dataset / BAD, 9))
    with pytest.raises(tf.errors.OpError) as caught:
        train(dataset, hosts=1)
    message = review.explain(info_of(dataset), "train", caught.value)
    assert f"{BAD}: the shard holds 9 records, dataset_info.json counts 10 [count_mismatch]" in message


def test_training_stops_at_a_bad_record_which_is_named(dataset):
    flip(dataset / BAD, 6)
    offset = begin(dataset / BAD, 6)
    with pytest.raises(tf.errors.DataLossError) as caught:
        train(dataset, hosts=1)
    assert f"{BAD}, record 6 at byte {offset}: " in review.explain(info_of(dataset), "train", caught.value)


@pytest.mark.parametrize(
    ("spoil", "kind", "number"),
    [
        (lambda p: flip(p, 6), "data_crc", 6),
        (lambda p: flip(p, 6, at=0), "length_crc", 6),
        (lambda p: os.truncate(p, begin(p, 7) + 30), "truncated", 7),
        (lambda p: lose_feature(p, 5), "missing_feature", 5),
        (lambda p: rewrite(p, 5, lambda record: b"\xff" * len(record)), "not_an_example", 5),
    ],
)
def test_an_error_in_reading_names_the_record(dataset, spoil, kind, number):
    spoil(dataset / BAD)
    offset = begin(dataset / BAD, number)
    info = info_of(dataset)
    spec = {"number": tf.io.FixedLenFeature([], tf.int64)}
    paths = tf.data.Dataset.from_tensor_slices([shard.path for shard in scan.shards_of(info)])
    batches = paths.interleave(lambda path: tf.data.TFRecordDataset(path).batch(4), cycle_length=3)
    # TensorFlow quotes what does not parse, and fails to make its own error where that is not UTF-8.
    with pytest.raises((tf.errors.OpError, UnicodeDecodeError)) as caught:
        for _ in batches.map(lambda records: tf.io.parse_example(records, spec)):
            pass
    message = review.explain(info, "train", caught.value)
    assert f"{BAD}, record {number} at byte {offset}: " in message and f"[{kind}]" in message
    assert f"python -m data.audit {dataset} --splits=train --write_quarantine" in message


def test_errors_of_other_things_are_not_explained(dataset):
    info = info_of(dataset)
    assert review.explain(info, "train", ValueError("Incompatible shapes: [3] vs. [4]")) is None
    # On sound files there is nothing to name: TensorFlow's own words stay.
    assert review.explain(info, "train", tf.errors.DataLossError(None, None, "corrupted record at 12")) is None
    assert manifest.verify(info) is None
