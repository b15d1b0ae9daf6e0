"""The records of a run: metrics.jsonl, TensorBoard and the console, without gaps or doubles over restarts."""

import contextlib
import json
import logging
import math
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

from tests import gcs
from tests.callbacks import killed_runs
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import run_dir
from trainer.callbacks import Loop, buffered, events, lines, metrics, records
from trainer.progress import Progress

TRAIN_STEPS = [step for step in range(2, killed_runs.STEPS + 1, 2) if killed_runs.is_report(step)]
EVAL_STEPS = [20, 40, 60]
# Beyond the checkpoint, between record and evaluation, within the save, right after it, twice at one step, at once.
MOMENTS = [
    *("loop:4", "loop:8", "loop:20", "evaluation:20", "flush:20", "checkpoint:20", "loop:28", "loop:28"),
    *("loop:40", "evaluation:40", "checkpoint:40", "flush:50", "loop:58", "evaluation:60"),
]


def _scalars(directory: pathlib.Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows: its loaders of scalars and of tensors must agree."""
    plain = event_accumulator.EventAccumulator(str(directory), {"scalars": 0}).Reload()
    shown = [(event.step, event.value) for event in plain.Scalars(tag)]
    plugin = plugin_event_accumulator.EventAccumulator(str(directory), {"tensors": 0}).Reload()
    assert [(event.step, event.tensor_proto.float_val[0]) for event in plugin.Tensors(tag)] == shown
    return shown


def _lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _file(folder: pathlib.Path) -> metrics.MetricsFile:
    path = folder / run_dir.METRICS
    return metrics.MetricsFile(str(path), lambda text: run_dir.RunDir(str(folder)).replace(run_dir.METRICS, text))


def _train(step: int, **values: float) -> records.Record:
    return records.Record(step, {f"train/{name}": value for name, value in values.items()})


def _run_killed(model_dir: str, disk: str, environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tests.callbacks.killed_runs", model_dir, disk, *MOMENTS]
    subprocess.run(command, cwd=ROOT, env=clean_environ() | environ, check=True, timeout=GUARD_SECS)


def _assert_whole(folder: pathlib.Path) -> None:
    found = _lines(folder / run_dir.METRICS)
    assert [line["step"] for line in found if "train/loss" in line] == TRAIN_STEPS
    assert [line["step"] for line in found if "eval/accuracy" in line] == EVAL_STEPS
    board = folder / run_dir.TENSORBOARD
    assert _scalars(board, "train/loss") == [(step, pytest.approx(1 / step)) for step in TRAIN_STEPS]
    assert _scalars(board, "eval/accuracy") == [(step, pytest.approx(step / 60)) for step in EVAL_STEPS]


@pytest.mark.parametrize("disk", ["real", "store"])
def test_kills_leave_neither_gaps_nor_doubles(tmp_path: pathlib.Path, disk: str) -> None:
    _run_killed(str(tmp_path), disk, {})
    _assert_whole(tmp_path)
    assert len(list((tmp_path / run_dir.TENSORBOARD).iterdir())) > 2


def test_kills_leave_neither_gaps_nor_doubles_on_gcs(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    with gcs.serve(tmp_path) as storage:
        _run_killed(f"{storage.url}/run", "real", storage.environ())
        for name in storage.objects():
            if not name.endswith("/"):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(storage.read(name))
    _assert_whole(folder)


def test_all_outputs_show_one_record(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    at = Progress(150, 240, 12.0, steps_per_sec=100.0, secs_left=72.4)
    sinks = [_file(tmp_path), events.Events(str(tmp_path / "tb")), lines.Lines(240, lambda: at)]
    log = records.Records(lambda step: step == 150, sinks, global_batch_size=128, start_step=100)
    log.on_loop_end(Loop(100, 101, 30.0, 20.0, {"loss": 9.0}, 1e-3, first=True))
    log.on_loop_end(
        Loop(101, 150, 0.49, 0.049, {"loss": 0.43121, "accuracy": 0.871, "gradient_norm": 1.82}, 1e-3, False)
    )
    log.on_evaluation(150, {"loss": 0.5, "accuracy": 0.75})
    log.on_end()

    train, evaluation = _lines(tmp_path / run_dir.METRICS)
    memory = train["train/host_memory_mib"]
    assert memory > 50  # TensorFlow alone
    assert train == {
        "step": 150,
        "train/loss": 0.43121,
        "train/accuracy": 0.871,
        "train/gradient_norm": 1.82,
        "train/learning_rate": 1e-3,
        "train/examples_per_sec": pytest.approx(128 * 49 / 0.49),  # without the loop that compiled
        "train/step_ms": pytest.approx(10.0),
        "train/input_wait_ms": pytest.approx(1.0),
        "train/host_memory_mib": memory,
    }
    assert evaluation == {"step": 150, "eval/loss": 0.5, "eval/accuracy": 0.75}
    for name in train.keys() - {"step"}:
        assert _scalars(tmp_path / "tb", name) == [(150, pytest.approx(train[name]))]
    assert [record.getMessage() for record in caplog.records] == [
        "step 150/240  62%  epoch 12.5  1 min 12 s left  loss 0.4312  accuracy 0.871  grad 1.82  lr 1.0e-03  "
        f"12,800 examples/s  10.0 ms/step  input 1.0 ms  {memory:,.0f} MiB",
        "step 150/240  eval loss 0.5  accuracy 0.75",
    ]
    reached = {"progress_percent": 62.5, "epoch": 12.5, "steps_per_sec": 100.0, "secs_left": 72.4}
    assert caplog.records[0].fields == {"train_steps": 240, **train, **reached}


def test_a_report_of_the_compiling_loop_alone_has_all_fields(tmp_path: pathlib.Path) -> None:
    log = records.Records(lambda step: True, [_file(tmp_path)], global_batch_size=10, start_step=0)
    log.on_loop_end(Loop(0, 1, 2.0, 0.0, {"loss": 1.0}, 0.1, first=True))
    log.on_loop_end(Loop(1, 2, 0.5, 0.0, {"loss": 1.0}, 0.1, first=False))
    assert [line["train/examples_per_sec"] for line in _lines(tmp_path / run_dir.METRICS)] == [5.0, 20.0]


def test_a_torn_line_is_dropped_and_the_highest_step_is_known(tmp_path: pathlib.Path) -> None:
    path = tmp_path / run_dir.METRICS
    path.write_text('{"step": 5, "train/loss": 1.0}\n{"step": 15, "train/loss": 0.5}\n{"step": 20, "tra')
    file = _file(tmp_path)
    assert file.drop_after(10) == 15
    file.write(_train(15, loss=0.5))
    assert [line["step"] for line in _lines(path)] == [5, 15]


def test_values_that_are_not_finite_stay_json(tmp_path: pathlib.Path) -> None:
    _file(tmp_path).write(_train(1, nan=math.nan, up=math.inf, down=-math.inf))
    text = (tmp_path / run_dir.METRICS).read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(float(found["train/nan"]))
    assert (float(found["train/up"]), float(found["train/down"])) == (math.inf, -math.inf)


@contextlib.contextmanager
def _disk_full(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `size` bytes: a write that would is cut short, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_no_record(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path, board = tmp_path / run_dir.METRICS, tmp_path / "tb"
    log = records.Records(
        lambda step: True, [_file(tmp_path), events.Events(str(board))], global_batch_size=1, start_step=0
    )

    def step(end: int) -> None:
        log.on_loop_end(Loop(end - 1, end, 1.0, 0.0, {"loss": 1.0}, 0.1, first=False))

    for end in range(1, 11):
        step(end)
    with _disk_full(path.stat().st_size + 100):  # in the middle of a line
        step(11)
        step(12)
        with pytest.raises(tf.errors.OpError, match="File too large"):
            log.flush()
    assert not path.read_text().endswith("\n")
    assert sum("metrics.jsonl cannot be written" in record.getMessage() for record in caplog.records) == 1
    step(13)
    log.flush()
    assert [line["step"] for line in _lines(path)] == list(range(1, 14))
    assert [at for at, _ in _scalars(board, "train/loss")] == list(range(1, 14))


def test_one_sink_that_fails_does_not_keep_back_the_others(tmp_path: pathlib.Path) -> None:
    def fail(text: str) -> None:
        raise OSError("503")

    board = events.Events(str(tmp_path))
    board._next_flush = math.inf  # held back, as on an object store
    sinks = [metrics.MetricsFile("/gcs/bucket/metrics.jsonl", fail), board]
    log = records.Records(lambda step: True, sinks, global_batch_size=1, start_step=0)
    log.on_loop_end(Loop(0, 1, 1.0, 0.0, {"loss": 1.0}, 0.1, first=True))
    with pytest.raises(OSError, match="503"):
        log.flush()
    assert _scalars(tmp_path, "train/loss") == [(1, 1.0)]


def test_a_bucket_that_is_slow_to_fail_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = 0.0, []

    def fail(text: str) -> None:
        nonlocal now
        tries.append(now)
        now += 60.0
        raise OSError("503")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = metrics.MetricsFile("/gcs/bucket/metrics.jsonl", fail)
    for step in range(3600):
        file.write(_train(step, loss=1.0))
        now += 1.0
    assert tries[0] == pytest.approx(buffered.REMOTE_INTERVAL_SECS, abs=1)
    assert 60.0 * len(tries) < 0.15 * now
    with pytest.raises(OSError, match="503"):  # a save does try
        file.flush()


def test_events_that_failed_are_shown_once(tmp_path: pathlib.Path) -> None:
    sink = events.Events(str(tmp_path))
    sink.drop_after(0)
    sink.write(_train(1, loss=1.0))
    sink.write(_train(2, loss=1.0))
    (file,) = tmp_path.iterdir()
    # The evaluation of step 2 does not fit. The next try voids step 2, of which the train record was there already.
    with _disk_full(file.stat().st_size + 10):
        sink.write(records.Record(2, {"eval/accuracy": 0.5}))
    sink.flush()
    newest = max(tmp_path.iterdir())
    assert newest != file
    sink._next_flush = math.inf  # hold back, so that one flush writes several records, of which some fit
    for step in (3, 4, 5):
        sink.write(_train(step, loss=1.0))
    with _disk_full(newest.stat().st_size + 100), pytest.raises(tf.errors.OpError):
        sink.flush()
    sink.close()
    assert _scalars(tmp_path, "train/loss") == [(step, 1.0) for step in range(1, 6)]
    assert _scalars(tmp_path, "eval/accuracy") == [(2, 0.5)]


def _earlier_start(directory: pathlib.Path) -> None:
    earlier = events.Events(str(directory))
    earlier.drop_after(0)
    for step in (10, 20, 30, 40):
        earlier.write(_train(step, loss=1.0))
    earlier.close()


def test_events_of_lost_steps_are_voided_by_a_start_that_fails_at_first(tmp_path: pathlib.Path) -> None:
    _earlier_start(tmp_path)
    sink = events.Events(str(tmp_path))
    sink.drop_after(10)
    with _disk_full(20):
        sink.write(_train(25, loss=2.0))
    sink.close()
    assert _scalars(tmp_path, "train/loss") == [(10, 1.0), (25, 2.0)]


def test_events_of_lost_steps_are_voided_by_a_start_without_a_record(tmp_path: pathlib.Path) -> None:
    _earlier_start(tmp_path)
    stopped = events.Events(str(tmp_path))  # by SIGTERM: saves at step 25, where no report is due
    stopped.drop_after(10)
    stopped.flush()
    last = events.Events(str(tmp_path))
    last.drop_after(25)
    last.write(_train(26, loss=2.0))
    last.close()
    assert _scalars(tmp_path, "train/loss") == [(10, 1.0), (26, 2.0)]


def test_an_undone_record_does_not_come_back_after_a_failure(tmp_path: pathlib.Path) -> None:
    sink = events.Events(str(tmp_path))
    sink.drop_after(0)
    for step in (1, 2, 3):
        sink.write(_train(step, loss=1.0))
    sink.drop_after(1)
    with _disk_full(20):
        sink.write(_train(2, loss=2.0))
    sink.close()
    assert _scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_files_are_read_in_order_after_the_clock_went_back(tmp_path: pathlib.Path) -> None:
    future = tmp_path / "events.out.tfevents.9000000000.elsewhere.1.v2"
    first = events.Events(str(tmp_path))
    first.drop_after(0)
    for step in (1, 2, 3):
        first.write(_train(step, loss=1.0))
    first.close()
    (written,) = tmp_path.iterdir()
    written.rename(future)
    second = events.Events(str(tmp_path))
    second.drop_after(1)
    second.write(_train(2, loss=2.0))
    second.close()
    assert _scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_a_run_begun_with_tf_summary_goes_on(tmp_path: pathlib.Path) -> None:
    # As earlier versions wrote it: no SessionLog.START, which TensorBoard only obeys from the second one on.
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for step in (10, 20, 30):
            tf.summary.scalar("train/loss", 1.0, step)
    sink = events.Events(str(tmp_path))
    sink.drop_after(20)
    sink.write(_train(25, loss=2.0))
    sink.close()
    shown = plugin_event_accumulator.EventAccumulator(str(tmp_path), {"tensors": 0}).Reload().Tensors("train/loss")
    assert [event.step for event in shown] == [10, 20, 25]


def test_the_console_shows_few_train_lines_and_all_evaluations(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    sink = lines.Lines(10_000)
    for step in range(1, 1001):
        sink.write(_train(step, loss=1.0))
        if step % 500 == 0:
            sink.write(records.Record(step, {"eval/accuracy": 0.5}))
    sink.close()
    said = [(record.fields["step"], "eval" in record.getMessage()) for record in caplog.records]
    assert said[0] == (1, False)
    assert [step for step, evaluates in said if evaluates] == [500, 1000]
    assert said[-1] == (1000, False)  # the last, also of a run that stops early
    assert len(said) < 20


def test_a_run_of_a_week_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    now = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sink = lines.Lines(10**9)
    for step in range(1, 2 * 3600 + 1):  # a report a second
        now += 1.0
        sink.write(_train(step, loss=1.0))
    said = [record.fields["step"] for record in caplog.records]
    gaps = {at: following - at for at, following in zip(said, said[1:], strict=False)}
    assert {gap for at, gap in gaps.items() if at < 55} == {2}
    assert {gap for at, gap in gaps.items() if 290 < at < 310} <= {10, 11}
    assert {gap for at, gap in gaps.items() if at > 1_800} == {60}


def test_a_removed_directory_does_not_come_back(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = _file(folder)
    file.write(_train(1, loss=1.0))
    (folder / run_dir.METRICS).unlink()
    folder.rmdir()
    file.write(_train(2, loss=1.0))
    with pytest.raises(Exception, match="No such file or directory"):
        file.flush()
    board = events.Events(str(folder / run_dir.TENSORBOARD))
    board.write(_train(2, loss=1.0))
    with pytest.raises(Exception, match="No such file or directory"):
        board.flush()
    assert not folder.exists()
