"""--mode=profile_input: what it leaves, what it finds slow, what it advises, and what it refuses."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from tests.devices import one_replica
from trainer import console, profile_picture, profile_report

ONLY_FILES = {"profile_input.json", "profile_input.svg"}
SMALL = ["--model=mlp", "--model_options=units=[8]"]
# The trainer, but that it measures for less time: enough where nothing but a large difference is asked for.
IN_SHORT = """
import runpy
from trainer import profile_input
profile_input.TURN_LEAST_SECS /= 5
profile_input.ROUNDS = profile_input.LEAST_ROUNDS
runpy.run_module("trainer.main", run_name="__main__", alter_sys=True)
"""


def profiled(*flags: str) -> subprocess.CompletedProcess:
    """--mode=profile_input, which must end well."""
    command = [sys.executable, "-c", IN_SHORT, "--mode=profile_input", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environ(), timeout=GUARD_SECS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def profile_of(model_dir: pathlib.Path) -> dict:
    return json.loads((model_dir / "profile_input.json").read_text())


# --- whole runs ---


@pytest.mark.slow
def test_it_measures_every_stage_and_touches_nothing_of_a_run(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = [f"--model_dir={tmp_path}", *SMALL, "--train_steps=4", "--replicas=2"]
    trainer.run(*flags)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # Flags of a training run that would refuse to go on from this model_dir: nothing is trained, so nothing is refused.
    done = profiled("--dataset=digits", f"--data_dir={trainer.data_dir}", *flags, "--seed=7")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() - before.keys()} == ONLY_FILES
    assert {path: after[path] for path in before} == before

    found = profile_of(tmp_path)
    assert [stage["name"] for stage in found["stages"]] == ["read", "shuffle", "parse", "decode", "transfer"]
    for rate in (*found["stages"], found["model"]):
        assert rate["examples_per_sec"] > 0
        assert len(rate["examples_per_sec_of_rounds"]) >= 2
        assert rate["mb_per_sec"] == pytest.approx(rate["examples_per_sec"] * rate["bytes_per_example"] / 1e6)
    sizes = {stage["name"]: stage["bytes_per_example"] for stage in found["stages"]}
    assert sizes["read"] == sizes["shuffle"] > sizes["parse"] > 64  # a record is more than its image of 8 x 8
    assert sizes["decode"] == sizes["transfer"] == 8 * 8 + 4  # uint8 and an int32 label
    assert found["verdict"]["text"] in done.stdout
    assert "without a TPU (CPU: 2 virtual replicas" in done.stdout
    assert re.search(r"^decode +[\d,]+ +[\d,]+ +[\d,]+ +[\d,.]+ +[\d,.]+ us +\d+%$", done.stdout, re.MULTILINE)
    assert (tmp_path / "profile_input.svg").read_text().startswith("<svg")


@pytest.mark.nightly
def test_decoding_large_pngs_is_named(tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    noise = np.random.default_rng(0).integers(0, 256, (700, 900, 3), np.uint8)
    for label, number in itertools.product("ab", range(20)):
        path = tmp_path / "pngs" / "train" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.roll(noise[: 600 + 5 * number], number, axis=0)).numpy())
    build = [sys.executable, "-m", "data.build", str(tmp_path / "pngs"), f"--data_dir={tmp_path}", "--num_shards=4"]
    subprocess.run(build, cwd=ROOT, check=True, timeout=GUARD_SECS)
    flags = ["--dataset=pngs", f"--data_dir={tmp_path}", *SMALL, "--image_size=32", "--global_batch_size=8"]
    done = profiled(*flags, f"--model_dir={tmp_path / 'run'}")
    assert {path.name for path in (tmp_path / "run").iterdir()} == ONLY_FILES
    found = profile_of(tmp_path / "run")
    assert found["verdict"]["slowest_stage"] == "decode and crop"
    assert not found["verdict"]["enough"]
    facts = found["circumstances"]
    assert facts["image_formats"] == ["png"]
    assert 600 <= facts["image_side"] < 700
    smaller, jpeg, *_, cores = found["verdict"]["advice"]
    assert "smaller images" in smaller
    assert "rebuild the dataset with 37," in smaller  # 32 / 0.875
    assert "of PNG all of it" in jpeg
    assert "more cores" in cores
    assert re.search("^slowest +decode and crop: ", done.stdout, re.MULTILINE)


@pytest.mark.nightly
def test_a_dataset_without_files_has_two_stages(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    size = ["--dataset=synthetic", "--data_dir=none", "--image_size=8", "--num_classes=10"]
    trainer.run(f"--model_dir={tmp_path}", "--mode=profile_input", *SMALL, *size)
    found = profile_of(tmp_path)
    assert [stage["name"] for stage in found["stages"]] == ["generate", "transfer"]
    assert {stage["bytes_per_example"] for stage in found["stages"]} == {8 * 8 * 3 + 4}
    assert any("says nothing about the pipeline of a real dataset" in text for text in found["verdict"]["caveats"])


@pytest.mark.nightly
def test_what_is_read_in_place_of_damaged_shards_does_not_stay(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    data_dir = tmp_path / "data"
    shutil.copytree(trainer.data_dir, data_dir)
    (shard,) = data_dir.glob("digits/*/digits-train.tfrecord-00001-of-00004")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    flags = [f"--data_dir={data_dir}", f"--model_dir={tmp_path / 'run'}", "--mode=profile_input", *SMALL]
    done = trainer.run(*flags, code=78)
    assert "digits-train.tfrecord-00001-of-00004, record 187" in done.stderr
    assert not (tmp_path / "run").exists()
    trainer.run(*flags, "--corrupt_records=skip", "--max_corrupt_records=1")
    assert {path.name for path in (tmp_path / "run").iterdir()} == ONLY_FILES


@pytest.mark.slow
def test_several_machines_are_refused(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    task = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    environ = {"TF_CONFIG": json.dumps(task)}
    flags = [f"--model_dir={tmp_path / 'run'}", "--mode=profile_input", *SMALL]
    assert "others read too. Received: TF_CONFIG" in trainer.run(*flags, code=78, environ=environ).stderr
    assert not (tmp_path / "run").exists()


# --- measuring ---


def test_the_stage_that_computes_most_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from data import stages
    from trainer import profile_input

    monkeypatch.setattr(profile_input, "TURN_LEAST_SECS", 0.02)

    def pipeline(depth: int, slow: int):
        def work(rows: tf.Tensor) -> tf.Tensor:  # [4, 256, 256]
            for index in range(depth):
                rows = tf.linalg.inv(rows) if index == slow else rows + 1
            return rows

        return lambda seed: tf.data.Dataset.from_tensors(tf.random.uniform([4, 256, 256])).repeat().map(work)

    class Trained:
        devices = one_replica()

        def run_train_loop(self, iterator, steps: int) -> types.SimpleNamespace:
            for _ in range(steps):
                next(iterator)
            return types.SimpleNamespace(input_wait_secs=0.0)

    names = ["read", "shuffle", "parse", "decode"]
    for slow in (1, 2):
        timed = [stages.Stage(name, pipeline(index + 1, slow), 16) for index, name in enumerate(names)]
        measured = profile_input.measure(timed, Trained(), steps_per_loop=10, seed=0)
        profile = profile_report.Profile(measured.stages, measured.model, FACTS)
        assert profile.stages[profile.slowest].name == names[slow]
        assert {stage.bytes_per_example for stage in measured.stages} == {256 * 256 * 4}


def test_every_turn_has_an_order_of_its_own_and_rounds_end_with_the_time() -> None:
    from trainer import profile_input

    turns: list[list[int]] = [[], []]

    def timer(index: int):
        return lambda turn: turns[index].append(turn) or float(turn)

    assert profile_input.interleave([timer(0), timer(1)]) == turns == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert profile_input.interleave([float], budget_secs=-1.0) == [[0.0, 1.0]]


def test_whole_windows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from data import stages
    from trainer import profile_input

    monkeypatch.setattr(profile_input, "TURN_LEAST_SECS", 0.0)
    pulled = []

    class Timer(profile_input.StageTimer):
        def _windows(self, iterator, secs_each: float, *, least_secs: float) -> tuple[int, float]:
            pulled.append(super()._windows(iterator, secs_each, least_secs=least_secs)[0])
            return pulled[-1], 1.0

    stage = stages.Stage("read", lambda seed: tf.data.Dataset.range(10**6).batch(3), 19)
    assert Timer(stage, one_replica(), 0)(0) == 19 * 3
    assert pulled == [19, 19], "one window unmeasured, one measured"


# --- verdict ---

FACTS = profile_report.Circumstances(
    dataset="photos/1.0.0",
    num_shards=64,
    num_streams=16,
    most_streams=16,
    dataset_bytes=1e9,
    memory_bytes=10**10,
    remote=False,
    image_size=224,
    wanted_side=256,
    image_formats=("jpeg",),
    image_side=256.0,
    cores=8,
    device_kind="tpu",
    devices="TPU: local",
)
NAMES = ("read", "shuffle", "parse", "decode and crop", "transfer")


def profile(added: list[float], model: float = 1.0, **facts) -> profile_report.Profile:
    """Stages that add so many seconds an example, in two noisy rounds and an exact one."""
    ends = itertools.accumulate(added)
    bytes_of = dict.fromkeys(NAMES[:3], 40e3) | dict.fromkeys(NAMES[3:], 150e3)
    rates = [
        profile_report.Rate(name, (0.5 / end, 1 / end, 2 / end), bytes_of[name])
        for name, end in zip(NAMES, ends, strict=True)
    ]
    model_rate = profile_report.Rate("model", (1 / model,) * 3, 150e3)
    return profile_report.Profile(tuple(rates), model_rate, dataclasses.replace(FACTS, **facts))


@pytest.mark.parametrize(
    ("model", "text"),
    [(3.0, "fast enough: .* 3.00 times"), (1.5, "barely .* 1.50 times"), (0.6, "too slow: .* wait 40% of the time")],
)
def test_twice_the_speed_of_the_model_is_enough(model: float, text: str) -> None:
    found = profile([0.2] * 5, model)
    assert re.match(text, profile_report.headline(found))
    assert bool(profile_report.advice(found)) == (model < 2), "no advice where nothing is wrong"


@pytest.mark.parametrize(
    ("slow", "facts", "expected"),
    [
        (
            0,
            {},
            ["smaller records", "about 20 like the 8 of this machine, here or on other machines with --data_service"],
        ),
        (0, {"num_shards": 2, "num_streams": 2}, ["with 8 or more", "smaller records", "more cores"]),
        (0, {"remote": True}, ["--cache keeps the 1.0 GB"]),
        (0, {"remote": True, "num_streams": 8}, ["with 16 or more", "nearer"]),
        (1, {}, ["smaller --shuffle_mib", "more cores"]),
        (2, {}, ["40,000 bytes an example", "more cores"]),
        (3, {}, ["decoded images in the records", "more cores"]),
        (3, {"image_side": 900.0}, ["with 256, which is all that image_size=224", "decoded images", "more cores"]),
        (3, {"image_formats": ("jpeg", "png")}, ["of PNG all of it", "decoded images", "more cores"]),
        (3, {"image_formats": (), "image_side": None}, ["more cores"]),
        (4, {}, ["fewer bytes"]),
    ],
)
def test_advice_follows_from_the_slowest_stage(slow: int, facts: dict, expected: list[str]) -> None:
    added = [0.025] * 5
    added[slow] = 1.15  # 1.25 s together, and the model takes 1 s: 0.8 times its speed, and 8 cores become 20
    found = profile(added, **facts)
    texts = profile_report.advice(found)
    assert len(texts) == len(expected), texts
    for text, part in zip(texts, expected, strict=True):
        assert part in text
    assert profile_report.slowest(found).startswith(NAMES[slow] + ":")


def test_noise_is_no_gain() -> None:
    slower_without_parsing = profile([0.2, 0.3, -0.1, 0.4, 0.0])
    assert slower_without_parsing.added_secs() == pytest.approx([0.2, 0.3, 0.0, 0.3, 0.0])


def test_figures_say_what_they_are_not() -> None:
    on_tpu = profile_report.caveats(profile([0.1] * 5, dataset_bytes=1e12))
    assert on_tpu == []
    on_cpu = " ".join(profile_report.caveats(profile([0.1] * 5, device_kind="cpu", devices="CPU: 1 replica")))
    assert "without a TPU (CPU: 1 replica)" in on_cpu
    assert "share this machine's cores" in on_cpu
    assert "read from there, not from the disk" in on_cpu


# --- picture and table ---


def test_the_picture_stands_alone_and_its_bars_add_up() -> None:
    found = profile([0.1, 0.1, 0.2, 0.5, 0.1], dataset="a & b <c>/1.0.0")
    text = profile_picture.svg(found)
    root = ElementTree.fromstring(text)
    assert not re.search(r"href|url\(|@import|<script|var\(", text)
    assert "prefers-color-scheme: dark" in text
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Input pipeline of a & b <c>/1.0.0" in labels
    assert {*NAMES, "model"} <= set(labels)
    bars = [element.attrib for element in root.iter("{http://www.w3.org/2000/svg}rect") if "x" in element.attrib]
    assert [bar["class"] for bar in bars] == ["stage", "stage", "stage", "slow", "stage", "model"]
    begins = [float(bar["x"]) for bar in bars]
    ends = [float(bar["x"]) + float(bar["width"]) for bar in bars]
    assert begins[1:5] == pytest.approx(ends[:4], abs=0.2)
    assert begins[5] == begins[0]
    assert ends[5] == pytest.approx(ends[4], abs=0.5), "model and pipeline take a second each"
    (limit,) = (line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.attrib["class"] == "limit")
    assert float(limit.attrib["x1"]) == pytest.approx((begins[5] + ends[5]) / 2, abs=0.5)


def test_the_table_is_aligned() -> None:
    lines = console.columns(profile_report.rows(profile([0.1, 0.1, 0.2, 0.5, 0.1]))).splitlines()
    assert lines[0].split()[:3] == ["up", "to", "examples/s"]
    assert lines[4].startswith("decode and crop")
    assert lines[4].split()[-1] == "50%"
    assert len({line.index(" us") for line in lines[1:]}) == 1
