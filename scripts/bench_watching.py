"""What watching a run costs its loop: each part alone and all together, against the same loop without any of them.

    python -m scripts.bench_watching [--rounds=11] [--steps=400] [--replicas=1]

The parts, through the very `Training` of a run and its callbacks:
    metrics       accuracy beside the loss
    finite        the finite check of every step, the gradient norm, which it needs, and the copy to undo a call with
    records       metrics.jsonl, TensorBoard, console lines, the receipt's clock, what looks for slow input
    guard         lease, heartbeats, status, receipt and stall watch, every half second where a run has ten
    checkpoints   saved in the background, once in a turn of some seconds, where a run takes minutes

A turn is a run of so many steps in loops as long as a run has; its first step, which holds the compilation, is not
counted. All take turns in one process; "nothing again" is a second loop without anything, and shows the noise.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

from scripts.benches import results, turns
from trainer import cluster, finite, guard, hardware, inputs, models, run_dir, tasks, training
from trainer.assembly import Assembly
from trainer.backends.tensorflow import tried
from trainer.callbacks import Callback, Loop
from trainer.callbacks.clock import Clock, LoopClock
from trainer.callbacks.events import Events
from trainer.callbacks.lines import Lines
from trainer.callbacks.metrics import MetricsFile
from trainer.callbacks.records import Records
from trainer.callbacks.slow_input import SlowInput
from trainer.callbacks.underflow import Underflow
from trainer.checkpoints.store import Checkpoints
from trainer.config import Config
from trainer.watch.stopping import Stops

MOST = 1.03
PARTS = ("metrics", "finite", "records", "guard", "checkpoints")
NOTHING, AGAIN = "nothing", "nothing again"
SETS = {NOTHING: (), AGAIN: (), **{part: (part,) for part in PARTS}, "all together": PARTS}
CONFIG = Config(
    mode="train",
    dataset="synthetic",
    image_size=28,
    num_classes=10,
    model="cnn",
    model_options={"filters": [16, 32]},
    global_batch_size=32,
    train_steps=10**6,
    checkpoint_every_steps=10**6,
    lease_secs=3.0,
)


class Stopwatch(Callback):
    """What a step takes, from the end of the first loop of a turn to that of the last."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, float, float]] = []

    def on_loop_end(self, loop: Loop) -> None:
        """Looks at the clocks."""
        self._ends.append((loop.end, 1e3 * time.perf_counter(), 1e3 * time.process_time()))

    def answer(self) -> turns.Answer:
        """Milliseconds a step: on the clock and of the processor."""
        (first, begun, cpu_begun), (last, ended, cpu_ended) = self._ends[0], self._ends[-1]
        return {"ms": (ended - begun) / (last - first), "cpu_ms": (cpu_ended - cpu_begun) / (last - first)}


class Unsaved:
    """In place of `Checkpoints` where none are saved."""

    write_secs = 0.0

    def save(self, *_: object) -> None:
        """Does not."""

    def wait(self) -> None:
        """For nothing."""


