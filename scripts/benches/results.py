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

NO_BOUND = "none"


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
        return " and ".join(told + ([f"<= {self.at_most:g}"] if self.at_most is not None else [])) or NO_BOUND

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
        if self.bound == NO_BOUND:
            return "no bound"
        return "kept" if self.is_kept else "MISSED"


class Report:
    """Collects the ratios of one program; prints them as they come.

    Args:
        bench: its name in the table.
        path: of a file that gets a line of JSON a ratio; None: none.
    """

    def __init__(self, bench: str, path: str | None):
        self._bench, self._path = bench, path
        self._ratios: list[Ratio] = []

    def add(self, what: str, between: str, values: Sequence[float], **rest: Any) -> None:
        """See `Ratio`."""
        ratio = Ratio(self._bench, what, between, list(values), **rest)
        low, median, high = ratio.quartiles
        bound = "" if ratio.bound == NO_BOUND else f"bound {ratio.bound}: "
        line = f"  {what}: {between:34s} {median:6.3f} ({low:.3f} to {high:.3f})  {bound}{ratio.verdict}"
        print(f"{line}  {ratio.note}".rstrip(), flush=True)
        self._ratios.append(ratio)
        if self._path:
            write(self._path, self._ratios)

    def fail(self, what: str, why: str) -> None:
        """What could not be measured, which is no bound kept."""
        self.add(what, "-", [math.nan], at_least=0.0, note=why)

    def exit_code(self) -> int:
        """0 where all bounds are kept, 1 where not."""
        return 0 if all(ratio.is_kept for ratio in self._ratios) else 1


def write(path: str, ratios: Sequence[Ratio]) -> None:
    """A line of JSON each."""
    with open(path, "w") as file:
        file.writelines(json.dumps(dataclasses.asdict(ratio)) + "\n" for ratio in ratios)


def read(path: str) -> list[Ratio]:
    """What `write` wrote."""
    with open(path) as file:
        return [Ratio(**json.loads(line)) for line in file]


class _Quick(argparse.Action):
    """Sets several options at once."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


def parser(doc: str, *, rounds: int, **quick: Any) -> argparse.ArgumentParser:
    """The flags that every bench has: `--rounds`, `--quick`, `--json`.

    Args:
        doc: of the module.
        rounds: by default.
        quick: values of other flags under `--quick`, beside two rounds.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"turns of every alternative (default {rounds})")
    sets = {"rounds": 2, **quick}
    told = ", ".join(f"{name}={value}" for name, value in sets.items())
    made.add_argument("--quick", nargs=0, action=_Quick, const=sets, help=f"to see that it runs: {told}")
    made.add_argument("--json", metavar="FILE", help="write a line of JSON a ratio into it")
    return made
