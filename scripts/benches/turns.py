"""Contenders that cannot share a process: each has one of its own, one works, and the others wait for their turn.

A bench starts itself once more for each of them, with `--contender=NAME`; both ends of the pipe are here.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

# Trains that many steps in one loop, and returns the loss: of the last step, or a mean over them.
Run = Callable[[int], float]
Answer = dict[str, Any]
T = TypeVar("T")
_WORDS = 4_000  # of a contender that failed, its last characters


def serve(make: Callable[[str, int], Run]) -> None:
    """What a contender does: answers the messages on stdin, a line each, until there are no more.

    Args:
        make: prepares a case for loops of that many steps.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # others' words are no answers
    run: Run | None = None
    for line in sys.stdin:
        case, steps, loops = json.loads(line)
        if case is not None:
            run = None  # first gone, then another
            run = make(case, steps)
        begun, cpu = time.perf_counter(), time.process_time()
        losses = [run(steps) for _ in range(loops)]
        secs, cpu = time.perf_counter() - begun, time.process_time() - cpu
        done = steps * loops
        print(json.dumps({"losses": losses, "ms": 1e3 * secs / done, "cpu_ms": 1e3 * cpu / done}), file=answers)
        answers.flush()


class Contender:
    """The process of one, and what it is asked.

    Args:
        module: the bench, as `python -m` takes it; it calls `serve` when it is given `--contender`.
        name: of the contender.
        flags: further ones.
        environ: over that of this process.
    """

    def __init__(self, module: str, name: str, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None):
        command = [sys.executable, "-m", module, f"--contender={name}", *flags]
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            bufsize=1,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | (environ or {}),
        )

    def tell(self, case: str | None, steps: int, loops: int) -> None:
        """Prepares a case anew, or goes on with the last one, and trains."""
        self._process.stdin.write(json.dumps([case, steps, loops]) + "\n")

    def hear(self) -> Answer:
        """Losses of the loops, and milliseconds a step: on the clock and of the processor."""
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        code = self._process.wait()
        self._words.seek(0)
        raise SystemExit(f"the contender {self._name} ended with {code}:\n{self._words.read()[-_WORDS:]}")

    def ask(self, case: str | None, steps: int, loops: int) -> Answer:
        """Both."""
        self.tell(case, steps, loops)
        return self.hear()

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._words.close()


@contextlib.contextmanager
def contenders(
    module: str, names: Iterable[str], flags: Sequence[str] = (), environ: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[dict[str, Contender]]:
    """The processes of all, ended at the end."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name in names:
            started[name] = Contender(module, name, flags, (environ or {}).get(name))
            stack.callback(started[name].close)
        yield started


def losses(contenders: Mapping[str, Contender], case: str, steps: int) -> dict[str, list[float]]:
    """Of the first steps of a case, a step a loop; all at once, for nothing is measured."""
    for one in contenders.values():
        one.tell(case, 1, steps)
    return {name: one.hear()["losses"] for name, one in contenders.items()}


def lose_alike(found: Mapping[str, Sequence[float]], yardstick: str, tolerance: float) -> bool:
    """Whether all lose like one of them; prints the largest difference."""
    expected = found[yardstick]
    differences = {name: np.abs(np.subtract(values, expected)) for name, values in found.items()}
    gaps = {name: float(np.max(np.nan_to_num(one, nan=np.inf))) for name, one in differences.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    print(f"  losses of {len(expected)} steps: {expected[0]:.4f} to {expected[-1]:.4f}, ", end="")
    print(f"largest difference {gaps[worst]:.1e} ({worst} and {yardstick})", flush=True)
    return gaps[worst] <= tolerance


def alternate(ways: Mapping[str, Callable[[], T]], rounds: int) -> list[dict[str, T]]:
    """So many rounds, in which each way is gone once; the order turns round by round."""
    taken = []
    for number in range(rounds):
        order = list(ways) if number % 2 else list(reversed(ways))
        found = {name: ways[name]() for name in order}
        taken.append({name: found[name] for name in ways})
    return taken


def ratios(taken: Sequence[Mapping[str, Answer]], faster: str, slower: str) -> list[float]:
    """Speed of one over the other's, a figure a round: above 1 where `faster` is."""
    return [turn[slower]["ms"] / turn[faster]["ms"] for turn in taken]


def step(taken: Sequence[Mapping[str, Answer]], name: str) -> str:
    """What a step takes, as a note of a ratio."""
    ms, cpu = (statistics.median([turn[name][key] for turn in taken]) for key in ("ms", "cpu_ms"))
    return f"{ms:.3f} ms a step, {cpu:.3f} of CPU"
