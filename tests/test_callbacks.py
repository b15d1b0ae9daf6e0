"""What watches a run: the order of evaluation and checkpoint, the records, the account of time."""

import pathlib
import time

import pytest
import tensorflow as tf

from tests import replicas_worker
from trainer import plan, replicated
from trainer.callbacks import checkpoint, clock, metrics
from trainer.config import Config

CASE = replicas_worker.CASES["momentum"]


@pytest.fixture
def trained() -> replicated.Replicated:
    return replicas_worker.make(CASE, tf.distribute.get_strategy())


def _plan(start: int = 0, **options: int) -> plan.Plan:
    config = Config(train_steps=8, global_batch_size=64, **options)
    return plan.resolve(config, num_replicas=1, num_train_examples=640, num_eval_examples=64)


def _fit(trained: replicated.Replicated, made: plan.Plan, callbacks: list, **options: object) -> None:
    iterator = replicas_worker.batches(CASE, tf.distribute.get_strategy())
    trained.fit(iterator, made.segments(0), callbacks=callbacks, verbose=0, **options)


def test_a_checkpoint_comes_after_the_evaluation_of_its_step(trained: replicated.Replicated) -> None:
    # A run killed between the two would otherwise go on from a step whose evaluation is lost.
    made = _plan(eval_every_steps=4, checkpoint_every_steps=2)
    events: list[tuple[str, int]] = []

    def evaluate() -> replicated.Logs:
        events.append(("evaluate", trained.step))
        return {}

    saving = checkpoint.SaveCheckpoint(
        trained, made.is_checkpoint, made.ends_segment, lambda step: events.append(("save", step))
    )
    _fit(trained, made, [saving], evaluate=evaluate)
    assert events == [("save", 2), ("evaluate", 4), ("save", 4), ("save", 6), ("evaluate", 8), ("save", 8)]


def test_train_records_are_means_since_the_last(trained: replicated.Replicated, tmp_path: pathlib.Path) -> None:
    made = _plan(eval_every_steps=8, log_every_steps=3)
    records: dict[int, dict] = {}
    log = metrics.MetricsLog(
        trained,
        made.is_report,
        global_batch_size=64,
        append=lambda step, values: records.setdefault(step, {}).update(values),
        tensorboard_dir=str(tmp_path),
    )
    _fit(trained, made, [log], evaluate=lambda: {"accuracy": 0.5})
    assert list(records) == [3, 6, 8]
    assert records[8]["eval/accuracy"] == 0.5
    by_step = replicas_worker.make(CASE, tf.distribute.get_strategy())
    iterator = replicas_worker.batches(CASE, tf.distribute.get_strategy())
    losses = []
    for _ in range(8):
        losses.append(by_step.run_train_loop(iterator, 1)[0]["loss"])
        by_step.model.reset_metrics()
    for step, first in ((3, 0), (6, 3), (8, 6)):
        assert records[step]["train/loss"] == pytest.approx(sum(losses[first:step]) / (step - first), abs=1e-5)


def test_parts_of_time_sum_to_the_age_of_the_process(trained: replicated.Replicated) -> None:
    account = clock.Clock(time.monotonic() - 5.0)
    account.start_is_over()
    timer = clock.LoopClock(account, trained)
    _fit(trained, _plan(eval_every_steps=8), [timer])
    with account.measure("export"):
        pass
    before = time.monotonic() - account._started
    seconds = account.seconds()
    assert before <= sum(seconds.values()) <= time.monotonic() - account._started
    assert seconds["start"] >= 5.0
    assert all(seconds[part] > 0 for part in ("compile", "train", "input wait"))
    assert timer.steps_timed() == 7


def test_waiting_for_input_is_told_from_training(trained: replicated.Replicated) -> None:
    # An input that makes one batch a time on purpose, by far slower than the model.
    images, labels = replicas_worker.digits()

    def slowly(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        burnt = tf.reduce_sum(tf.linalg.matmul(tf.random.normal((1500, 1500)), tf.random.normal((1500, 1500))))
        return tf.constant(images[:64]) + 0.0 * burnt, tf.constant(labels[:64])

    iterator = iter(tf.data.Dataset.range(100).map(slowly))
    trained.run_train_loop(iterator, 1)
    begun = time.monotonic()
    _, waited = trained.run_train_loop(iterator, 10)
    total = time.monotonic() - begun
    assert waited > 0.5 * total
    resident = iter(tf.data.Dataset.from_tensors((images[:64], labels[:64])).repeat())
    trained.run_train_loop(resident, 1)
    _, waited_for_resident = trained.run_train_loop(resident, 10)
    assert waited_for_resident < 0.1 * waited
