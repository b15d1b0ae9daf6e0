"""What a run that was hurt is compared in with one that was left in peace; for `scripts/chaos.py`.

Each check returns what differs, in words; nothing where all is well.

That every record counts exactly once is not concluded from equal weights, but observed: each process writes down the
fingerprint of every image that its train loop is handed, batch by batch. A start that goes on from step s makes all
that earlier starts trained from s on void, for the state is that of the checkpoint of s. What is left is, for each
step, the one batch that is in the final weights. Its images are looked up as (shard, index) in a reading of the dataset
apart from any run, and compared with `Order.record_ids`. Equal bits of weights, optimizer and random state then say
that nothing else came in between.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data import pipeline
from tests.chaos_process import fingerprints
from tests.conftest import metrics_of, state_of

TIMED = ("examples_per_sec", "step_ms", "input_wait_ms", "host_memory_mib")
RECEIPT_SLACK_SECS = 5.0  # between processes that write down when they begin and us, who watch them


@dataclasses.dataclass(frozen=True)
class Start:
    """A process of a run.

    worker, records: which worker it was, and the file its batches were written to (the step is added to the name).
    began_at: step it went on from; None where it did not come so far.
    took_over: whether it came to write in model_dir.
    exit_code: None where it was killed.
    troubled: whether storage failed it, so that its last words may be missing.
    launched: monotonic seconds.
    """

    worker: int
    records: pathlib.Path
    began_at: int | None
    took_over: bool
    exit_code: int | None
    troubled: bool
    launched: float


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How equal: 0 for bit-identical."""

    tolerance: float

    def differ(self, one: Any, other: Any) -> bool:
        """Whether two arrays or numbers are not equal enough."""
        if not self.tolerance or np.asarray(one).dtype.kind not in "fc":
            return np.asarray(one).tobytes() != np.asarray(other).tobytes()
        return not np.allclose(one, other, rtol=0, atol=self.tolerance, equal_nan=True)


