"""How every bench says what it found: a line a ratio on the console, and the same as JSON for `scripts/bench.py`.

A ratio is one of two alternatives that took turns, so that a machine whose speed drifts slows both; what is told is the
median over the turns with its quartiles, and whether it keeps its bound.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One line of the table.

    Attributes:
        bench: which program measured it, as `scripts/bench.py` names it.
        what: the work that both did.
        between: the two alternatives, "ours / theirs".
        values: a ratio a turn; NaN alone where nothing could be measured.
        at_least, at_most: what the median has to keep; None: no bound.
        note: absolute figures, or why there are none.
    """

    bench: str
    what: str
    between: str
    values: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile."""
        if len(self.values) == 1:
            return (self.values[0],) * 3
        low, median, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, median, high

    @property
    def bound(self) -> str:
        """As it is told."""
        told = [f">= {self.at_least:g}"] if self.at_least is not None else []
        return " and ".join(told + ([f"<= {self.at_most:g}"] if self.at_most is not None else [])) or "none"

    @property
    def is_kept(self) -> bool:
        """Whether the median keeps the bound; what could not be measured keeps none."""
        median = self.quartiles[1]
        least = -math.inf if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        return least <= median <= most

    @property
    def verdict(self) -> str:
        """The last word of the line."""
        if math.isnan(self.quartiles[1]):
            return "NOT MEASURED"
        if self.at_least is None and self.at_most is None:
            return "no bound"
        return f"{'kept' if self.is_kept else 'MISSED'}"


class Report:
    """Collects the ratios of one program; prints them as they come.

    Args:
        bench: its name in the table.
        path: of a file that gets a line of JSON a ratio; None: none.
    """

    def __init__(self, bench: str, path: str | None):
        self._bench, self._path = bench, path
        self._kept = True
        if path:
            open(path, "w").close()

    def add(self, what: str, between: str, values: Sequence[float], **rest: Any) -> None:
        """See `Ratio`."""
        ratio = Ratio(self._bench, what, between, list(values), **rest)
        low, median, high = ratio.quartiles
        bound = "" if ratio.bound == "none" else f"bound {ratio.bound}: "
        line = f"  {what}: {between:34s} {median:6.3f} ({low:.3f} to {high:.3f})  {bound}{ratio.verdict}"
        print(f"{line}  {ratio.note}".rstrip(), flush=True)
        self._kept &= ratio.is_kept
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps(dataclasses.asdict(ratio)) + "\n")

    def fail(self, what: str, why: str) -> None:
        """What could not be measured, which is no bound kept."""
        self.add(what, "-", [math.nan], at_least=0.0, note=why)

    def exit_code(self) -> int:
        """0 where all bounds are kept."""
        return 0 if self._kept else 1


def read(path: str) -> list[Ratio]:
    """What a `Report` wrote."""
    with open(path) as file:
        return [Ratio(**json.loads(line)) for line in file]


def parser(doc: str, *, rounds: int, quick: int = 2) -> argparse.ArgumentParser:
    """The flags that every bench has: `--rounds`, `--quick` for that few of them, `--json`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"turns of every alternative (default {rounds})")
    made.add_argument(
        "--quick", dest="rounds", action="store_const", const=quick, help=f"{quick} rounds: to see that it runs"
    )
    made.add_argument("--json", metavar="FILE", help="write a line of JSON a ratio into it")
    return made
