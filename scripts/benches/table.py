"""BENCHMARKS.md: one table of all that the benches found, the machine it was found on, and how to read it."""

import math
from collections.abc import Mapping, Sequence

from scripts.benches.results import NO_BOUND, Ratio

_HOW_TO_READ = """\
A line is a ratio of two alternatives that took turns on the same work, so that a machine whose speed drifts slows both:
the median over the rounds, and the quartiles beside it. The bound is what the median has to keep; a line without one
is there to be looked at. Where the quartiles lie on both sides of 1, this machine cannot tell the two apart. A bound
`>=` is of speeds, where more than 1 is good for the first one; a bound `<=` is of costs, where less is.

`python -m scripts.bench` makes this file; what each bench does stands at the top of its `scripts/bench_*.py`.
"""


def render(found: Mapping[str, Sequence[Ratio]], machine: Sequence[tuple[str, str]], dates: str) -> str:
    """The file, as Markdown.

    Args:
        found: by bench, its ratios.
        machine: rows of name and value.
        dates: when it was measured.
    """
    ratios = [ratio for of_bench in found.values() for ratio in of_bench]
    bounded = [ratio for ratio in ratios if ratio.bound != NO_BOUND]
    kept = sum(ratio.is_kept for ratio in bounded)
    about = _rows(["machine", ""], [[name, value] for name, value in machine] + [["measured", dates]])
    header = ["bench", "on what", "what against what", "ratio", "quartiles", "bound", "", "figures"]
    table = _rows(header, [_row(ratio) for ratio in ratios])
    summary = f"{kept} of {len(bounded)} bounds are kept."
    return "\n".join(["# Benchmarks", "", *about, "", summary, "", *table, "", "## How to read it", _HOW_TO_READ])


def _row(ratio: Ratio) -> list[str]:
    low, median, high = ratio.quartiles
    figures = ["-", "-"] if math.isnan(median) else [f"{median:,.2f}", f"{low:,.2f} to {high:,.2f}"]
    bound = "" if ratio.bound == NO_BOUND else ratio.bound
    verdict = "" if ratio.verdict == "no bound" else ratio.verdict
    return [ratio.bench, ratio.what, ratio.between, *figures, bound, verdict, ratio.note]


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
