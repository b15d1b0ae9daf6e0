"""Token records from texts: nothing lost, nothing twice, and what the dataset says of itself."""

import gzip
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from data import build, packing, pipeline, tokenizer
from data.datasets import docstrings, languages
from data.datasets.sources import source, tokens
from data.spec import Array

S = 32
LM = ("--tokenizer=bytes", f"--sequence_length={S}")


@pytest.fixture
def built(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    """built(source, *flags) -> dataset, examples by split, and what stderr said."""

    def make(source: pathlib.Path, *flags: str) -> tuple[pipeline.Dataset, dict[str, list[dict]], str]:
        assert build.main(["build", str(source), f"--data_dir={tmp_path / 'built'}", *flags]) == 0, capsys.readouterr()
        out, err = capsys.readouterr()
        builder = tfds.builder_from_directory(out.split(": ")[-1].strip())
        examples = {split: list(tfds.as_numpy(builder.as_dataset(split=split))) for split in builder.info.splits}
        return pipeline.open_dataset(str(builder.data_path)), examples, err

    return make


@pytest.fixture
def refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    """refused(source, *flags) -> the error of a build that wrote nothing."""

    def make(source: pathlib.Path, *flags: str) -> str:
        assert build.main(["build", str(source), f"--data_dir={tmp_path / 'built'}", *flags]) != 0
        assert not list((tmp_path / "built").glob("**/dataset_info.json"))
        return capsys.readouterr().err

    return make


def texts(count: int) -> list[str]:
    """Of 1 to 100 characters, not all of one byte; all different."""
    rng = np.random.default_rng(0)
    return [f"{i}: " + "".join(rng.choice(list("abc äß\n"), rng.integers(1, 97))) for i in range(count)]


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def pieces_of(record: dict) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each segment of a record."""
    found = []
    for segment in range(1, record["segments"].max() + 1):
        at = record["segments"] == segment
        found.append((record["tokens"][at].tolist(), record["targets"][at].tolist()))
    return found


def predicted(texts_: list[str]) -> list[int]:
    """All ids that a language model of these has to predict, sorted: each text's bytes, and an end each."""
    ids = [byte + 3 for text in texts_ for byte in text.encode()]
    return sorted(ids + [1] * len(texts_))


def test_each_token_is_predicted_once_from_what_is_before_it(tmp_path, built):
    documents = texts(300)
    folder = tmp_path / "Corpus"
    folder.mkdir()
    for number, document in enumerate(documents):
        (folder / f"{number:03d}.txt").write_text(document)
    dataset, examples, err = built(folder, *LM, "--num_shards=1")
    assert set(examples) == {"train", "validation", "test"}
    targets = sorted(int(t) for rows in examples.values() for row in rows for t in row["targets"] if t >= 0)
    assert targets == predicted(documents)
    whole = {text.encode() for text in documents}
    rest = set()
    for rows in examples.values():
        for row in rows:
            padding = row["segments"] == 0
            assert (row["targets"] >= 0).tolist() == (~padding).tolist() and not row["tokens"][padding].any()
            assert (np.diff(row["segments"][~padding]) >= 0).all(), "a document's positions lie side by side"
            for inputs, nexts in pieces_of(row):
                assert inputs[1:] == nexts[:-1]
                if inputs[0] == 1 and nexts[-1] == 1:
                    text = bytes(byte - 3 for byte in nexts[:-1])
                    assert text in whole
                    rest.add(text)
    assert rest == {text for text in whole if len(text) < S}, "what fits is in one piece"
    used = np.mean([row["segments"] > 0 for row in examples["train"]])
    assert used > 0.9
    assert f"{100 * used:.1f} % of the positions hold a token" in err


def test_what_the_dataset_says_of_itself(tmp_path, built):
    path = write_jsonl(tmp_path / "my.jsonl", [{"text": text} for text in texts(100)])
    dataset, examples, _ = built(path, *LM, "--splits=train=0.8,test=0.2")
    spec = dataset.spec()
    assert spec.inputs == {"tokens": Array((S,), "int32", 259), "segments": Array((S,), "int32", S + 1)}
    assert spec.label == Array((S,), "int32", 259) and spec.num_classes is None and spec.sequence_length == S
    assert examples["train"][0]["tokens"].dtype == np.int16, "two bytes a token"
    batch, targets = next(iter(pipeline.train_batches(dataset, global_batch_size=4, per_replica_batch_size=4, seed=0,
                                                      shuffle_mib=1)))  # fmt: skip
    rows = {row["tokens"].tobytes(): row for row in examples["train"]}
    for inputs, segments, nexts in zip(
        *(t.numpy() for t in (batch["tokens"], batch["segments"], targets)), strict=True
    ):
        row = rows[inputs.astype(np.int16).tobytes()]
        assert segments.tolist() == row["segments"].tolist() and nexts.tolist() == row["targets"].tolist()


def test_a_document_is_in_one_split_wherever_it_is_packed(tmp_path, built):
    documents = texts(200)
    fractions = source.Splits.parse("train=0.7,test=0.3")
    for name, order in (("one", 1), ("other", -1)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in documents[::order]])
        _, examples, _ = built(path, *LM, "--splits=train=0.7,test=0.3")
        for split, rows in examples.items():
            mine = [text for text in documents if fractions.of(text_key(text)) == split]
            assert sorted(t for row in rows for t in row["targets"].tolist() if t >= 0) == predicted(mine)


