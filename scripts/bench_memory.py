"""The memory of a run on its host: the most that it takes, and what each weight, example and replica adds.

    python -m scripts.bench_memory [--rounds=1] [--backends=tensorflow,jax]

Each case is a training run in a process of its own on the CPU: a multilayer perceptron with Adam on vectors of noise
that are made for it, ten steps, two evaluations, two checkpoints and an export. The kernel tells the most that was ever
resident of it. Two cases that differ in one thing give what that thing costs. The cases take turns, round by round; a
figure is the median over rounds. No bounds: tests/test_memory.py holds a run to one.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import numpy as np

from scripts.benches import results

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES, FEATURES = 40_000, 768  # 3 KiB each
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Case:
    """One run. width: of two hidden layers."""

    width: int = 1024
    batch: int = 32
    shuffle_mib: int = 1
    replicas: int = 1

    @property
    def weights(self) -> int:
        """Of the model, without the few of its biases and its head."""
        return self.width * (FEATURES + self.width)


BASE, LARGE = Case(), Case(width=3072)
CASES: Mapping[str, Case] = {
    "base": BASE,
    "large model": LARGE,
    "large model, 2 replicas": dataclasses.replace(LARGE, replicas=2),
    "large model, 4 replicas": dataclasses.replace(LARGE, replicas=4),
    "large batch": dataclasses.replace(BASE, batch=2048),
    "large shuffle buffer": dataclasses.replace(BASE, shuffle_mib=64),
}


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=1, backends="tensorflow")
    parser.add_argument("--backends", default="tensorflow,jax")
    options = parser.parse_args()
    backends = options.backends.split(",")
    peaks: dict[tuple[str, str], list[int]] = {}
    with tempfile.TemporaryDirectory() as directory:
        _build(directory)
        for _ in range(options.rounds):
            for backend in backends:
                for name, case in CASES.items():
                    peak = _peak_bytes(directory, backend, case)
                    print(f"{backend}, {name}: {peak / _MIB:,.0f} MiB", file=sys.stderr)
                    peaks.setdefault((backend, name), []).append(peak)
    report = results.Report("memory", options.json)
    for backend in backends:
        _report(report, backend, {name: peaks[backend, name] for name in CASES})
    return report.exit_code()


def _build(directory: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, FEATURES), np.float32)
    np.savez(f"{directory}/noise.npz", x=x, y=rng.integers(0, 10, EXAMPLES))
    command = [sys.executable, "-m", "data.build", f"{directory}/noise.npz", "--label_kind=class"]
    subprocess.run([*command, f"--data_dir={directory}"], cwd=ROOT, check=True, capture_output=True)


def _peak_bytes(directory: str, backend: str, case: Case) -> int:
    """The most that was resident of a run; what is measured is its own process, which the kernel tells when it ends."""
    with tempfile.TemporaryDirectory() as model_dir:
        command = [
            *(sys.executable, "-m", "trainer.main", "--dataset=noise", f"--data_dir={directory}"),
            *(f"--model_dir={model_dir}", f"--backend={backend}", "--model=mlp", "--quiet"),
            *("--train_steps=10", "--eval_every_steps=5", f"--model_options.units=[{case.width},{case.width}]"),
            *(f"--global_batch_size={case.batch}", f"--shuffle_mib={case.shuffle_mib}", f"--replicas={case.replicas}"),
        ]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise SystemExit(f"a run ended with {code}: {' '.join(command)}")
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # macOS counts bytes, Linux KiB


def _report(report: results.Report, backend: str, peaks: Mapping[str, list[int]]) -> None:
    for name, values in peaks.items():
        report.add(f"{name}, {backend}", "most resident / MiB", [value / _MIB for value in values])
    replica = LARGE.weights
    slopes = (
        ("a weight", "large model", "base", LARGE.weights - BASE.weights),
        ("a weight, by the second replica", "large model, 2 replicas", "large model", replica),
        ("a weight, by each of two more", "large model, 4 replicas", "large model, 2 replicas", 2 * replica),
        ("an example of the batch", "large batch", "base", CASES["large batch"].batch - BASE.batch),
        ("a byte of --shuffle_mib", "large shuffle buffer", "base", (64 - BASE.shuffle_mib) * _MIB),
    )
    for what, more, less, amount in slopes:
        added = [(a - b) / amount for a, b in zip(peaks[more], peaks[less], strict=True)]
        report.add(backend, f"bytes added / {what}", added)


if __name__ == "__main__":
    sys.exit(main())
