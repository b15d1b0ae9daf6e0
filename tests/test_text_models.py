"""Models of text and their task: what a position may know, and losses and metrics against NumPy."""

import math
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import synthetic
from data.spec import Array, Spec
from tests import text_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import config, export, inputs, models, tasks
from trainer.callbacks import Loop, lines, records
from trainer.errors import ConfigError
from trainer.tasks import language_model

S, V = 12, 11
LM = text_worker.SPECS["language_model"]
SIZES = {"width": 16, "depth": 2, "heads": 4}


def randomised(model: keras.Model) -> keras.Model:
    """Weights so large that a leak would show: at its start a model's attention is almost nothing."""
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(0, 0.5, w.shape) if w.dtype == np.float32 else w for w in model.get_weights()])
    return model


def lm(**options) -> keras.Model:
    return randomised(models.find("transformer", {**SIZES, **options}).build(LM))


def row(tokens: list[int], segments: list[int]) -> dict[str, np.ndarray]:
    return {"tokens": np.array([tokens], np.int32), "segments": np.array([segments], np.int32)}


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def turned(x: np.ndarray, heads: int) -> np.ndarray:
    """[S, heads, D]: channels i and i + D/2 of position p, as one complex number, times exp(i p 10000^(-2i/D))."""
    x = x.reshape(len(x), heads, -1)
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)  # [S, D/2]
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def test_the_logits_are_numpys() -> None:
    model = lm(depth=1, kv_heads=2)
    w = {v.path: v.numpy().astype(np.float64) for v in model.weights}
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
    x = w["embedding/embeddings"][tokens]  # [S, width]
    layer = {name.split("/")[1]: array for name, array in w.items() if name.startswith("block_00")}
    h = normed(x, layer["attention_norm"])
    query, key = turned(h @ layer["query"], 4), turned(h @ layer["key"], 2).repeat(2, axis=1)
    value = (h @ layer["value"]).reshape(S, 2, -1).repeat(2, axis=1)
    scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(query.shape[-1])
    scores = np.exp(np.where(np.tri(S, dtype=bool), scores, -np.inf))
    attended = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), value).reshape(S, -1)
    x = x + attended @ layer["attended"]
    h = normed(x, layer["gated_norm"])
    gate = h @ layer["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]
    expected = normed(x, w["norm/scale"]) @ w["embedding/embeddings"].T
    np.testing.assert_allclose(model(row(tokens.tolist(), [1] * S))[0].numpy(), expected, atol=2e-4)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "tied": False}, {"kv_heads": 2, "hidden": 24}])
def test_a_packed_document_is_read_as_if_it_were_alone(options: dict) -> None:
    model = lm(**options)
    documents = [[3, 1, 4, 1, 5], [9, 2, 6, 5]]
    packed = row(documents[0] + documents[1] + [0, 0, 0], [1] * 5 + [2] * 4 + [0] * 3)
    logits = model(packed)[0].numpy()
    for document, begin in zip(documents, (0, 5), strict=True):
        padding = [7] * (S - len(document))
        alone = model(row(document + padding, [1] * S))[0].numpy()
        np.testing.assert_allclose(logits[begin : begin + len(document)], alone[: len(document)], atol=1e-5)
    later = model(row([3, 1, 4, 8, 8] + documents[1] + [0, 0, 0], [1] * 5 + [2] * 4 + [0] * 3))[0].numpy()
    np.testing.assert_allclose(later[:3], logits[:3], atol=1e-6, err_msg="what comes later is not seen")
    assert np.abs(later[3:5] - logits[3:5]).max() > 1e-2
    swapped = model(row([1, 3, 4, 1, 5] + documents[1] + [0, 0, 0], [1] * 5 + [2] * 4 + [0] * 3))[0].numpy()
    assert np.abs(swapped[4] - logits[4]).max() > 1e-3, "the order of what came before is"


def test_the_loss_of_a_packed_record_is_that_of_its_documents() -> None:
    model, loss = lm(), tasks.loss(LM)
    packed = row([3, 1, 4, 1, 5, 9, 2, 6, 5, 0, 0, 0], [1] * 5 + [2] * 4 + [0] * 3)
    targets = np.array([[1, 4, 1, 5, 2, 2, 6, 5, 2, -1, -1, -1]])
    whole = float(loss(targets, model(packed)))
    parts = []
    for begin, end in ((0, 5), (5, 9)):
        fill = S - (end - begin)
        one = row(packed["tokens"][0, begin:end].tolist() + [0] * fill, [1] * (end - begin) + [0] * fill)
        nexts = np.array([targets[0, begin:end].tolist() + [-1] * fill])
        parts.append(float(loss(nexts, model(one))))
    assert whole == pytest.approx(sum(parts), abs=1e-5)