class Watched:
    """A loop that is watched by some of the parts."""

    def __init__(self, parts: tuple[str, ...], devices: cluster.Cluster, directory: str):
        self._parts, self._devices = parts, devices
        self._folder = run_dir.RunDir(directory)
        os.makedirs(directory)
        self._clock = Clock(time.monotonic())
        self._stops = Stops()
        source = models.find(CONFIG.model, CONFIG.model_options)
        self._at = training.Position()
        with self._without_the_others():
            read = inputs.open_inputs(CONFIG, cache_dir=directory)
            self._run = Assembly(CONFIG, self._clock, source, read, self._folder, devices)
            self._batches = iter(self._run.train_batches(0, CONFIG.seed))
            self.turn(2)  # traces
            self._at.step = 0  # so that turns begin and end, uncounted, where a checkpoint is due, and have one within

    def turn(self, steps: int) -> turns.Answer:
        """Trains so many steps."""
        end = self._at.step + steps
        every = max(1, steps // 2) if "checkpoints" in self._parts else 10**6
        plan = dataclasses.replace(self._run.plan, train_steps=end, checkpoint_every_steps=every)
        watch = Stopwatch()
        with contextlib.ExitStack() as stack:
            watched = stack.enter_context(self._guard()) if "guard" in self._parts else None
            saves = self._checkpoints() if "checkpoints" in self._parts else Unsaved()
            records = self._records(plan) if "records" in self._parts else None
            loop = training.Training(
                self._at,
                self._run.replicated,
                plan,
                CONFIG,
                self._surroundings(watched),
                batches=lambda _: self._batches,
                evaluate=None,
                store=saves,
                is_chief=True,
                has_evaluator=False,
                flush=records.flush if records else lambda: None,
                callbacks=[*(self._callbacks(records) if records else []), watch],
            )
            loop.run()
            loop.close()
            if isinstance(saves, Checkpoints):
                saves.close()
        return watch.answer()

    @contextlib.contextmanager
    def _without_the_others(self) -> Iterator[None]:
        """While the step is traced: what belongs to it but to none of the parts is left out."""
        with contextlib.ExitStack() as stack:
            if "metrics" not in self._parts:
                stack.enter_context(mock.patch.object(tasks, "metrics", lambda spec: []))
            if "finite" not in self._parts:
                stack.enter_context(mock.patch.object(finite, "note", _nothing))
                stack.enter_context(mock.patch.object(finite, "has_halted", lambda kept: keras.ops.array(False)))
                stack.enter_context(mock.patch.object(tried, "keeping", lambda loop, variables: loop))
            yield

    @contextlib.contextmanager
    def _guard(self) -> Iterator[guard.Guard]:
        with guard.watching(CONFIG, self._folder, self._clock, self._stops, is_chief=True) as watched:
            watched.take_over(num_devices=self._devices.num_replicas)
            yield watched

    def _checkpoints(self) -> Checkpoints:
        directory = self._folder.file(run_dir.CHECKPOINTS)
        return Checkpoints(directory, keep=2, keep_best=0, best_metric="loss", best_goal="min")

    def _records(self, plan: training.Plan) -> Records:
        replace = functools.partial(self._folder.replace, run_dir.METRICS)
        metrics = MetricsFile(self._folder.file(run_dir.METRICS), replace)
        return Records(
            plan.is_report,
            [metrics, Events(self._folder.tensorboard_dir), Lines(plan.train_steps)],
            global_batch_size=plan.global_batch_size,
            start_step=self._at.step,
            sequence_length=None,
        )

    def _callbacks(self, records: Records) -> list[Callback]:
        def tell(message: str, step: int) -> None:
            logging.warning("step %d: %s", step, message)

        timer = LoopClock(self._clock, start_step=self._at.step, reached_before=0)
        return [timer, records, SlowInput(tell), Underflow(tell)]

    def _surroundings(self, watched: guard.Guard | None) -> training.Surroundings:
        return training.Surroundings(
            agree=self._devices.agree,
            stop_reason=lambda: self._stops.reason,
            progress=watched.progress if watched else lambda step, phase: None,
            compiling=watched.compiling if watched else contextlib.nullcontext,
            check=watched.check if watched else lambda: None,
            measure=self._clock.measure,
            examine=lambda step: f"step {step} is not finite",
            alert=lambda *_, **__: None,
        )


def _nothing(*_: object) -> object:
    """For `finite.note`: a constant, so that TensorFlow prunes what it would be made of, the norm."""
    return keras.ops.zeros((len(finite.NOTHING),))


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=11, steps=50)
    parser.add_argument("--steps", type=int, default=400, help="of a turn")
    parser.add_argument("--replicas", type=int, default=1, help="virtual CPU devices")
    arguments = parser.parse_args()
    # What a run says on the console is made, and read by nobody.
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    logging.basicConfig(stream=nowhere, level=logging.INFO)
    report = results.Report("watching", arguments.json)
    target = hardware.resolve(tpu=None, replicas=arguments.replicas, environ={})
    devices = cluster.connect(target, connect_timeout_secs=60)
    with tempfile.TemporaryDirectory() as directory:
        loops = {name: Watched(parts, devices, f"{directory}/{name}") for name, parts in SETS.items()}
        ways = {name: functools.partial(loop.turn, arguments.steps) for name, loop in loops.items()}
        taken = turns.alternate(ways, arguments.rounds)
    what = f"a step of {CONFIG.model}, {arguments.replicas} replica{'s' if arguments.replicas > 1 else ''}"
    for name in SETS:
        if name != NOTHING:
            bound = None if name == AGAIN else MOST
            note = f"{turns.step(taken, name)} / {turns.step(taken, NOTHING)}"
            report.add(what, f"{name} / nothing", turns.ratios(taken, NOTHING, name), at_most=bound, note=note)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
