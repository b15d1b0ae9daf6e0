"""Batch and step arithmetic."""

import pytest

from trainer import plan
from trainer.config import Config
from trainer.errors import ConfigError


def _plan(num_replicas: int = 2, train: int = 1500, test: int = 297, **options: object) -> plan.Plan:
    return plan.resolve(Config(**options), num_replicas=num_replicas, num_train_examples=train, num_eval_examples=test)


def test_defaults_follow_from_the_data() -> None:
    made = _plan(global_batch_size=128)
    assert made.train_steps == 118  # 10 epochs of 1,500 examples, rounded up
    assert made.eval_every_steps == made.checkpoint_every_steps == 12
    assert made.eval_steps == 3
    assert made.per_replica_batch_size == 64


def test_steps_do_not_depend_on_replicas() -> None:
    one, many = _plan(1), _plan(64)
    assert many.per_replica_batch_size == 2
    ignored = {"num_replicas": 1, "per_replica_batch_size": 128}
    assert vars(one) == vars(many) | ignored


@pytest.mark.parametrize(("batch", "nearest"), [(100, "96 or 104"), (3, "Nearest sizes: 8"), (129, "128 or 136")])
def test_indivisible_batch_names_the_nearest_sizes(batch: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"Received: {batch}.*{nearest}"):
        _plan(8, global_batch_size=batch)


def test_training_ends_after_epochs_examples_or_steps() -> None:
    assert _plan(train_epochs=2.5, global_batch_size=100).train_steps == 38
    assert _plan(train_examples=1e6, global_batch_size=96).train_steps == 10417
    assert _plan(train_examples=1.0).train_steps == 1


def test_durations_of_any_unit_are_worked_out_in_steps() -> None:
    # 15 steps an epoch, 300 in all.
    given = {"train_epochs": 20, "global_batch_size": 100}
    for warmup in ("30 steps", "2 epochs", "3e3 examples", "10%", "2epochs", "1 epoch"):
        assert _plan(**given, warmup=warmup).learning_rate.warmup_steps == (15 if warmup == "1 epoch" else 30)
    stepped = _plan(**given, schedule="step", decay_at="6 epochs,60 %, 250 steps", decay_factor=0.1)
    assert stepped.learning_rate.decay_steps == (90, 180, 250)
    decayed = _plan(**given, schedule="exponential", decay_every="2.4 epochs", decay_factor=0.97)
    assert decayed.learning_rate.decay_every_steps == 36


def test_learning_rate_is_scaled_to_the_batch_where_that_is_asked_for() -> None:
    given = {"learning_rate": 0.1, "global_batch_size": 1024}
    assert _plan(**given).learning_rate.peak == 0.1
    assert _plan(**given, learning_rate_batch_size=256).learning_rate.peak == pytest.approx(0.4)
    root = _plan(**given, learning_rate_batch_size=256, learning_rate_scaling="sqrt")
    assert root.learning_rate.peak == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"warmup": "10 steps"}, "warmup must end before .* Received: '10 steps', 10 of 10 steps"),
        ({"warmup": "1 epoch"}, "12 of 10 steps"),
        ({"schedule": "step", "decay_at": "5 steps, 4 steps"}, "decay_at must rise.* 5, 4 steps"),
        ({"schedule": "step", "decay_at": "5 steps, 10 steps"}, r"before that of the training \(10\)"),
        ({"schedule": "wsd", "decay_at": "10%", "warmup": "2 steps"}, r"end of the warm-up \(2 steps\)"),
        ({"schedule": "exponential", "decay_every": "1 example"}, "decay_every must be a step at least"),
    ],
)
def test_what_would_never_come_about_is_refused(options: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _plan(train_steps=10, **options)


def test_a_mode_needs_only_the_splits_it_reads() -> None:
    assert _plan(train=0, warmup="5 steps").eval_steps == 3
    batch = {"global_batch_size": 6, "microbatches": 4, "mixup": 0.2}  # of an evaluation, of a run with a larger one
    assert _plan(train=0, **batch).per_replica_batch_size == 3
    with pytest.raises(ConfigError, match="microbatches must divide a replica's share of the batch, 3 examples"):
        _plan(**batch)
    assert _plan(test=0).eval_steps == 0


@pytest.mark.parametrize("start", [0, 1, 7, 59, 60])
@pytest.mark.parametrize("steps_per_loop", [1, 7, 50, 1000])
def test_every_interval_lands_on_its_exact_step(start: int, steps_per_loop: int) -> None:
    made = _plan(
        train_steps=60, eval_every_steps=25, checkpoint_every_steps=9, log_every_steps=10, profile_steps="30,33"
    )
    loops = []
    while start < 60:
        loops.append((start, made.loop_end(start, steps_per_loop)))
        start = loops[-1][1]
    steps = [step for begin, end in loops for step in range(begin, end)]
    assert steps == list(range(steps[0], 60) if steps else []), "each step once, in order"
    ends = {end for _, end in loops}
    due = {
        step for step in range(loops[0][0] + 1 if loops else 61, 61) if made.is_report(step) or made.is_checkpoint(step)
    }
    assert due | ({30, 33} & set(steps)) - {loops[0][0] if loops else None} <= ends
    assert all(end - begin <= steps_per_loop for begin, end in loops)


@pytest.mark.parametrize("examples", [1, 127, 128, 129, 1000])
def test_evaluation_loops_cover_all_batches(examples: int) -> None:
    made = _plan(test=examples, steps_per_loop=3)
    steps = [step for begin, end in made.eval_loops() for step in range(begin, end)]
    assert steps == list(range(-(-examples // 128)))


def test_microbatches_divide_a_replicas_share() -> None:
    config = Config(global_batch_size=12, train_steps=3, microbatches=4)
    with pytest.raises(ConfigError, match=r"6 examples \(12 over 2 replicas\). Received: 4"):
        plan.resolve(config, num_replicas=2, num_train_examples=100, num_eval_examples=0)
