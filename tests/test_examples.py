"""What a classifier takes for what, and its worst examples: the same as NumPy finds with `model.predict`."""

import base64
import dataclasses
import json
import logging
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import build, naming, pipeline, tokenizer
from data.spec import Array, Spec
from tests.conftest import Trainer, metrics_of
from tests.devices import one_replica
from trainer import cluster, config, examples, inputs, models, run_dir, tasks
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock
from trainer.modes.use_checkpoint import use_checkpoint
from trainer.modes.worst import write_examples

TABLE = Spec(Array((4,), "float32"), Array((), "int32"), 3)
SEVERAL = Spec(Array((4,), "float32"), Array((3,), "float32"), None, "multi_label")


@pytest.fixture(scope="module", autouse=True)
def devices() -> cluster.Cluster:
    """One replica, connected before anything is computed: JAX wants it so."""
    return one_replica()


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def logits_and_labels(count: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(0, 3, (count, classes)).astype(np.float32), rng.integers(0, classes, count)


# One example.


@pytest.mark.parametrize("from_logits", [True, False])
def test_one_class_is_judged_as_keras_judges_it(from_logits: bool) -> None:
    logits, y = logits_and_labels(50)
    outputs = logits if from_logits else softmax(logits)
    found = examples.judge("classification", y, outputs, from_logits=from_logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits, reduction=None)
    np.testing.assert_allclose(found.loss, keras.ops.convert_to_numpy(loss(y, outputs)), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.predicted, logits.argmax(axis=1))
    np.testing.assert_allclose(found.probability, softmax(logits)[np.arange(50), y], rtol=1e-4)
    np.testing.assert_allclose(found.predicted_probability, softmax(logits).max(axis=1), rtol=1e-4)


@pytest.mark.parametrize("from_logits", [True, False])
def test_one_output_is_that_of_the_second_class(from_logits: bool) -> None:
    odds, y = np.array([[2.0], [-1.0], [0.5]], np.float32), np.array([1, 1, 0])
    sigmoid = 1 / (1 + np.exp(-odds[:, 0]))
    outputs = odds if from_logits else sigmoid[:, np.newaxis]
    found = examples.judge("classification", y, outputs, from_logits=from_logits)
    assert found.predicted.tolist() == [1, 0, 1]
    np.testing.assert_allclose(found.probability, [sigmoid[0], sigmoid[1], 1 - sigmoid[2]], rtol=1e-5)


@pytest.mark.parametrize("from_logits", [True, False])
def test_several_classes_are_judged_together(from_logits: bool) -> None:
    odds, _ = logits_and_labels(50)
    y = (np.random.default_rng(1).random((50, 3)) < 0.5).astype(np.float32)
    sigmoid = 1 / (1 + np.exp(-odds))
    outputs = odds if from_logits else sigmoid
    found = examples.judge("multi_label", y, outputs, from_logits=from_logits)
    loss = keras.losses.BinaryCrossentropy(from_logits=from_logits, reduction=None)
    np.testing.assert_allclose(found.loss, keras.ops.convert_to_numpy(loss(y, outputs)), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.predicted, odds > 0)
    right = np.where(y > 0, sigmoid, 1 - sigmoid)
    np.testing.assert_allclose(found.probability, right.prod(axis=1), rtol=1e-3)
    np.testing.assert_allclose(found.predicted_probability, np.maximum(sigmoid, 1 - sigmoid).prod(axis=1), rtol=1e-3)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (tasks.loss(TABLE), True),
        (tasks.loss(SEVERAL), True),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), True),
        (keras.losses.SparseCategoricalCrossentropy(), False),
        ("sparse_categorical_crossentropy", False),
        (keras.losses.binary_crossentropy, False),
        (lambda y, y_pred, from_logits=True: y_pred, True),
        (lambda y, y_pred: y_pred, None),
        (keras.losses.MeanSquaredError(), None),
        ("mse", None),
        ({"class": "sparse_categorical_crossentropy"}, None),
        (None, None),
    ],
)
def test_the_loss_says_what_outputs_are(loss: Any, expected: bool | None) -> None:
    assert examples.reads_logits(loss) is expected