def test_more_padding_changes_no_class() -> None:
    arrays = [Array((length,), "int32", V) for length in (S, 2 * S)]
    options = {"width": 16, "depth": 2, "heads": 2, "kernel": 5}
    found = [models.find("text_classifier", options).build(Spec(a, Array((), "int32"), 3)) for a in arrays]
    short, long = (randomised(model) for model in found)
    tokens = text_worker.examples("classification", 6)[0]
    padded = np.pad(tokens, ((0, 0), (0, S)))
    np.testing.assert_allclose(long(padded).numpy(), short(tokens).numpy(), atol=1e-5)
    other = np.where(tokens > 0, tokens % (V - 1) + 1, 0)
    assert np.abs(short(other).numpy() - short(tokens).numpy()).max() > 1e-2


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, targets, weights of the examples)."""
    rng = np.random.default_rng(3)
    targets = rng.integers(-1, V, (4, S))
    targets[1] = -1
    return rng.normal(0, 3, (4, S, V)).astype(np.float32), targets, np.array([1, 1, 0, 2], np.float32)


def entropies(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """[B, S]: 0 where there is no target."""
    divisor = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return (divisor - picked) * (targets >= 0)


def test_loss_and_metrics_are_numpys() -> None:
    logits, targets, weights = batch()
    entropy, there = entropies(logits, targets), targets >= 0
    loss = language_model.TokenCrossentropy()
    assert float(loss(targets, logits)) == pytest.approx(entropy.sum() / (4 * S), rel=1e-6)
    weighted = (entropy.mean(1) * weights).sum() / 4
    assert float(loss(targets, logits, sample_weight=weights)) == pytest.approx(weighted, rel=1e-6)
    z = np.square(np.log(np.exp(logits).sum(-1))) * there
    z_loss = language_model.TokenCrossentropy(z_loss=0.1)
    assert float(z_loss(targets, logits)) == pytest.approx((entropy + 0.1 * z).sum() / (4 * S), rel=1e-5)
    perplexity, accuracy = tasks.metrics(LM)
    for metric in (perplexity, accuracy):
        metric.update_state(targets[:2], logits[:2], sample_weight=weights[:2])
        metric.update_state(targets[2:], logits[2:], sample_weight=weights[2:])
    counted = there * weights[:, None]
    mean = (entropy * weights[:, None]).sum() / counted.sum()
    assert float(perplexity.result()) == pytest.approx(math.exp(mean), rel=1e-5)
    right = (logits.argmax(-1) == targets) * counted
    assert float(accuracy.result()) == pytest.approx(right.sum() / counted.sum(), rel=1e-6)


def test_layers_come_back_from_their_config() -> None:
    model = lm(dropout=0.1)
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    x = text_worker.examples("language_model", 2)[0]
    np.testing.assert_allclose(again(x).numpy(), model(x).numpy(), atol=1e-6)
    assert [layer.name for layer in model.layers if layer.name.startswith("block")] == ["block_00", "block_01"]


def test_gpt2s_size_in_one_line_and_its_initial_weights() -> None:
    spec = Spec(LM.inputs, Array((S,), "int32", 50257), None, "language_model")
    model = models.find("transformer", {"width": 768, "depth": 12, "heads": 12}).build(spec)
    assert model.count_params() == 50257 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768  # 124 million
    block = model.get_layer("block_03")
    assert block._query.kernel.numpy().std() == pytest.approx(0.02, rel=0.02)
    assert block._down.kernel.numpy().std() == pytest.approx(0.02 / math.sqrt(24), rel=0.02)


def test_an_export_takes_tokens_alone(tmp_path: pathlib.Path) -> None:
    model = lm()
    export.save(model, LM, str(tmp_path / "export"))
    serve = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    text = [3, 1, 4, 1, 5]
    served = serve(tokens=tf.constant([text + [0] * (S - 5)]))
    assert list(served) == ["logits"]
    alone = model(row(text + [0] * (S - 5), [1] * 5 + [0] * (S - 5)))
    np.testing.assert_allclose(served["logits"][0, :5], alone[0, :5], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "spec", "message"),
    [
        ("transformer", {"width": 20, "heads": 4, "kv_heads": 3}, LM, "heads a multiple of kv_heads"),
        ("transformer", {"width": 12, "heads": 4}, LM, "an even multiple of heads"),
        ("transformer", {}, Spec(Array((8, 8, 3), "uint8"), Array((), "int32"), 3), "takes tokens"),
        ("text_classifier", {}, Spec(Array((8,), "int32"), Array((), "int32"), 3), "whose size the dataset tells"),
    ],
)
def test_what_does_not_fit(name: str, options: dict, spec: Spec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.find(name, options).build(spec)


def test_the_task_is_found_by_the_label() -> None:
    assert tasks.choose("auto", LM) == "language_model"
    assert tasks.choose("auto", text_worker.SPECS["classification"]) == "classification"
    with pytest.raises(ConfigError, match="not a sequence of tokens"):
        tasks.choose("language_model", text_worker.SPECS["classification"])


def test_synthetic_tokens() -> None:
    options = {"dataset": "synthetic", "model_dir": "x", "task": "language_model", "num_classes": 99}
    read = inputs.open_inputs(config.merge({**options, "sequence_length": 16}), "")
    assert read.spec.sequence_length == 16 and read.spec.label.below == 99 and read.spec.task == "language_model"
    x, y = next(iter(synthetic.train_batches(read.dataset, global_batch_size=4, per_replica_batch_size=4)))
    assert x["tokens"].shape == x["segments"].shape == y.shape == (4, 16)
    assert int(tf.reduce_max(x["tokens"])) > 90 and int(tf.reduce_max(y)) < 99
    for wrong, message in (
        (options, "give --sequence_length"),
        ({**options, "sequence_length": 16, "image_size": 8}, "image_size has no effect on tokens"),
        ({**options, "sequence_length": 16, "task": "auto"}, "sequence_length is for"),
        ({**options, "sequence_length": 16, "dataset": "digits"}, "sequence_length is for"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.merge(wrong)


class Kept:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[records.Record] = []

    def drop_after(self, step: int) -> None:
        pass

    def write(self, record: records.Record) -> None:
        self.records.append(record)


def test_records_tell_tokens_a_second_of_tokens_only() -> None:
    for length in (16, None):
        sink = Kept()
        log = records.Records(lambda step: True, [sink], global_batch_size=10, start_step=0, sequence_length=length)
        log.on_loop_end(Loop(0, 10, 1.0, 0.0, {"loss": 1.0}, 0.1, first=False))
        [record] = sink.records
        assert record.values["train/examples_per_sec"] == 100
        assert ("train/tokens_per_sec" in record.values) == (length is not None)
        if length is not None:
            assert record.values["train/tokens_per_sec"] == 1600
            assert "1,600 tokens/s" in lines.line(record, 10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("text") / "found.npz"
    command = [sys.executable, "-m", "tests.text_worker", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


@pytest.mark.slow
@pytest.mark.parametrize("task", text_worker.SPECS)
def test_two_replicas_learn_what_one_does(trained: dict[str, np.ndarray], task: str) -> None:
    one, two = (
        {k.removeprefix(f"{task}/{n}/"): a for k, a in trained.items() if k.startswith(f"{task}/{n}/")} for n in (1, 2)
    )
    assert one.keys() == two.keys() and any(key.startswith("weight") for key in one)
    for key, array in one.items():
        # What sums of another order leave, in outputs more than in each weight.
        np.testing.assert_allclose(
            two[key], array, rtol=0, atol=1e-5 if key.startswith("weight") else 5e-5, err_msg=key
        )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_counts_each_token_once(trained: dict[str, np.ndarray], replicas: int) -> None:
    logits = trained[f"language_model/{replicas}/logits"]
    targets = text_worker.examples("language_model", 24)[1][: text_worker.EVALUATED]
    entropy, there = entropies(logits, targets), targets >= 0
    found = {
        name: float(trained[f"language_model/{replicas}/eval/{name}"]) for name in ("perplexity", "accuracy", "loss")
    }
    assert found["perplexity"] == pytest.approx(math.exp(entropy.sum() / there.sum()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(((logits.argmax(-1) == targets) & there).sum() / there.sum(), abs=1e-6)
    z = 1e-3 * np.square(np.log(np.exp(logits).sum(-1))) * there
    assert found["loss"] == pytest.approx((entropy + z).mean(), rel=1e-5)
