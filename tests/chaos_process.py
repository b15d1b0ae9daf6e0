"""`python -m tests.chaos_process [options of trainer.main]`: the trainer, which tells `scripts/chaos.py` what it does.

Functions of the trainer are wrapped, never replaced. Before and after each the process writes a line to a pipe, so that
whoever hurts it knows what it hurts; and where it is told to, it stands still there until it is killed, as a process
does whose disk hangs. So even what takes a millisecond is hit, and hit inside. The records of every training batch are
written down by an operation of the graph, which needs no lock of Python's.

CHAOS (environment): JSON, the fields of `Orders`. Later orders come as lines of the same on `orders_fd`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import runpy
import threading
import time
import typing
from collections.abc import Iterator

_FOREVER_SECS = 600.0


@dataclasses.dataclass
class Orders:
    """What to tell and where to stand still.

    events_fd: moments are told here, a JSON line each.
    orders_fd: further orders come from here.
    records: file that the records of training batches are appended to; the step is added to its name.
    phase, point: of the moment that is waited for: the phase, and a part of the point's name; phase "": none.
    skip: matching moments that go by before it.
    after_steps: steps to train in this start before any matches.
    hold: whether to stand still there.
    """

    events_fd: int
    orders_fd: int
    records: str
    phase: str = ""
    point: str = ""
    skip: int = 0
    after_steps: int = 0
    hold: bool = False


class Teller:
    """Tells moments."""

    def __init__(self, orders: Orders):
        self._orders = orders
        self._lock = threading.Lock()
        self._skipped = 0
        self._phases = ["startup"]  # of the main thread
        self.step = self._first_step = 0
        threading.Thread(target=self._obey, daemon=True).start()

    def moment(self, point: str, phase: str = "") -> None:
        """Tells it; does not return if this is where to stand still."""
        saves = is_saving()
        phase = phase or ("save" if saves else self._phases[-1])
        with self._lock:
            orders = self._orders
            wanted = orders.phase == phase and orders.point in point
            wanted = wanted and self.step - self._first_step >= orders.after_steps
            hit = wanted and self._skipped == orders.skip
            self._skipped += wanted
            self._tell(phase, point, hit)
        if hit and orders.hold:
            time.sleep(_FOREVER_SECS)

    def began(self, step: int) -> None:
        """Tells the step that training goes on from."""
        self.step = self._first_step = step
        self._phases[0] = "train"
        self.moment("begin", "train")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What the main thread does inside is of this phase."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def _tell(self, phase: str, point: str, hit: bool) -> None:
        line = json.dumps({"phase": phase, "point": point, "step": self.step, "hit": hit}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._orders.events_fd, line.encode())

    def _obey(self) -> None:
        with os.fdopen(self._orders.orders_fd) as lines:
            for line in lines:
                with self._lock:
                    self._orders = dataclasses.replace(self._orders, **json.loads(line))
                    self._skipped, self._first_step = 0, self.step


def is_main() -> bool:
    """Whether this is the thread that trains."""
    return threading.current_thread() is threading.main_thread()


def is_saving() -> bool:
    """Whether this is a thread that saves."""
    return threading.current_thread().name.startswith("save-")


def wrap(teller: Teller, owner: typing.Any, name: str, phase: str = "") -> None:
    """Tells of every call of a function before and after; `phase`: what the call is, if it is a phase of its own."""
    function = getattr(owner, name)
    point = f"{getattr(owner, '__name__', owner).split('.')[-1]}.{name}"

    @functools.wraps(function)
    def wrapped(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        if not is_main() and not is_saving():
            return function(*args, **kwargs)  # heartbeat and receipt, which go on beside every phase
        with teller.during(phase) if phase else contextlib.nullcontext():
            teller.moment(f"before {point}")
            result = function(*args, **kwargs)
            teller.moment(f"after {point}")
        return result

    setattr(owner, name, wrapped)


def instrument(teller: Teller, records: str) -> None:
    """Wraps what there is to hit."""

    def module(name: str) -> typing.Any:
        return importlib.import_module(name)

    replicated, run_dir, storage = (module(f"trainer.{name}") for name in ("replicated", "run_dir", "storage"))
    tf, inputs, bundle = module("tensorflow"), module("trainer.inputs"), module("trainer.checkpoints.bundle")
    for owner, name in (
        (inputs, "open_inputs"),
        (module("trainer.cluster"), "connect"),
        (module("trainer.watch.lease"), "acquire"),
        (run_dir.RunDir, "start"),
        (run_dir.RunDir, "replace"),
        (bundle, "write"),
        (bundle, "verify"),
        (storage, "replace"),
        (storage, "remove"),
        (storage, "remove_directory"),
        (storage, "replace_directory"),
        (module("trainer.callbacks.records").Records, "flush"),
        (tf.saved_model, "save"),
        *((module("trainer.backend").part("engine").Engine, name) for name in ("train", "test")),
        (os, "replace"),
        (os, "fsync"),
        (tf.io.gfile, "rename"),
        (tf.io.gfile, "rmtree"),
    ):
        wrap(teller, owner, name)
    wrap(teller, replicated.Replicated, "evaluate", "evaluate")
    wrap(teller, module("trainer.export"), "save", "export")
    wrap(teller, module("trainer.guard").Guard, "end", "end")
    _tell_restore(teller, bundle)
    _tell_steps(teller, module("trainer.training").Training)
    _tell_records(tf, inputs.Inputs, records)


def _tell_restore(teller: Teller, bundle: typing.Any) -> None:
    read = bundle.read

    def telling(*args: typing.Any) -> Iterator:
        with teller.during("restore") if is_main() else contextlib.nullcontext():
            for name, array in read(*args):
                teller.moment(f"reading {name}")
                yield name, array

    bundle.read = telling


def _tell_steps(teller: Teller, training: typing.Any) -> None:
    run, is_over = training.run, training._loop_is_over

    def telling_run(self: typing.Any) -> None:
        teller.began(self.at.step)
        run(self)

    def telling_loop(self: typing.Any, loop: typing.Any) -> None:
        is_over(self, loop)
        teller.step = loop.end
        teller.moment("loop", "train")

    training.run, training._loop_is_over = telling_run, telling_loop


def _tell_records(tf: typing.Any, inputs: typing.Any, records: str) -> None:
    batches = inputs.train_batches

    def telling(self: typing.Any, plan: typing.Any, context: typing.Any, start_step: int) -> typing.Any:
        path = f"file://{records}-{start_step}.txt"

        def note(x: typing.Any, y: typing.Any) -> tuple:
            tf.print(fingerprints(tf, x), output_stream=path)
            return x, y

        return batches(self, plan, context, start_step).map(note)

    inputs.train_batches = telling


def fingerprints(tf: typing.Any, images: typing.Any) -> typing.Any:
    """[B, H, W, C] -> a text of B numbers, each that of the bytes of an image."""
    rows = tf.reshape(images, [tf.shape(images)[0], -1])
    prints = tf.bitcast(tf.raw_ops.Fingerprint(data=rows, method="farmhash64"), tf.int64)  # [B]
    return tf.strings.reduce_join(tf.strings.as_string(prints), separator=" ")


def main() -> None:
    """Runs trainer.main with the rest of the command line."""
    orders = Orders(**json.loads(os.environ.pop("CHAOS")))
    from trainer.doctor import packages

    teller = Teller(orders)
    quieten = packages.quieten_libraries

    def before_tensorflow(**how: typing.Any) -> None:  # it is imported next, and by then has to be told to be quiet
        quieten(**how)
        teller.moment("before import of TensorFlow")
        instrument(teller, orders.records)
        teller.moment("after import of TensorFlow")

    packages.quieten_libraries = before_tensorflow
    runpy.run_module("trainer.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