@pytest.mark.parametrize(
    ("spec", "shapes", "expected"),
    [
        (TABLE, [(5, 3)], 3),
        (TABLE, [(5, 8)], 8),  # filled up to a size that suits the hardware
        (TABLE, [(5, 2)], 0),
        (TABLE, [(5, 3), (5, 3)], 0),
        (TABLE, [(5, 4, 3)], 0),
        (dataclasses.replace(TABLE, num_classes=2), [(5, 1)], 2),
        (TABLE, [(5, 1)], 0),
        (dataclasses.replace(TABLE, task="regression"), [(5, 3)], 0),
        (dataclasses.replace(TABLE, label=Array((5,), "int32")), [(5, 3)], 0),
        (SEVERAL, [(5, 3)], 3),
        (SEVERAL, [(5, 4)], 0),
    ],
)
def test_outputs_are_of_classes_or_not(spec: Spec, shapes: list[tuple], expected: int) -> None:
    assert examples.num_classes(spec, [np.zeros(shape) for shape in shapes]) == expected


# Many examples.


def seen(logits: np.ndarray, y: np.ndarray, share: int, *, limit: int = 10**6, padded: int = 0) -> dict:
    """The document of all examples, taken in by shares, the last of which ends in padding."""
    found = examples.Examples(TABLE, NAMES, num_classes=logits.shape[1], from_logits=True, limit=limit)
    x = np.arange(4 * len(y), dtype=np.float32).reshape(-1, 4)
    for first in range(0, len(y), share):
        rows = slice(first, first + share)
        mask = (np.arange(first, min(first + share, len(y))) < len(y) - padded).astype(np.float32)
        found.add(first, y[rows], mask, logits[rows], lambda row, first=first: x[first + row])
    return json.loads(found.document(step=7, split="test", total=len(y)) or "{}")


NAMES = naming.Names(classes=("ant", "bee", "cow"), shards=(("a", 30), ("b", 170)))


def test_counts_and_the_worst_are_numpys() -> None:
    logits, y = logits_and_labels(200)
    found = seen(logits, y, 32)
    assert (found["step"], found["split"], found["examples"], found["total"]) == (7, "test", 200, 200)
    expected = [[int(((y == i) & (logits.argmax(axis=1) == j)).sum()) for j in range(3)] for i in range(3)]
    assert found["confusion"] == expected
    loss = -np.log(softmax(logits.astype(np.float64))[np.arange(200), y])
    order = np.argsort(-loss)[:24]
    assert [worst["index"] for worst in found["worst"]] == order.tolist()
    assert [worst["loss"] for worst in found["worst"]] == pytest.approx(loss[order], rel=1e-5)
    for worst in found["worst"]:
        index = worst["index"]
        assert worst["label"] == NAMES.classes[y[index]]
        assert worst["predicted"] == NAMES.classes[logits[index].argmax()]
        assert worst["record"] == (f"a#{index}" if index < 30 else f"b#{index - 30}")
        assert list(worst["features"].values()) == [4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3]


@pytest.mark.parametrize("share", [1, 7, 100, 200])
def test_shares_make_no_difference(share: int) -> None:
    logits, y = logits_and_labels(200)
    logits[100:] = logits[:100]  # equal ones come in the order of the split
    y[100:] = y[:100]
    found = seen(logits, y, share)
    assert found == seen(logits, y, 32)
    indices = [worst["index"] for worst in found["worst"]]
    assert indices[1::2] == [index + 100 for index in indices[::2]]


def test_padding_what_has_no_label_and_what_is_beyond_the_limit_do_not_count() -> None:
    logits, y = logits_and_labels(200)
    assert seen(logits, y, 32, padded=9) == seen(logits[:191], y[:191], 32) | {"total": 200}
    assert seen(logits, y, 32, limit=50) == seen(logits[:50], y[:50], 32) | {"total": 200}
    y[3:6] = -1
    assert seen(logits, y, 32)["examples"] == 197
    assert seen(logits, np.full(200, -1), 32) == {}


def test_many_classes_have_no_matrix() -> None:
    logits, y = logits_and_labels(20, 1001)
    found = seen(logits, y, 20)
    assert found["confusion"] is None and len(found["classes"]) == 1001 and found["classes"][2:4] == ["cow", "3"]


def test_a_loss_that_is_no_number_is_the_worst_and_does_not_break_the_file() -> None:
    logits, y = logits_and_labels(200)
    logits[40] = np.nan
    found = seen(logits, y, 32)
    assert found["worst"][0]["index"] == 40 and np.isnan(float(found["worst"][0]["loss"]))
    assert "NaN" not in json.dumps(found), "JSON has no such word"


@pytest.mark.parametrize(("shape", "expected"), [((8, 5, 1), (8, 5, 1)), ((96, 96, 3), (96, 96, 3)),
                                                 ((300, 150, 3), (96, 48, 3)), ((2, 960, 4), (1, 96, 4))])  # fmt: skip
