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


def test_warmup_must_end_before_training() -> None:
    with pytest.raises(ConfigError, match="warmup_steps"):
        _plan(train_steps=10, warmup_steps=10)


def test_a_mode_needs_only_the_splits_it_reads() -> None:
    assert _plan(train=0, warmup_steps=5).eval_steps == 3
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
