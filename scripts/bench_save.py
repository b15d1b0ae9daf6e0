"""Saving while training goes on against saving that blocks: how long the loop is held up, and how much memory it takes.

    python -m scripts.bench_save [--rounds=7] [--mib=256] [--directory=DIR]

One model (a tower of dense layers) with AdamW trains in loops of a `tf.function`; its variables are the state that is
saved, as arrays that share their memory until a step overwrites it. Blocking and background saves take turns, so that a
machine or a disk whose speed drifts slows both.

    stall      seconds the loop was held up by a save: `Checkpoints.stall_secs`, the copy to the host included
    slowdown   how much longer loops take while a save runs behind them: it uses cores and disk that they use too
    memory     the most this process took with saves, less the most it took training before the first of them (the
               allocator keeps what it once had), in copies of the state: the snapshot is one
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from scripts.benches import results
from trainer.checkpoints.store import Checkpoints

MAX_STALL = 0.15  # of a blocking save
MAX_COPIES = 1.25  # one, the array that is read back, and the slack of the allocator
BATCH = 64
WARM_UP_STEPS = 20
WIDTH = 2048  # a layer's kernel is 16 MiB, with AdamW's two slots 48
_MIB = 1 << 20


class Memory:
    """Watches the resident memory of this process.

    Attributes:
        most: bytes, the most so far.
    """

    _INTERVAL_SECS = 0.002

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, _resident_bytes())
            time.sleep(self._INTERVAL_SECS)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _training(num_bytes: int) -> tuple[Callable[[], None], dict[str, tf.Variable]]:
    """A function that trains one step, and the state it changes."""
    keras.utils.set_random_seed(0)
    layers = max(1, round(num_bytes / (3 * 4 * WIDTH * WIDTH)))
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "relu") for _ in range(layers))])
    optimizer = keras.optimizers.AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    images = tf.random.stateless_normal((BATCH, WIDTH), (0, 1))

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    variables = [*model.variables, *optimizer.variables]
    return step, {f"{number}/{variable.path}": variable.value for number, variable in enumerate(variables)}


def _snapshot(state: dict[str, tf.Variable]) -> dict[str, np.ndarray]:
    return {name: np.asarray(variable.value()) for name, variable in state.items()}


def _save(checkpoints: Checkpoints, step: Callable[[], None], state: dict, number: int, *, blocking: bool) -> dict:
    """One save with training around it: its figures in seconds."""
    before = checkpoints.stall_secs
    checkpoints.save(number, lambda: _snapshot(state), {})
    if blocking:
        checkpoints.wait()
    stall = checkpoints.stall_secs - before
    steps = []
    # As long as there is something to save, and at least once: every variable is overwritten, so the copy is made.
    while not steps or checkpoints.saving:
        begun = time.perf_counter()
        step()
        steps.append(time.perf_counter() - begun)
    checkpoints.wait()
    return {"stall": stall, "write": checkpoints.write_secs, "step": statistics.median(steps)}


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=7, mib=64)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--directory")
    options = parser.parse_args()
    step, state = _training(options.mib * _MIB)
    num_bytes = sum(array.nbytes for array in _snapshot(state).values())
    memory = Memory()
    for _ in range(WARM_UP_STEPS):
        step()
    without_saves = memory.most
    figures: dict[str, list[dict]] = {"blocking": [], "background": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        checkpoints = Checkpoints(f"{directory}/checkpoints", keep=1, keep_best=0, best_metric="loss", best_goal="min")
        for number in range(2 * (1 + options.rounds)):
            kind = "background" if number % 2 else "blocking"
            figures[kind].append(_save(checkpoints, step, state, number, blocking=kind == "blocking"))
        checkpoints.close()
    print(f"state: {num_bytes / _MIB:.0f} MiB in {len(state)} arrays; {without_saves / _MIB:.0f} MiB without saves")
    copies = (memory.most - without_saves) / num_bytes
    report = results.Report("save", options.json)
    _report(report, f"{options.mib} MiB", {kind: values[1:] for kind, values in figures.items()}, copies)
    return report.exit_code()


def _report(report: results.Report, what: str, figures: dict[str, list[dict]], copies: float) -> None:
    def pairs(name: str) -> list[float]:
        pairs = zip(figures["background"], figures["blocking"], strict=True)
        return [ours[name] / theirs[name] for ours, theirs in pairs]

    def note(name: str) -> str:
        medians = [statistics.median(f[name] for f in figures[kind]) for kind in ("background", "blocking")]
        return " / ".join(f"{1e3 * secs:.1f} ms" for secs in medians)

    report.add(what, "stall, background / blocking", pairs("stall"), at_most=MAX_STALL, note=note("stall"))
    report.add(what, "a step, with a save behind it / without", pairs("step"), note=note("step"))
    report.add(what, "memory, growth / the state", [copies], at_most=MAX_COPIES)


if __name__ == "__main__":
    sys.exit(main())