def test_pictures_are_the_raw_pixels_and_small(shape: tuple, expected: tuple) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    head, _, content = examples.picture(image).partition(",")
    assert head == "data:image/png;base64"
    pixels = tf.io.decode_png(base64.b64decode(content)).numpy()
    assert pixels.shape == expected
    if shape == expected:
        np.testing.assert_array_equal(pixels, image)
    assert abs(float(pixels.mean()) - float(image.mean())) < 2


def test_tokens_become_the_text_they_were_made_of() -> None:
    text = "Größe: 3 €"
    assert tokenizer.Bytes().decode(tokenizer.Bytes().encode(text)) == text
    tokens = np.zeros(40, np.int32)
    tokens[:4] = [7, 0, 9, 300]
    spec = Spec(Array((40,), "int32", 500), Array((), "int32"), 2)
    found = examples.Examples(spec, NAMES, num_classes=2, from_logits=True, limit=1)
    found.add(0, np.array([1]), np.ones(1), np.zeros((1, 2)), lambda row: tokens)
    assert json.loads(found.document(step=0, split="test", total=1) or "")["worst"][0]["text"] == "7 0 9 300"


# Whole runs.


RUN = ["--model=cnn", "--global_batch_size=64", "--train_steps=24", "--learning_rate=0.01", "--ema_momentum=0.5"]