def weights(hurt: pathlib.Path, quiet: pathlib.Path, bounds: Bounds) -> list[str]:
    """Every array of the newest checkpoint."""
    ours, theirs = state_of(hurt), state_of(quiet)
    found = [f"weights: {name} is in one of the runs only" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        if bounds.differ(ours[name], theirs[name]):
            found.append(f"weights: {name} differs, by up to {np.abs(ours[name] - theirs[name]).max():.3g}")
    return found


def log(hurt: pathlib.Path, quiet: pathlib.Path, bounds: Bounds) -> list[str]:
    """metrics.jsonl: the same records in the same order, with the same values."""
    return _compare_records("metrics.jsonl", metrics_of(hurt), metrics_of(quiet), bounds)


def tensorboard(hurt: pathlib.Path, quiet: pathlib.Path, bounds: Bounds) -> list[str]:
    """What TensorBoard shows: the same steps of the same tags, with the same values."""
    return _compare_records("tensorboard", _scalars(hurt), _scalars(quiet), bounds)


def _scalars(model_dir: pathlib.Path) -> list[dict]:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of what earlier starts wrote in vain
    board = EventAccumulator(str(model_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in sorted(board.Tags()["scalars"]) if tag.rpartition("/")[2] not in TIMED]
    return [{"step": event.step, tag: event.value} for tag in tags for event in board.Scalars(tag)]


def _compare_records(what: str, ours: list[dict], theirs: list[dict], bounds: Bounds) -> list[str]:
    forms, expected = ([(r["step"], tuple(r)) for r in records] for records in (ours, theirs))
    if forms != expected:
        lost, doubled = Counter(expected) - Counter(forms), Counter(forms) - Counter(expected)
        return [f"{what}: missing {list(lost)[:5]}, too much {list(doubled)[:5]}, else in another order"]
    found = []
    for our, their in zip(ours, theirs, strict=True):
        found += [
            f"{what}: step {our['step']}: {name} is {our[name]}, not {their[name]}"
            for name in our
            if bounds.differ(our[name], their[name])
        ]
    return found[:10]


def export(hurt: pathlib.Path, quiet: pathlib.Path, bounds: Bounds) -> list[str]:
    """The export holds the trained weights, and answers as the other one does."""
    served, expected = (tf.saved_model.load(str(run / "export")) for run in (hurt, quiet))
    # Without the state of the dropout, which is no part of what serves.
    trained = [array for name, array in state_of(hurt).items() if name.startswith("model/") and array.dtype.kind == "f"]
    exported = [variable.numpy() for variable in served.variables if variable.dtype.is_floating]
    found = []
    if Counter(map(_bytes, trained)) != Counter(map(_bytes, exported)):
        found.append("export: its variables are not the weights of the newest checkpoint")
    images = np.random.default_rng(0).integers(0, 17, [64, 8, 8, 1]).astype("uint8")
    answers = [run.signatures["serving_default"](image=tf.constant(images))["logits"] for run in (served, expected)]
    if bounds.differ(*(answer.numpy() for answer in answers)):
        found.append("export: the logits differ")
    return found


def _bytes(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def leftovers(model_dir: pathlib.Path, *, most: int) -> list[str]:
    """Nothing half-written, nothing incomplete, no more than `most` checkpoints."""
    names = [path.relative_to(model_dir) for path in model_dir.rglob("*")]
    found = [f"left behind: {name}" for name in names if name.suffix == ".part" or name.name.startswith(".")]
    steps = [path for path in (model_dir / "checkpoints").iterdir() if path.is_dir()]
    if len(steps) > most:
        found.append(f"left behind: {len(steps)} checkpoints, where {most} are kept")
    for step in steps:
        files = sorted(path.name for path in step.iterdir())
        if "COMMIT.json" not in files:
            found.append(f"left behind: checkpoint {step.name} without COMMIT.json: {files}")
        elif len({name.partition(".")[0] for name in files} - {"COMMIT"}) != 1:
            found.append(f"left behind: checkpoint {step.name} has more than one bundle: {files}")
    return found


def receipt(model_dir: pathlib.Path, starts: Sequence[Start], elapsed_secs: float) -> list[str]:
    """One entry for each start that came to write, with its exit code; seconds that sum up to what passed."""
    account = json.loads((model_dir / "receipt.json").read_text())
    entries, found = account["starts"], []
    codes = [entry["exit_code"] for entry in entries]
    wrote = [start for start in starts if start.took_over]
    expected = [start.exit_code for start in wrote]
    silent = [None if start.troubled else start.exit_code for start in wrote]
    if len(codes) != len(wrote) or any(code not in known for code, *known in zip(codes, expected, silent, strict=True)):
        found.append(f"receipt: exit codes {codes}, where the starts ended with {expected}")
    if abs(sum(account["seconds"].values()) - account["wall_secs"]) > 0.1:
        found.append(f"receipt: the parts sum to {sum(account['seconds'].values())}, not {account['wall_secs']}")
    if abs(account["wall_secs"] - elapsed_secs) > RECEIPT_SLACK_SECS + 0.1 * elapsed_secs:
        found.append(f"receipt: {account['wall_secs']} s, where {elapsed_secs:.1f} s passed")
    return found


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the train loops were to read: how, and for how many steps."""

    data_dir: pathlib.Path
    global_batch_size: int
    shuffle_mib: float
    seed: int
    train_steps: int


def records(starts: Sequence[Start], reading: Reading, *, num_workers: int, batches_a_step: int) -> list[str]:
    """Each step's records are in the final weights, once, and no others.

    Args:
        starts: in the order they began.
        batches_a_step: batches that a worker hands to its replicas in a step.
    """
    expected = _expected(reading)  # [T, B] fingerprints, and how often each record of the split is in there
    workers = [_that_count([s for s in starts if s.worker == w], batches_a_step) for w in range(num_workers)]
    found = []
    for step, wanted in enumerate(expected):
        seen = [fingerprint for batches in workers for fingerprint in batches.get(step, [])]
        if Counter(seen) != Counter(wanted):
            lost, surplus = Counter(wanted) - Counter(seen), Counter(seen) - Counter(wanted)
            found.append(f"records: step {step}: {lost.total()} missing, {surplus.total()} that do not belong there")
    return found[:5]


def _that_count(starts: Sequence[Start], batches_a_step: int) -> dict[int, list[str]]:
    """Step -> fingerprints of what the final weights were trained on, as one worker was handed it."""
    counting: dict[int, list[str]] = {}
    for start in starts:
        if start.began_at is None:
            continue
        counting = {step: prints for step, prints in counting.items() if step < start.began_at}
        file = start.records.with_name(f"{start.records.name}-{start.began_at}.txt")
        lines = file.read_text().splitlines() if file.exists() else []
        for index in range(len(lines) // batches_a_step):
            mine = lines[index * batches_a_step : (index + 1) * batches_a_step]
            counting[start.began_at + index] = [fingerprint for line in mine for fingerprint in line.split()]
    return counting


def _expected(reading: Reading) -> list[list[str]]:
    dataset = pipeline.open_dataset("digits", str(reading.data_dir))
    options: Mapping[str, Any] = {
        "global_batch_size": reading.global_batch_size,
        "seed": reading.seed,
        "shuffle_mib": reading.shuffle_mib,
    }
    order = pipeline.plan_order(dataset, "train", **options)
    ids = order.record_ids(0, reading.train_steps).numpy()  # [T, B, 2]
    whole = reading.train_steps * reading.global_batch_size // order.num_examples
    counts = Counter(map(tuple, ids.reshape(-1, 2).tolist()))
    if len(counts) != order.num_examples or set(counts.values()) - {whole, whole + 1}:
        raise AssertionError(f"the order itself is wrong: each record {whole} or {whole + 1} times, not {counts}")
    # By the fingerprints of another seed and batch size, whose places have nothing to do with those of the run.
    prints = _fingerprints_by_id(dataset, order.num_examples)
    return [[prints[tuple(record)] for record in batch] for batch in ids.tolist()]


def _fingerprints_by_id(dataset: pipeline.Dataset, num_examples: int) -> dict[tuple[int, int], str]:
    options: Mapping[str, Any] = {"global_batch_size": 100, "seed": 12345, "shuffle_mib": 1.0}
    steps = 2 * num_examples // 100
    ids = pipeline.plan_order(dataset, "train", **options).record_ids(0, steps).numpy().reshape(-1, 2)
    batches = pipeline.train_batches(dataset, "train", per_replica_batch_size=100, **options).take(steps)
    prints = [f for x, _ in batches for f in fingerprints(tf, x).numpy().decode().split()]
    found: dict[tuple[int, int], str] = {}
    for record, fingerprint in zip(map(tuple, ids.tolist()), prints, strict=True):
        if found.setdefault(record, fingerprint) != fingerprint:
            raise AssertionError(f"record {record} is not the same image each time")
    if len(found) != num_examples or len(set(found.values())) != num_examples:
        raise AssertionError("images are alike, so they do not tell which record they are")
    return found