def text_key(text: str) -> str:
    from data.datasets.sources import text as module

    return module._key(text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.parquet"])
def test_texts_with_a_class(tmp_path, built, name):
    rows = [{"body": text, "kind": ("good", "bad")[i % 2], "other": 1} for i, text in enumerate(texts(60))]
    path = tmp_path / name
    pq.write_table(pa.Table.from_pylist(rows), path) if name.endswith("parquet") else write_jsonl(path, rows)
    dataset, examples, _ = built(path, *LM, "--text=body", "--label=kind")
    spec = dataset.spec()
    assert spec.inputs == Array((S,), "int32", 259) and spec.num_classes == 2
    assert dataset.info.features["label"].names == ["bad", "good"]
    found = {
        bytes((row["tokens"][row["tokens"] > 0] - 3).tolist()): row["label"] for e in examples.values() for row in e
    }
    assert found == {row["body"].encode()[:S]: int(row["kind"] == "good") for row in rows}


def test_folders_are_splits(tmp_path, built):
    for split, count in (("train", 5), ("val", 2)):
        (tmp_path / "c" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "c" / split / "c4-x.00000-of-00001.json.gz", [{"text": split * 9}] * count)
    _, examples, _ = built(tmp_path / "c", *LM)
    counts = {split: sum(int((row["targets"] == 1).sum()) for row in rows) for split, rows in examples.items()}
    assert counts == {"train": 5, "validation": 2}


def test_a_sentencepiece_model(tmp_path, built, refused):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text, "kind": i % 2} for i, text in enumerate(texts(100))])
    (tmp_path / "all.txt").write_text("\n".join(texts(100)))

    def train(name: str, **options: int) -> str:
        sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "all.txt"), model_prefix=str(tmp_path / name),
                                                 vocab_size=90, minloglevel=9, **options)  # fmt: skip
        return f"--tokenizer={tmp_path / name}.model"

    length = f"--sequence_length={S}"
    assert "no token for the end of a text" in refused(path, train("endless", eos_id=-1), length)
    assert "is not padding" in refused(path, train("padless"), length, "--label=kind")
    mine = train("mine", pad_id=0, unk_id=3, eos_id=1, bos_id=2)
    dataset, examples, _ = built(path, mine, length)
    assert dataset.spec().label.below == 90
    kept = pathlib.Path(dataset.directory) / "tokenizer.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(kept))
    targets = sorted(int(t) for rows in examples.values() for row in rows for t in row["targets"] if t >= 0)
    assert targets == sorted([i for text in texts(100) for i in processor.encode(text)] + [1] * 100)
    built(path, mine, length, "--label=kind", "--name=with_class")


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("a.txt", "x", ["--tokenizer=bytes"], "how many make a record"),
        ("a.txt", "x", [], "say what their tokens are"),
        ("a.txt", "x", ["--tokenizer=none.model", "--sequence_length=4"], "the path of a SentencePiece model"),
        ("a.txt", "x", [*LM, "--label=kind"], ".txt has no fields"),
        ("a.txt", b"\xff", LM, "is not UTF-8"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', LM, "Line 2 of .*a.jsonl is no JSON"),
        ("a.jsonl", '{"test": "x"}', LM, "no text in a field 'text' .did you mean 'test'"),
        ("a.jsonl", '{"text": null}', LM, "no text in a field 'text'. Mend it.*Received: None"),
        ("a.jsonl", '{"text": "x"}\n{"text": "\\ud83d"}', LM, "Line 2 of .*a.jsonl holds what UTF-8 cannot"),
        (
            "a.json.gz",
            gzip.compress(b'{"text": "x"}', mtime=0)[:-9],
            LM,
            "a.json.gz does not read as gzip: .*Fetch it again",
        ),
        ("a.json.gz", '{"text": "x"}', LM, "a.json.gz does not read as gzip: Not a gzipped"),
        ("a.jsonl", '{"text": "", "k": 1}', [*LM, "--label=k"], "without any token"),
        ("a.csv", "text\nx", LM, "no file there ends with"),
        ("a.txt", "x", [*LM, "--categorical=a"], "--categorical has no effect on a source of kind text"),
    ],
)
def test_mistakes(tmp_path, refused, name, content, flags, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(path, *flags))


def naive(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        spaces = [capacity - sum(lengths[i] for i in each) for each in bins]
        fits = [space for space in spaces if space >= lengths[piece]]
        if fits:
            last = max(i for i, space in enumerate(spaces) if space == min(fits))
            bins[last].append(piece)
        else:
            bins.append([piece])
    return bins


def test_packing_takes_the_best_fit():
    rng = np.random.default_rng(1)
    for capacity in (1, 7, 64):
        lengths = rng.integers(1, capacity + 1, 200).tolist()
        bins = packing.best_fit(lengths, capacity)
        loads = [sum(lengths[i] for i in each) for each in bins]
        assert max(loads) <= capacity and sorted(i for each in bins for i in each) == list(range(200))
        assert sorted(loads) == sorted(sum(lengths[i] for i in each) for each in naive(lengths, capacity))


def test_bytes_are_as_byt5_has_them():
    assert tokenizer.Bytes().encode("ä!").tolist() == [0xC3 + 3, 0xA4 + 3, ord("!") + 3]


def test_docstrings_are_split_by_file():
    documents = docstrings.load()
    assert not set(documents["train"]) & set(documents["test"])
    assert sum(map(len, documents["train"])) > 2_000_000
    records = list(tokens.Layout(128, 259).packed(map(tokenizer.Bytes().encode, documents["test"]), 1))
    assert tokens.fill(records) > 0.98


def test_languages_are_split_by_message():
    pytest.importorskip("django")
    messages = languages.load()
    by_split = {split: {m for m, _, _ in messages if languages.split_of(m) == split} for split in ("train", "test")}
    assert len(by_split["test"]) > 50 and not by_split["train"] & by_split["test"]
    assert {language for _, language, _ in messages} == set(languages.LANGUAGES)
    assert len({(language, text) for _, language, text in messages}) == len(messages)
