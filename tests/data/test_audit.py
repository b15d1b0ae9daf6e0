"""python -m data.audit: every kind of fault, planted in real files, is found where it is, and nothing on clean data."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import audit, findings, scan

ROOT = pathlib.Path(__file__).parents[2]
SHARDS, RECORDS = 3, 10  # of split train
BAD_SHARD, BAD_RECORD = 1, 4  # where faults are planted
FILE = f"mixed-train.tfrecord-0000{BAD_SHARD}-of-0000{SHARDS}"


def example(number: int, split: int) -> dict:
    rng = np.random.default_rng([split, number])
    return {
        "image": rng.integers(0, 256, (8, 6, 3), np.uint8),
        "photo": rng.integers(0, 256, (5 + number, 4, 3), np.uint8),
        "raw": rng.integers(0, 256, (4,), np.int16),
        "small": rng.integers(0, 256, (2,), np.uint8),
        "real": rng.normal(size=(3,)).astype(np.float32),
        "nested": {"flag": bool(number % 2), "words": [str(number)] * (number % 3)},
        "id": f"{split}-{number}",
        "label": number % 4,
    }


@pytest.fixture(scope="module")
def clean(write_tfds: Callable[..., str]) -> pathlib.Path:
    """A dataset with many kinds of features, as TFDS writes it."""
    features = {
        "image": tfds.features.Image(shape=(8, 6, 3), encoding_format="png"),
        "photo": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "raw": tfds.features.Tensor(shape=(4,), dtype=np.int16, encoding=tfds.features.Encoding.BYTES),
        "small": tfds.features.Tensor(shape=(2,), dtype=np.uint8),
        "real": tfds.features.Tensor(shape=(3,), dtype=np.float32),
        "nested": {"flag": np.bool_, "words": tfds.features.Sequence(tfds.features.Text())},
        "id": tfds.features.Text(),
        "label": tfds.features.ClassLabel(num_classes=4),
    }
    splits = {
        "train": [example(number, 0) for number in range(SHARDS * RECORDS)],
        "test": [example(number, 1) for number in range(SHARDS)],
    }
    return pathlib.Path(write_tfds("mixed", features, ("image", "label"), splits, num_shards=SHARDS)) / "mixed/1.0.0"


@pytest.fixture
def dataset(clean, tmp_path) -> pathlib.Path:
    """A copy to spoil."""
    return pathlib.Path(shutil.copytree(clean, tmp_path / "mixed" / "1.0.0"))


def read(path: pathlib.Path) -> list[bytes]:
    return [record.numpy() for record in tf.data.TFRecordDataset(str(path))]


def write(path: pathlib.Path, records: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def offset_of(path: pathlib.Path, number: int) -> int:
    return sum(len(record) + 16 for record in read(path)[:number])


def report(*arguments: str | pathlib.Path, capsys, code: int) -> dict:
    assert audit.main(["audit", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def flip(at: int, from_end: bool = False) -> Callable:
    """Flips one bit, `at` bytes from the begin or end of the record."""

    def spoil(path: pathlib.Path) -> None:
        begin = offset_of(path, BAD_RECORD + from_end)
        data = bytearray(path.read_bytes())
        data[begin + at] ^= 1
        path.write_bytes(data)

    return spoil


def change(edit: Callable[[dict], None]) -> Callable:
    """Rewrites one record as another tf.train.Example."""

    def spoil(path: pathlib.Path) -> None:
        records = read(path)
        proto = tf.train.Example.FromString(records[BAD_RECORD])
        edit(proto.features.feature)
        records[BAD_RECORD] = proto.SerializeToString()
        write(path, records)

    return spoil


def put(key: str, **lists: list) -> Callable:
    """Gives a feature other values."""
    kinds = {
        "ints": ("int64_list", "Int64List"),
        "reals": ("float_list", "FloatList"),
        "texts": ("bytes_list", "BytesList"),
    }
    ((kind, values),) = lists.items()
    field, message = kinds[kind]
    return change(
        lambda feature: feature[key].CopyFrom(tf.train.Feature(**{field: getattr(tf.train, message)(value=values)}))
    )


def replace(record: Callable[[list[bytes]], list[bytes]]) -> Callable:
    return lambda path: write(path, record(read(path)))


def png(*shape: int) -> bytes:
    return tf.io.encode_png(np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)).numpy()


def jpeg(*shape: int) -> bytes:
    return tf.io.encode_jpeg(np.full(shape, 7, np.uint8)).numpy()


# name: (how to spoil a shard, kind, number of the bad record or None, what the message says)
FAULTS = {
    "bit of the length": (flip(0), "length_crc", BAD_RECORD, "length"),
    "high bit of the length": (flip(7), "length_crc", BAD_RECORD, "length"),
    "bit of the sum of the length": (flip(9), "length_crc", BAD_RECORD, "length"),
    "first bit of the data": (flip(12), "data_crc", BAD_RECORD, "data"),
    "last bit of the data": (flip(-5, from_end=True), "data_crc", BAD_RECORD, "data"),
    "bit of the sum of the data": (flip(-1, from_end=True), "data_crc", BAD_RECORD, "data"),
    "cut in the data": (
        lambda p: os.truncate(p, p.stat().st_size - 9),
        "truncated",
        RECORDS - 1,
        "bytes into a record",
    ),
    "cut in the length": (
        lambda p: os.truncate(p, offset_of(p, RECORDS - 1) + 5),
        "truncated",
        RECORDS - 1,
        "ends 5 bytes into a record",
    ),
    "cut between records": (
        lambda p: os.truncate(p, offset_of(p, RECORDS - 1)),
        "count_mismatch",
        None,
        "holds 9 records, dataset_info.json counts 10",
    ),
    "a few bytes too many": (lambda p: p.write_bytes(p.read_bytes() + b"\0\0\0"), "truncated", RECORDS, "3 bytes into"),
    "many bytes too many": (lambda p: p.write_bytes(p.read_bytes() + b"\0" * 99), "length_crc", RECORDS, "length"),
    "empty file": (lambda p: p.write_bytes(b""), "empty_file", None, "empty"),
    "missing file": (lambda p: p.unlink(), "missing_file", None, "missing"),
    "compressed": (lambda p: p.write_bytes(__import__("gzip").compress(p.read_bytes())), "length_crc", 0, "gzip"),
    "a record too many": (replace(lambda r: [*r, r[0] + r[1]]), "count_mismatch", None, "holds 11 records"),
    "no example": (replace(lambda r: [*r[:4], b"nonsense", *r[5:]]), "not_an_example", BAD_RECORD, "tf.train.Example"),
    "bytes behind the example": (replace(lambda r: [*r[:4], r[4] + b"xyz", *r[5:]]), "not_an_example", BAD_RECORD, ""),
    "missing feature": (change(lambda f: f.pop("real")), "missing_feature", BAD_RECORD, "'real' is missing"),
    "missing nested feature": (change(lambda f: f.pop("nested/flag")), "missing_feature", BAD_RECORD, "'nested/flag'"),
    "float label": (put("label", reals=[1.0]), "wrong_dtype", BAD_RECORD, "'label' holds float, not int64"),
    "text for a real": (put("real", texts=[b"1"]), "wrong_dtype", BAD_RECORD, "'real' holds string, not float"),
    "too many values": (put("real", reals=[1.0] * 4), "wrong_shape", BAD_RECORD, r"'real' holds 4 values, not .*\[3\]"),
    "no values": (put("label", ints=[]), "wrong_shape", BAD_RECORD, "'label' holds 0 values"),
    "too few raw bytes": (put("raw", texts=[b"1234567"]), "wrong_shape", BAD_RECORD, "7 bytes, not 8"),
    "label too large": (put("label", ints=[4]), "label_range", BAD_RECORD, "'label' is 4, outside 0..3"),
    "label negative": (put("label", ints=[-3]), "label_range", BAD_RECORD, "'label' is -3, outside 0..3"),
    "no label": (put("label", ints=[-1]), "label_range", BAD_RECORD, "the label is -1"),
    "uint8 too large": (put("small", ints=[7, 256]), "value_range", BAD_RECORD, "7..256, outside 0..255 of uint8"),
    "bool too large": (put("nested/flag", ints=[2]), "value_range", BAD_RECORD, "'nested/flag'"),
    "nan": (put("real", reals=[1.0, float("nan"), 0.0]), "non_finite", BAD_RECORD, "1 values of 3 that are NaN"),
    "infinity": (put("real", reals=[1.0, float("inf"), 0.0]), "non_finite", BAD_RECORD, "infinite"),
    "no image": (put("image", texts=[b"nonsense"]), "undecodable_image", BAD_RECORD, "'image' is no PNG"),
    "image without bytes": (put("photo", texts=[b""]), "undecodable_image", BAD_RECORD, "'photo' is no PNG"),
    "size of the image": (put("image", texts=[png(6, 8, 3)]), "image_size", BAD_RECORD, "6x8 pixels, not 8x6"),
    "grey and alpha": (put("image", texts=[png(8, 6, 2)]), "image_channels", BAD_RECORD, "2 channels, not 3"),
    "alpha": (put("photo", texts=[png(8, 6, 4)]), "image_channels", BAD_RECORD, "'photo' has 4 channels, not 3"),
    "size of a JPEG": (put("image", texts=[jpeg(8, 7, 3)]), "image_size", BAD_RECORD, "8x7 pixels, not 8x6"),
    "the same record twice": (
        replace(lambda r: [*r[:4], r[1], *r[5:]]),
        "duplicate_record",
        BAD_RECORD,
        f"record 1 of {FILE}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_where_it_is(dataset, capsys, name):
    spoil, kind, record, message = FAULTS[name]
    offset = None if record is None else offset_of(dataset / FILE, record)
    spoil(dataset / FILE)
    if name == "compressed":
        offset = 0
    found = report(dataset, capsys=capsys, code=audit.EXIT_DATA)["findings"]
    # What is lost with the bytes shows as a count, too; a second fault would be one too many.
    assert {finding["kind"] for finding in found} - {kind} <= {"count_mismatch"}
    finding = next(finding for finding in found if finding["kind"] == kind)
    assert (finding["split"], finding["file"]) == ("train", FILE)
    assert (finding["record"], finding["offset"]) == (record, offset)
    assert re.search(message, finding["message"]), finding["message"]
    assert sum(finding["kind"] == kind for finding in found) == 1


def test_every_kind_has_its_fault():
    with_flags = {"duplicate_key"}  # a test of its own, below
    assert set(findings.KINDS) - with_flags - {"not_parsed"} == {kind for _, kind, _, _ in FAULTS.values()}


@pytest.mark.parametrize("spoiled", [jpeg(40, 30, 3)[:200], png(40, 30, 3)[:60]])
def test_images_cut_behind_their_header_are_found_by_decoding(dataset, capsys, spoiled):
    put("photo", texts=[spoiled])(dataset / FILE)
    assert not report(dataset, capsys=capsys, code=audit.EXIT_CLEAN)["findings"]
    (finding,) = report(dataset, "--decode", capsys=capsys, code=audit.EXIT_DATA)["findings"]
    assert (finding["kind"], finding["record"]) == ("undecodable_image", BAD_RECORD)


def test_nothing_is_found_on_clean_data(clean, digits_dir, capsys):
    found = report(clean, "--decode", "--key_feature=id", capsys=capsys, code=audit.EXIT_CLEAN)
    assert not found["findings"] and not found["notes"]
    assert {name: split["records"] for name, split in found["splits"].items()} == {"train": 30, "test": 3}
    assert not report("digits", f"--data_dir={digits_dir}", capsys=capsys, code=audit.EXIT_CLEAN)["findings"]


def test_grey_images_where_colour_is_said_are_no_fault(dataset, capsys):
    put("image", texts=[png(8, 6, 1)])(dataset / FILE)
    report(dataset, capsys=capsys, code=audit.EXIT_CLEAN)


def test_all_faults_of_a_shard_are_found_behind_each_other(dataset, capsys):
    path = dataset / FILE
    records = read(path)
    records[6], records[8] = b"nonsense", records[0]
    write(path, records)
    flip(0)(path)  # the length of record 4
    data = bytearray(path.read_bytes())
    data[sum(len(record) + 16 for record in records[:2]) + 20] ^= 1  # the data of record 2
    path.write_bytes(data[:-3])
    found = report(dataset, "--splits=train", capsys=capsys, code=audit.EXIT_DATA)["findings"]
    assert sorted((finding["record"], finding["kind"]) for finding in found) == [
        (2, "data_crc"),
        (4, "length_crc"),
        (6, "not_an_example"),
        (8, "duplicate_record"),
        (9, "truncated"),
    ]


def test_duplicates_are_found_over_splits_and_by_key(dataset, capsys):
    first = read(dataset / FILE)[3]
    test_file = f"mixed-test.tfrecord-00002-of-0000{SHARDS}"
    write(dataset / test_file, [first])
    put("id", texts=[b"0-0"])(dataset / FILE)
    found = report(dataset, "--key_feature=id", capsys=capsys, code=audit.EXIT_DATA)["findings"]
    places = [(finding["kind"], finding["file"], finding["record"]) for finding in found]
    assert places == [
        ("duplicate_key", FILE, BAD_RECORD),
        ("duplicate_record", test_file, 0),
        ("duplicate_key", test_file, 0),
    ]
    assert f"record 3 of {FILE}" in found[1]["message"]
    assert audit.main(["audit", str(dataset)]) == audit.EXIT_DATA
    assert "Records that repeat others may be meant so" in capsys.readouterr().out
    report(dataset, "--ignore=duplicate_record", capsys=capsys, code=audit.EXIT_CLEAN)


def test_a_split_without_labels_is_a_note(dataset, capsys):
    for path in dataset.glob("mixed-test*"):
        records = [tf.train.Example.FromString(record) for record in read(path)]
        for record in records:
            record.features.feature["label"].int64_list.value[0] = -1
        write(path, [record.SerializeToString() for record in records])
    (note,) = report(dataset, capsys=capsys, code=audit.EXIT_CLEAN)["notes"]
    assert "split test has no labels" in note


def test_a_wrong_schema_ends_early_and_says_so(write_tfds, capsys, monkeypatch):
    monkeypatch.setattr(scan, "MAX_FINDINGS", 10)
    monkeypatch.setattr(scan, "_MAX_BATCH", 8)
    # Nothing is asked of these features but that they are there.
    features = {"x": tfds.features.Scalar(np.int64), "y": tfds.features.Scalar(np.int64)}
    examples = [{"x": number, "y": 0} for number in range(50)]
    directory = pathlib.Path(write_tfds("plain", features, ("x", "y"), {"train": examples})) / "plain/1.0.0"
    path = directory / "features.json"
    path.write_text(path.read_text().replace('"x"', '"z"'))
    capsys.readouterr()  # what TFDS prints
    found = report(directory, capsys=capsys, code=audit.EXIT_DATA)["findings"]
    assert found[0]["message"] == "feature 'z' is missing"
    assert len(found) == 16  # the batch in which the limit is passed, and no more
    assert audit.main(["audit", str(directory), "--write_quarantine"]) == audit.EXIT_DATA
    assert "too many bad records to leave out" in capsys.readouterr().err


def test_the_report_for_people(dataset, capsys):
    assert audit.main(["audit", str(dataset)]) == audit.EXIT_CLEAN
    out, err = capsys.readouterr()
    assert "train: 30 records in 3 shards" in out and "Clean" in out and not err  # no bar where no terminal is


def test_a_process_prints_findings_only_and_ends_with_their_code(dataset):
    offset = offset_of(dataset / FILE, BAD_RECORD)
    flip(12)(dataset / FILE)
    command = [sys.executable, "-m", "data.audit", str(dataset)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # TensorFlow 2.21 announces oneDNN past every log level.
    announced = ("InitializeLog", "oneDNN custom operations")
    said = [line for line in done.stderr.splitlines() if not any(words in line for words in announced)]
    assert done.returncode == audit.EXIT_DATA and not said
    assert f"{FILE}, record {BAD_RECORD} at byte {offset}: " in done.stdout
    assert "1 findings: 1 data_crc" in done.stdout and "--write_quarantine" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], audit.EXIT_USAGE, "Name one dataset. Received: none."),
        (["a", "b"], audit.EXIT_USAGE, "Received: a b."),
        (["a", "--spilts=b"], audit.EXIT_USAGE, "Unknown command line flag 'spilts'"),
        (["a", "--ignore=duplicate"], audit.EXIT_USAGE, "no kind 'duplicate' (did you mean 'duplicate_key'?)"),
        (["a", "--threads=0"], audit.EXIT_USAGE, "threads"),
        (["/nowhere"], audit.EXIT_DATA, "No dataset '/nowhere'"),
        (["{clean}", "--splits=trian"], audit.EXIT_DATA, "no split 'trian' (did you mean 'train'?)"),
        (["{clean}", "--key_feature=real"], audit.EXIT_DATA, "one value a record. Received: 'real'; choose among"),
    ],
)
def test_slips_are_one_clear_line(clean, capsys, arguments, code, message):
    assert audit.main(["audit", *(argument.format(clean=clean) for argument in arguments)]) == code
    out, err = capsys.readouterr()
    assert message in err and not out and len(err.splitlines()) <= 3


def test_help_lists_what_is_looked_for(capsys):
    assert audit.main(["audit", "--help"]) == audit.EXIT_CLEAN
    out = capsys.readouterr().out
    assert all(f"{kind}: " in out for kind in findings.KINDS)