@pytest.fixture(scope="module")
def model_dir(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run on two replicas."""
    directory = tmp_path_factory.mktemp("looked_at")
    Trainer(digits_dir).run(f"--model_dir={directory}", *RUN, "--replicas=2")
    return directory


def document(directory: pathlib.Path) -> dict:
    return json.loads((directory / "examples.json").read_text())


def assembled(devices: cluster.Cluster, directory: pathlib.Path, **options: object) -> Assembly:
    settings = config.merge({"mode": "eval", "model_dir": str(directory), **options})
    source = models.find(settings.model, settings.model_options)
    read = inputs.open_inputs(settings, cache_dir="")
    return Assembly(settings, Clock(0.0), source, read, run_dir.RunDir(settings.model_dir), devices)


def everything(dataset: pipeline.Dataset, split: str) -> tuple[Any, np.ndarray]:
    size = dataset.splits[split]
    x, y, _ = next(
        pipeline.eval_batches(dataset, split, global_batch_size=size, per_replica_batch_size=size).as_numpy_iterator()
    )
    return x, y


@pytest.mark.slow
def test_a_run_tells_what_predict_tells_on_any_number_of_replicas(
    devices: cluster.Cluster, model_dir: pathlib.Path, digits_dir: pathlib.Path
) -> None:
    images, y = everything(pipeline.open_dataset("digits", str(digits_dir)), "test")
    exported = keras.models.load_model(str(model_dir / "export" / "model.keras"), compile=False)
    logits = exported.predict(images, batch_size=297, verbose=0)
    of_two = document(model_dir)
    use_checkpoint(assembled(devices, model_dir, **config.of_run(json.loads((model_dir / "config.json").read_text()))))
    of_one = document(model_dir)
    loss = -np.log(softmax(logits.astype(np.float64))[np.arange(297), y])
    for found in (of_two, of_one):
        assert (found["step"], found["examples"], found["total"]) == (24, 297, 297)
        confusion = np.array(found["confusion"])
        expected = np.zeros((10, 10), int)
        np.add.at(expected, (y, logits.argmax(axis=1)), 1)
        np.testing.assert_array_equal(confusion, expected)
        assert confusion.trace() / 297 == pytest.approx(metrics_of(model_dir)[-1]["eval/accuracy"])
        assert [worst["index"] for worst in found["worst"]] == np.argsort(-loss)[:24].tolist()
        for worst in found["worst"]:
            index = worst["index"]
            assert worst["loss"] == pytest.approx(loss[index], abs=1e-4)
            assert worst["label"] == str(y[index]) and worst["predicted"] == str(logits[index].argmax())
            assert worst["probability"] == pytest.approx(np.exp(-loss[index]), abs=1e-4)
            content = base64.b64decode(worst["image"].partition(",")[2])
            np.testing.assert_array_equal(tf.io.decode_png(content).numpy(), images[index])
    accounted = json.loads((model_dir / "receipt.json").read_text())["seconds"]["evaluation"]
    assert accounted > 0


KINDS, COLOURS = ("ant", "bee", "cow"), ("red", "blue")
CSV = "colour,size,kind\n" + "".join(f"{COLOURS[i % 2]},{i}.5,{KINDS[i % 3]}\n" for i in range(90))
TEXTS = "".join(json.dumps({"text": f"text {i} äß", "kind": ("no", "yes")[i % 2]}) + "\n" for i in range(90))
# All in this process, one shard, and most of it to look at.
BUILD = ["--workers=1", "--num_shards=1", "--splits=train=0.2,test=0.8"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data_dir with a table and with texts, all of them in the test split but few."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "animals.csv").write_text(CSV)
    (folder / "remarks.jsonl").write_text(TEXTS)
    common = [f"--data_dir={folder}", *BUILD]
    assert build.main(["build", str(folder / "animals.csv"), "--label=kind", *common]) == 0
    of_texts = ["--tokenizer=bytes", "--sequence_length=12", "--label=kind"]
    assert build.main(["build", str(folder / "remarks.jsonl"), *of_texts, *common]) == 0
    assert build.main(["build", "digits_attributes", f"--data_dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize(
    ("dataset", "model"), [("animals", "mlp"), ("remarks", "text_classifier"), ("digits_attributes", "mlp")]
)
def test_any_data_with_classes_is_told_of(
    devices: cluster.Cluster, built: pathlib.Path, tmp_path: pathlib.Path, dataset: str, model: str
) -> None:
    run = assembled(devices, tmp_path, dataset=dataset, data_dir=str(built), model=model, global_batch_size=16)
    write_examples(run, 3)
    found = document(tmp_path)
    x, y = everything(run.inputs.dataset, "test")
    outputs = keras.ops.convert_to_numpy(run.copy(run.new_model())(x, training=False))
    judged = examples.judge(run.spec.task, y, outputs, from_logits=True)
    assert found["task"] == run.spec.task and found["examples"] == found["total"] == len(y)
    order = np.argsort(-judged.loss, kind="stable")[:24]
    assert [worst["loss"] for worst in found["worst"]] == pytest.approx(judged.loss[order], abs=1e-4)
    worst = found["worst"][0]
    index = worst["index"]
    if dataset == "digits_attributes":
        assert found["confusion"] is None and "image" in worst
        assert found["classes"] == ["even", "prime", "loop", "above_4"]
        names = [name for name, is_true in zip(found["classes"], y[index], strict=True) if is_true]
        assert worst["label"] == (", ".join(names) or "none")
    elif dataset == "remarks":
        assert found["classes"] == ["no", "yes"]
        assert worst["text"] == bytes(int(token) - 3 for token in x[index] if token).decode(errors="replace")
        assert worst["text"].startswith("text ")
    else:
        assert found["classes"] == ["ant", "bee", "cow"] and np.sum(found["confusion"]) == len(y)
        assert worst["features"]["colour"] == ("blue", "red")[x["colour"][index]]
        assert worst["features"]["size"] == pytest.approx(x["size"][index])


@pytest.fixture(scope="module")
def looked_at(devices: cluster.Cluster, built: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folder = tmp_path_factory.mktemp("once")
    return assembled(devices, folder, dataset="animals", data_dir=str(built), model="mlp", global_batch_size=16)


def test_a_failure_is_a_warning(looked_at: Assembly, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    run = dataclasses.replace(looked_at, folder=run_dir.RunDir(str(tmp_path)))
    (tmp_path / "examples.json" / "in_the_way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        write_examples(run, 1)
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("examples.json is not written: ")


def test_a_request_to_stop_is_respected(looked_at: Assembly) -> None:
    asked = []

    def goes_on() -> bool:
        asked.append(True)
        return len(asked) < 3

    write_examples(looked_at, 1, goes_on)
    assert len(asked) == 3 and looked_at.folder.read(run_dir.EXAMPLES) is None
    write_examples(looked_at, 1)
    assert looked_at.folder.read(run_dir.EXAMPLES) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"report_examples": 0},
        {"task": "regression", "dataset": "sizes"},
        {"dataset": "synthetic", "image_size": 8, "num_classes": 4},
    ],
)
def test_nothing_is_told_where_there_is_nothing_to_tell(
    devices: cluster.Cluster,
    built: pathlib.Path,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    options: dict,
) -> None:
    if "task" in options:
        (tmp_path / "sizes.csv").write_text(CSV)
        flags = [f"--data_dir={built}", *BUILD, "--label=size"]
        assert build.main(["build", str(tmp_path / "sizes.csv"), *flags]) == 0
    settings = {"dataset": "animals", "data_dir": str(built), "model": "mlp", "global_batch_size": 16} | options
    if settings["dataset"] == "synthetic":
        del settings["data_dir"]
    with caplog.at_level(logging.WARNING):
        write_examples(assembled(devices, tmp_path / "run", **settings), 1)
    assert not (tmp_path / "run").exists() and not caplog.records
