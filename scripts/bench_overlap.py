"""Whether a run does at once what can be done at once: with input, evaluation and checkpoints, against its parts.

    python -m scripts.bench_overlap [--rounds=7] [--steps=40]

A run on JPEGs (`input_files`, needs the extra `digits`) trains so many steps, evaluates and saves, through the very
`Training` of a run. Its parts take turns with it: the same steps and the same evaluation on batches that lie in memory,
the input of both read by nobody, and a save that is waited for. Computing has one thread, so that on two cores there is
one for the input. Were nothing done at once, the run would take the sum; were all, the longer of computing and input.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from scripts.benches import input_files, ours, results, turns
from trainer import inputs, models, run_dir, training
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock
from trainer.checkpoints.store import Checkpoints
from trainer.config import Config

MOST = 0.9  # of the sum of its parts
RUN = "run"
TRAINING, EVALUATION = ("train", "train input"), ("evaluate", "evaluation input")  # what can go on at once


class Parts:
    """A run and each of its parts, as functions that return seconds."""

    def __init__(self, directory: str, steps: int):
        photos = pathlib.Path(directory) / "photos"
        input_files.write_photos(photos)
        config = Config(
            dataset=str(photos),
            model_dir=f"{directory}/run",
            model="cnn",
            model_options={"filters": [8, 16]},
            image_size=64,
            eval_split="train",
            global_batch_size=32,
            train_steps=10**6,
            eval_every_steps=steps,
            checkpoint_every_steps=steps,
            keep_best_checkpoints=0,
        )
        self._config, self._steps = config, steps
        self._clock = Clock(time.monotonic())
        devices = ours.connected(1)
        source = models.find(config.model, config.model_options)
        read = inputs.open_inputs(config, cache_dir=directory)
        folder = run_dir.RunDir(config.model_dir)
        self._run = Assembly(config, self._clock, source, read, folder, devices)
        self._loops = self._run.plan.eval_loops()
        self._saves, self._blocking_saves = (_checkpoints(f"{directory}/{name}") for name in ("run", "blocking"))
        self._numbers = itertools.count()
        self._at = training.Position()
        self._train_input = iter(self._run.train_batches(0, config.seed))
        self._batches = iter(self._run.train_batches(0, config.seed))
        self._eval_input = self._run.devices.distribute(lambda context: read.eval_batches(self._run.plan, context))
        self._in_memory = iter(_repeated(next(self._train_input)))
        self._eval_in_memory = _repeated(next(iter(self._eval_input)))

    def ways(self) -> dict[str, Callable[[], float]]:
        """By name."""
        replicated, steps = self._run.replicated, self._steps
        eval_steps = self._loops[-1][1]
        calls: dict[str, Callable[[], Any]] = {
            RUN: self._train_evaluate_save,
            "train": lambda: replicated.run_train_loop(self._in_memory, steps),
            "train input": lambda: _read(self._train_input, steps),
            "evaluate": lambda: replicated.evaluate(iter(self._eval_in_memory), self._loops),
            "evaluation input": lambda: _read(iter(self._eval_input), eval_steps),
            "save": self._save,
        }
        return {name: functools.partial(_timed, call) for name, call in calls.items()}

    def _train_evaluate_save(self) -> None:
        """The next segment of the run: `steps` steps, the first of them a call of its own, as at every start."""
        nothing = contextlib.nullcontext
        around = training.Surroundings(
            agree=self._run.devices.agree,
            stop_reason=lambda: None,
            progress=lambda step, phase: None,
            compiling=nothing,
            check=lambda: None,
            examine=lambda step: f"step {step} is not finite",
            alert=lambda *_, **__: None,
            measure=self._clock.measure,
        )
        loop = training.Training(
            self._at,
            self._run.replicated,
            dataclasses.replace(self._run.plan, train_steps=self._at.step + self._steps),
            self._config,
            around,
            batches=lambda _: self._batches,
            evaluate=self._run.evaluate,
            store=self._saves,
            is_chief=True,
            has_evaluator=False,
            flush=lambda: None,
            callbacks=[],
        )
        loop.run()

    def _save(self) -> None:
        self._blocking_saves.save(next(self._numbers), self._run.replicated.state, {"metrics": {}})
        self._blocking_saves.wait()


def _checkpoints(directory: str) -> Checkpoints:
    os.makedirs(directory)
    return Checkpoints(f"{directory}/{run_dir.CHECKPOINTS}", keep=2, keep_best=0, best_metric="loss", best_goal="min")


def _repeated(batch: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(batch).repeat()


def _read(batches: Iterable[Any], count: int) -> None:
    iterator = iter(batches)
    for _ in range(count):
        next(iterator)


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=7, steps=10)
    parser.add_argument("--steps", type=int, default=40, help="between two evaluations, at which it saves too")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    report = results.Report("overlap", arguments.json)
    with tempfile.TemporaryDirectory() as directory:
        ways = Parts(directory, arguments.steps).ways()
        turns.alternate(ways, 1)  # traces
        taken = turns.alternate(ways, arguments.rounds)
    note = ", ".join(f"{name} {statistics.median(turn[name] for turn in taken):.2f} s" for name in ways)
    sums = [sum(turn[name] for name in ways if name != RUN) for turn in taken]
    least = [max(turn[n] for n in TRAINING) + max(turn[n] for n in EVALUATION) for turn in taken]
    what = f"{arguments.steps} steps, evaluation, checkpoint"
    whole = [turn[RUN] for turn in taken]
    report.add(what, "run / sum of its parts", _over(whole, sums), at_most=MOST, note=note)
    report.add(what, "run / longer of computing and input", _over(whole, least))
    return report.exit_code()


def _over(ours: list[float], theirs: list[float]) -> list[float]:
    return [mine / yours for mine, yours in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
