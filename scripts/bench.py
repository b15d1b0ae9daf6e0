"""Runs the benches of this project one after the other, and puts what they find into one table, BENCHMARKS.md.

    python -m scripts.bench [--only=loop,watching] [--quick] [--out=BENCHMARKS.md]

Each is a process of its own, and needs the machine to itself: minutes each, an hour together. `--results=DIR` keeps
what each has found, so that some can be run today and others tomorrow: the table has all that is there. Exits 1 where a
bound is missed or a bench fails. Needs the extras `jax` and `bench`, and Orbit (scripts/README.md).
"""

import argparse
import dataclasses
import datetime
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from scripts.benches import machine, results, table

# Name of a bench, and its program: `scripts.bench_NAME`. In the order of the table.
BENCHES = (
    "loop",
    "backends",
    "watching",
    "scaling",
    "overlap",
    "start",
    "memory",
    "save",
    "input",
    "service",
    "audit",
    "build",
)
OUT = "BENCHMARKS.md"


def run(name: str, path: pathlib.Path, flags: Sequence[str]) -> None:
    """One bench, what it finds into a file of `results`; one that fails leaves a line that says so."""
    print(f"== {name}", flush=True)
    path.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, "-m", f"scripts.bench_{name}", f"--json={path}", *flags]).returncode
    found = results.read(str(path)) if path.exists() else []
    is_told = code == 0 or (code == 1 and not all(ratio.is_kept for ratio in found))  # a traceback ends with 1 too
    if not found or not is_told:
        failure = results.Ratio(name, "the rest of it" if found else "all of it", "-", [math.nan], at_least=0.0)
        found.append(dataclasses.replace(failure, note=f"the bench ended with {code}"))
        results.write(str(path), found)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that all run")
    parser.add_argument("--results", metavar="DIR", type=pathlib.Path, help="keep what was found there; default: not")
    parser.add_argument("--out", help=f"where the table goes; default: {OUT} where all ran, else the console only")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else BENCHES
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"there is no such bench. Received: {', '.join(unknown)}. There are {', '.join(BENCHES)}")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.results or pathlib.Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            run(name, directory / f"{name}.jsonl", ["--quick"] if arguments.quick else [])
        paths = {name: directory / f"{name}.jsonl" for name in BENCHES if (directory / f"{name}.jsonl").exists()}
        found = {name: results.read(str(path)) for name, path in paths.items()}
        text = table.render(found, machine.describe(), _dates(list(paths.values()), quick=arguments.quick))
    print(text)
    if out := arguments.out or (OUT if len(found) == len(BENCHES) and not arguments.quick else None):
        pathlib.Path(out).write_text(text)
    return 0 if all(ratio.is_kept for of_bench in found.values() for ratio in of_bench) else 1


def _dates(paths: Sequence[pathlib.Path], *, quick: bool) -> str:
    days = sorted({datetime.date.fromtimestamp(path.stat().st_mtime).isoformat() for path in paths})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{when}, with --quick: few rounds, no figures to go by" if quick else when


if __name__ == "__main__":
    sys.exit(main())
