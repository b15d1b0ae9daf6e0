"""Where the time of a run went, from its receipt: a stacked bar, a table of parts, a table of starts. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.callbacks.clock import PARTS
from trainer.report.html import Html, element, joined, moment, note, table
from trainer.report.left import Json
from trainer.report.numbers import duration, number, percent

_WIDTH, _HEIGHT, _GAP = 1000, 34, 2
_MOST_STARTS = 200  # the newest
_LEAST_SHARE = 0.0005  # less is not worth a row
_ENDS = {0: "finished", 75: "stopped, to go on later (75)", 78: "failed (78)", 1: "failed (1)"}
_KILLED, _UNKNOWN_END = "killed", "killed, or still at work"


def spent(receipt: Json) -> Html:
    """The bar and both tables.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not as `Receipt.account` makes it.
    """
    wall, parts = float(receipt["wall_secs"]), in_order(receipt)
    rows = [(joined([swatch(part), words(part)]), duration(secs), percent(secs / wall)) for part, secs in parts.items()]
    told = (
        f"{duration(wall)} in all, {number(float(receipt['goodput_percent']))}% of it steps that count "
        f"({number(float(receipt['goodput_percent_while_running']))}% while running); "
        f"{number(float(receipt['device_seconds']))} device-seconds."
    )
    return joined(
        [
            element("p", told),
            bar(parts, wall),
            element(
                "div",
                table(("part", "time", "share"), rows, label="time by part"),
                table(("start", "began, UTC", "steps", "took", "devices", "ended"), _starts(receipt), label="starts"),
                kind="beside",
            ),
            *(note(text) for text in receipt["notes"]),
        ]
    )


def in_order(receipt: Json) -> dict[str, float]:
    """Part -> seconds, in the order in which a run meets them, without those that took next to nothing."""
    seconds, wall = receipt["seconds"], float(receipt["wall_secs"])
    names = [*(part for part in PARTS if part in seconds), *(part for part in seconds if part not in PARTS)]
    return {name: float(seconds[name]) for name in names if float(seconds[name]) > _LEAST_SHARE * wall}


def bar(parts: Mapping[str, float], longest: float) -> Html:
    """Parts one after the other; `longest` is what fills the whole width."""
    rects, x = [], 0.0
    for part, secs in parts.items():
        width = _WIDTH * secs / longest if longest else 0.0
        title = element("title", f"{words(part)}: {duration(secs)}")
        rects.append(
            element(
                "rect",
                title,
                kind=f"part {_kind(part)}",
                x=f"{x:.1f}",
                width=f"{max(width - _GAP, 1):.1f}",
                height=_HEIGHT,
            )
        )
        x += width
    told = ", ".join(f"{words(part)} {duration(secs)}" for part, secs in parts.items())
    return element(
        "svg", *rects, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", kind="bar", role="img", aria_label=f"time by part: {told}",
        preserveAspectRatio="none",
    )  # fmt: skip


def words(part: str) -> str:
    """A part's name for people."""
    return part.replace("_", " ")


def swatch(part: str) -> Html:
    """Its colour in the bar."""
    rect = element("rect", kind=f"part {_kind(part)}", width=10, height=10)
    return element("svg", rect, viewBox="0 0 10 10", kind="swatch", aria_hidden="true")


def _kind(part: str) -> str:
    return f"part-{part if part in PARTS else 'other'}"


def _starts(receipt: Json) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for index, start in enumerate(receipt["starts"], start=1):
        reached = [start["from_step"], start["reached_step"]]
        steps = " to ".join("?" if step is None else f"{step:,}" for step in reached)
        rows.append(
            (
                str(index),
                moment(str(start["started"])),
                element("span", "none" if reached == [None, None] else steps, kind="time"),
                element("span", duration(sum(start["seconds"].values())), kind="time"),
                number(start["num_devices"]),
                ended(start["exit_code"], has_gone=index < len(receipt["starts"])),
            )
        )
    return rows[-_MOST_STARTS:]


def ended(code: Any, *, has_gone: bool = False) -> str:
    """What an exit code means; without one, a start that `has_gone`, as another came after it, was killed."""
    if code is None:
        return _KILLED if has_gone else _UNKNOWN_END
    return _ENDS[code] if code in _ENDS else f"ended with {code}"
