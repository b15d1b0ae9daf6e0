"""From raw data to datasets: images, tables, NumPy archives, and datasets of TFDS by name."""

import csv
import io
import pathlib
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import build, pipeline
from data.datasets.sources import source as sources
from data.spec import Array, Spec


def run(*arguments: object) -> int:
    return build.main(["build", *map(str, arguments)])


@pytest.fixture
def built(tmp_path, capsys):
    """built(source, *flags) -> the dataset, as pipeline opens it, and what it holds: {split: [example]}."""

    def make(source: pathlib.Path, *flags: str) -> tuple[pipeline.Dataset, dict[str, list[dict]]]:
        assert run(source, f"--data_dir={tmp_path / 'built'}", *flags) == build.EXIT_DONE, capsys.readouterr().err
        directory = capsys.readouterr().out.split(": ")[-1].strip()
        builder = tfds.builder_from_directory(directory)
        examples = {split: list(tfds.as_numpy(builder.as_dataset(split=split))) for split in builder.info.splits}
        return pipeline.open_dataset(directory), examples

    return make


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(source, *flags) -> the one line of the error; nothing is built."""

    def make(source: object, *flags: str, code: int = build.EXIT_DATA) -> str:
        assert run(source, f"--data_dir={tmp_path / 'built'}", *flags) == code
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1
        assert not list((tmp_path / "built").glob("**/dataset_info.json"))
        return err

    return make


def write_csv(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_image(path: pathlib.Path, height: int = 6, width: int = 5, value: int = 0) -> bytes:
    pixels = np.full((height, width, 3), value, np.uint8)
    encoded = (tf.io.encode_png if path.suffix == ".png" else tf.io.encode_jpeg)(pixels).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded)
    return encoded


def people(count: int) -> list[dict]:
    rows = []
    for i in range(count):
        city, kind = ("Ulm", "Bonn", "Köln")[i % 3], "ny"[i % 2]
        rows.append({"age": 20 + i % 50, "city": city, "height": round(1.5 + i / 1000, 3), "id": f"p{i}", "kind": kind})
    return rows


def values(examples: dict[str, list[dict]], name: str) -> dict[str, set]:
    return {split: {example[name].item() for example in each} for split, each in examples.items()}


# Images


def test_images_are_stored_as_they_are(tmp_path, built):
    root = tmp_path / "Holiday Photos"
    files = {f"{c}/{i}.{s}": (c, i, s) for c in ("dog", "cat") for i, s in enumerate(["jpg", "png", "JPG"] * 10)}
    content = {write_image(root / name, value=i): c for name, (c, i, _) in files.items()}
    (root / ".hidden").mkdir()
    write_image(root / ".hidden" / "x.png")
    dataset, _ = built(root)
    assert dataset.name == "holiday_photos/1.0.0"
    assert dataset.spec() == Spec(Array((6, 5, 3), "uint8"), Array((), "int32"), num_classes=2)
    stored = [
        example.features.feature
        for split in dataset.splits
        for path in dataset.split(split).paths
        for example in map(tf.train.Example.FromString, tf.data.TFRecordDataset(path).as_numpy_iterator())
    ]
    assert len(stored) == 60
    # Equal images of two classes make equal files: compare with what each file's last class was.
    names = dataset.info.features["label"].names
    assert names == ["cat", "dog"]
    assert {each["image"].bytes_list.value[0] for each in stored} == set(content)
    assert sorted(names[each["label"].int64_list.value[0]] for each in stored) == ["cat"] * 30 + ["dog"] * 30


def test_folders_named_like_splits_are_splits(tmp_path, built):
    for split, count in (("train", 5), ("val", 3), ("test", 2)):
        for i in range(count):
            write_image(tmp_path / "own" / split / "ab"[i % 2] / f"{i}.png", height=4 + i)
    dataset, _ = built(tmp_path / "own")
    assert dataset.splits == {"test": 2, "train": 5, "validation": 3}
    with pytest.raises(ValueError, match="set image_size"):
        dataset.spec()  # images of several sizes
    assert dataset.spec(image_size=8).inputs == Array((8, 8, 3), "uint8")


@pytest.mark.parametrize("flag", ["--splits=train=1", "--label=x", "--key=x", "--features=x", "--beam_options=x"])
def test_options_without_effect_are_refused(tmp_path, refused, flag):
    write_image(tmp_path / "own" / "train" / "a" / "0.png")
    error = refused(tmp_path / "own", flag, code=build.EXIT_USAGE)
    assert "no effect" in error or "splits of its own, train: leave --splits out" in error


def test_bad_images_are_named(tmp_path, refused):
    root = tmp_path / "photos"
    root.mkdir()
    assert "holds no images (.jpg, .jpeg, .png) among 0 files" in refused(root)
    good = write_image(root / "a" / "good.jpg", height=40, width=40)
    (root / "a" / "short.jpg").write_bytes(good[: len(good) // 2])
    assert "short.jpg cannot be decoded" in refused(root)
    (root / "a" / "short.jpg").write_bytes(b"not an image")
    assert "short.jpg is no image that can be read" in refused(root)
    (root / "a" / "short.jpg").unlink()
    write_image(root / "lost.png")
    assert "lost.png has no class: images lie in class/file.jpg" in refused(root)
    assert "1 (grey) or 3 (colour)" in refused(root, "--channels=2")


# Tables


def test_csv_columns_become_inputs(tmp_path, built):
    rows = people(300)
    dataset, examples = built(write_csv(tmp_path / "people.csv", rows), "--label=kind", "--key=id")
    assert dataset.spec() == Spec(
        {"age": Array((), "int32"), "city": Array((), "int32", below=3), "height": Array((), "float32")},
        Array((), "int32"),
        num_classes=2,
    )
    city, kind = dataset.info.features["city"].names, dataset.info.features["kind"].names
    assert (city, kind) == (["Bonn", "Köln", "Ulm"], ["n", "y"])
    found = {
        (e["age"].item(), city[e["city"]], round(e["height"].item(), 3), kind[e["kind"]])
        for each in examples.values()
        for e in each
    }
    assert found == {(row["age"], row["city"], row["height"], row["kind"]) for row in rows}
    x, y, _ = next(iter(pipeline.eval_batches(dataset, global_batch_size=4, per_replica_batch_size=4)))
    assert set(x) == {"age", "city", "height"} and y.shape == (4,)


def test_parquet_gives_the_same_records_as_csv(tmp_path, built):
    rows = people(200)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "people.parquet", row_group_size=64)
    _, from_parquet = built(tmp_path / "people.parquet", "--label=kind", "--name=a")
    _, from_csv = built(write_csv(tmp_path / "people.csv", rows), "--label=kind", "--name=b")
    assert from_parquet == from_csv


def test_types_of_parquet(tmp_path, built):
    count = 200
    table = pa.table(
        {
            "flag": [i % 2 == 0 for i in range(count)],
            "kind": pa.array(["a", "b"] * (count // 2)).dictionary_encode(),
            "large": [2**40 + i for i in range(count)],
            "small": pa.array([i % 100 for i in range(count)], pa.int8()),
            "label": [i % 3 == 0 for i in range(count)],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    dataset, _ = built(tmp_path / "t.parquet")
    inputs = {"flag": Array((), "uint8"), "kind": Array((), "int32", below=2), "large": Array((), "float32")}
    assert dataset.spec().inputs == inputs | {"small": Array((), "int32")}
    assert dataset.info.features["label"].names == ["false", "true"]


def test_an_example_never_moves_between_splits(tmp_path, built):
    rows = people(400)
    random.Random(0).shuffle(rows)
    _, before = built(write_csv(tmp_path / "a.csv", rows[:200]), "--label=kind", "--exclude=id")
    # Reordered, twice as many, a new city before the others, and ages no longer whole.
    rows[399] |= {"age": 33.5, "city": "Aachen"}
    random.Random(1).shuffle(rows)
    _, after = built(write_csv(tmp_path / "b.csv", rows), "--label=kind", "--exclude=id")
    heights_before, heights_after = values(before, "height"), values(after, "height")
    assert set(before) == {"train", "validation", "test"} and len(before["train"]) > 130
    assert all(heights_before[split] <= heights_after[split] for split in before)
    assert sum(map(len, after.values())) == 400


def test_equal_rows_stay_and_stay_together(tmp_path, built):
    _, examples = built(write_csv(tmp_path / "a.csv", people(100) * 3), "--label=kind")
    ids = [{split: len([e for e in each if e["id"] == i]) for split, each in examples.items()} for i in range(100)]
    assert all(sorted(counts.values()) == [0, 0, 3] for counts in ids)


def test_files_named_like_splits_are_splits(tmp_path, built):
    write_csv(tmp_path / "t" / "train-00000-of-00002.csv", people(20))
    write_csv(tmp_path / "t" / "train-00001-of-00002.csv", people(20))
    write_csv(tmp_path / "t" / "test.csv", people(7))
    dataset, _ = built(tmp_path / "t", "--label=kind")
    assert dataset.splits == {"test": 7, "train": 40}


def test_whole_numbers_as_label_need_a_word(tmp_path, built, refused):
    path = write_csv(tmp_path / "a.csv", people(200))
    assert "whole numbers, 20 to 69: classes or quantities?" in refused(path, "--label=age")
    dataset, _ = built(path, "--label=age", "--label_kind=number", "--name=n")
    assert dataset.spec().num_classes is None and dataset.spec().label == Array((), "int32")
    dataset, _ = built(path, "--label=age", "--label_kind=class", "--name=c")
    assert dataset.info.features["age"].names == [str(age) for age in range(20, 70)]


def bad(row: int, **cells: object) -> list[dict]:
    rows = people(50)
    rows[row - 1] |= cells
    return rows


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (people(50), ["--label=knd"], "no column 'knd' (did you mean 'kind'?). It has: age, city, height, id, kind."),
        (people(50), [], "no column 'label'"),
        (people(50), ["--label=kind", "--key=idd"], "no column 'idd' (did you mean 'id'?)"),
        (people(50), ["--label=kind", "--exclude=kind"], "can be neither left out nor the key"),
        (bad(7, age="old"), ["--label=kind"], "'age' mixes numbers and text: text 'old' in row 7 of"),
        (bad(7, city="5"), ["--label=kind"], "'city' mixes numbers and text: the number '5' in row 7 of"),
        (bad(9, height=""), ["--label=kind"], "1 of 50 rows lack a value (empty, NaN or infinite): height (1, first"),
        (bad(9, height="nan"), ["--label=kind"], "height (1, first in row 9 of"),
        (bad(9, height="1e39"), ["--label=kind"], "'height' has a number beyond float32, 1e+39"),
        (bad(9, id="p0"), ["--label=kind", "--key=id"], "share a key, one is 'p0'"),
        (bad(9, age=""), ["--label=kind", "--exclude=height", "--categorical=age"], "age (1, first in row 9 of"),
        (people(50), ["--label=city", "--label_kind=number"], "is text, no number"),
        (people(2), ["--label=kind"], "gets none of the examples"),
    ],
)  # fmt: skip
def test_bad_tables_are_told_in_one_line(tmp_path, refused, rows, flags, message):
    assert message in refused(write_csv(tmp_path / "a.csv", rows), *flags)


def test_rows_that_lack_a_value_can_be_dropped(tmp_path, built):
    dataset, examples = built(write_csv(tmp_path / "a.csv", bad(9, height="")), "--label=kind", "--missing=drop")
    assert sum(dataset.splits.values()) == 49
    assert not any(np.isnan(height) for each in values(examples, "height").values() for height in each)


def test_damaged_files_are_named(tmp_path, refused):
    path = write_csv(tmp_path / "a.csv", people(50))
    path.write_text(path.read_text() + "1,2,3\n")
    assert "Row #52: Expected 5 columns, got 3: 1,2,3" in refused(path, "--label=kind")
    path.write_text("age,kind\n")
    assert "has no rows" in refused(path, "--label=kind")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    assert "a.parquet" in refused(tmp_path / "a.parquet", "--label=kind")
    write_csv(tmp_path / "t" / "a.csv", people(5))
    write_csv(tmp_path / "t" / "b.csv", [{"age": 1, "kind": "n"}])
    assert "differ in columns: city, height, id" in refused(tmp_path / "t", "--label=kind")


# NumPy


def save(path: pathlib.Path, **arrays: np.ndarray) -> pathlib.Path:
    np.savez(path, **arrays)
    return path


def test_npz_with_splits(tmp_path, built):
    x = np.random.default_rng(0).integers(0, 256, (120, 4, 5), np.uint8)
    y = np.arange(120) % 12
    path = save(tmp_path / "m.npz", x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    dataset, examples = built(path, "--label_kind=class")
    assert dataset.spec() == Spec(Array((4, 5, 1), "uint8"), Array((), "int32"), num_classes=12)
    for split, rows in (("train", range(100)), ("test", range(100, 120))):
        found = sorted((example["x"].tobytes(), example["y"].item()) for example in examples[split])
        assert found == sorted((x[row].tobytes(), int(y[row])) for row in rows)


def test_npz_of_named_arrays(tmp_path, built):
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(200, 3)), "b": np.arange(200), "price": rng.normal(size=200), "note": np.zeros(200)}
    dataset, examples = built(save(tmp_path / "n.npz", **arrays), "--label=price", "--exclude=note", "--key=b")
    assert dataset.spec() == Spec(Array((3,), "float32"), Array((), "float32"), num_classes=None)
    found = sorted((e["price"].item(), *e["a"].tolist()) for each in examples.values() for e in each)
    expected = sorted(
        (p, *row) for p, row in zip(arrays["price"].astype("f").tolist(), arrays["a"].astype("f").tolist(), strict=True)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("arrays", "flags", "message"),
    [
        ({"x": np.zeros((5, 2)), "z": np.zeros(5)}, [], "no array 'y'"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(4)}, [], "x (5, 2), y (4,)"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(5, int)}, [], "--label_kind=class or --label_kind=number"),
        ({"x": np.zeros((5, 2)), "y": np.zeros((5, 10))}, [], "argmax"),
        ({"x": np.array([[0.0], [np.nan]]), "y": np.zeros(2)}, [], "NaN or infinity in 1 of 2 rows, first in 1"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, [], "no number"),
        ({"x": np.array([None, {}]), "y": np.zeros(2)}, [], "plain arrays"),
        ({"y": np.zeros(2)}, [], "no input array"),
    ],
)
def test_bad_archives_are_told_in_one_line(tmp_path, refused, arrays, flags, message):
    assert message in refused(save(tmp_path / "a.npz", **arrays), *flags)


# What is there, and by which name


class ThreeLetters(tfds.core.GeneratorBasedBuilder):
    """A dataset that TFDS knows by name, and that needs no download."""

    VERSION = tfds.core.Version("2.0.0")
    code_path = None

    def _info(self):
        features = tfds.features.FeaturesDict({"x": np.int64, "y": tfds.features.ClassLabel(names=["a", "b", "c"])})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("x", "y"))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(4000), "test": self._generate_examples(30)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"x": i, "y": i % 3}


def test_a_dataset_of_tfds_by_name(tmp_path, capsys):
    assert run("three_letters", f"--data_dir={tmp_path}", "--shard_mib=0.02") == build.EXIT_DONE
    dataset = pipeline.open_dataset("three_letters", str(tmp_path))
    assert dataset.splits == {"test": 30, "train": 4000}
    sizes = [pathlib.Path(path).stat().st_size for path in dataset.split("train").paths]
    assert len(sizes) == 16 and max(sizes) <= 0.02 * 2**20
    assert run("three_leters", f"--data_dir={tmp_path}") == build.EXIT_USAGE
    assert "did you mean 'three_letters'" in capsys.readouterr().err
    assert run("three_letters:9.0.0", f"--data_dir={tmp_path}") == build.EXIT_USAGE
    assert "9.0.0" in capsys.readouterr().err


def test_paths_that_lead_nowhere(tmp_path, refused):
    assert "There is no file or directory" in refused(tmp_path / "gone.csv")
    (tmp_path / "a.xyz").write_text("")
    assert "a source is a .csv, .parquet, .npz, .txt or .jsonl file" in refused(tmp_path / "a.xyz")
    path = write_csv(tmp_path / "1a.csv", people(50))
    assert "small letters" in refused(path, "--label=kind", "--name=9", code=build.EXIT_USAGE)
    assert "more than 0" in refused(path, "--label=kind", "--name=a", "--num_shards=-1", code=build.EXIT_USAGE)
    assert "too few for 4000 shards" in refused(path, "--label=kind", "--name=a", "--num_shards=4000")


def test_what_is_there_must_be_what_is_asked_for(tmp_path, built, capsys):
    path = write_csv(tmp_path / "a.csv", people(200))
    arguments = (path, f"--data_dir={tmp_path / 'built'}", "--label=kind")
    built(path, "--label=kind")
    assert run(*arguments) == build.EXIT_DONE and "is already there" in capsys.readouterr().out
    assert run(*arguments, "--key=id") == build.EXIT_DATA and "of another options" in capsys.readouterr().err
    write_csv(path, people(201))
    assert run(*arguments) == build.EXIT_DATA and "of another source_fingerprint" in capsys.readouterr().err
    assert run(*arguments, "--version=1.0.1") == build.EXIT_DONE


@pytest.mark.parametrize("text", ["train", "train=x", "train=0.5,test=0.4", "a=0.5,a=0.5", "all=1", "a=1.5,b=-0.5"])
def test_splits_that_make_no_sense(tmp_path, refused, text):
    path = write_csv(tmp_path / "a.csv", people(50))
    assert f"Received: --splits={text}" in refused(path, "--label=kind", f"--splits={text}", code=build.EXIT_USAGE)


def test_fractions_of_splits_hold():
    splits = sources.Splits.parse("train=0.7, validation=0.2, test=0.1")
    found = [splits.of(str(key)) for key in range(10_000)]
    assert [round(found.count(name) / 10_000, 1) for name in splits.names] == [0.7, 0.2, 0.1]


def test_progress_is_shown_on_a_terminal_only(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = write_csv(tmp_path / "a.csv", people(200))
    for terminal, name in ((Terminal(), "a"), (io.StringIO(), "b")):
        monkeypatch.setattr("sys.stderr", terminal)
        assert run(path, f"--data_dir={tmp_path}", "--label=kind", f"--name={name}") == build.EXIT_DONE
        assert ("200/200" in terminal.getvalue()) == terminal.isatty()
        assert ("shards" in terminal.getvalue()) == terminal.isatty()
