"""Several runs side by side: curves over each other, final metrics, differing options, receipts. Pure."""

import datetime
import os
from collections.abc import Mapping, Sequence

from trainer.report import html, origin, spent
from trainer.report.charts import Chart, grid, steps_of
from trainer.report.curves import (
    EVAL,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    SPEED,
    TRAIN,
    Curve,
    Found,
    best,
    curves,
    metric_names,
)
from trainer.report.headline import goal_of, state
from trainer.report.html import Html, element, joined, note, section, table
from trainer.report.left import Left
from trainer.report.numbers import duration, number
from trainer.report.one import title_of, tried

_KINDS = {TRAIN: "training", EVAL: "evaluation"}
_ABSENT = "-"


def page(runs: Sequence[Left], title: str) -> str:
    """The whole file."""
    labels = _labels(runs)
    named = dict(zip(labels, runs, strict=True))
    found = {label: curves(left) for label, left in named.items()}
    parts = [
        ("results", "Results", lambda: _results(named, found)),
        ("learning", "Learning", lambda: _charts(found, _learning(found))),
        ("speed", "Speed", lambda: _charts(found, [(name, TRAIN) for name in SPEED])),
        ("time", "Where the time went", lambda: _time(named)),
        ("options", "Options that differ", lambda: _options(named)),
    ]
    heading = joined(
        [
            element("h1", title),
            element("p", f"{len(runs)} runs: {', '.join(labels)}", kind="path"),
            element("p", f"As of {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC.", kind="more"),
        ]
    )
    sections = [section(name, tried(content), key=key) for key, name, content in parts]
    problems = [f"{label}: {problem}" for label, left in named.items() for problem in left.problems]
    if problems:
        told = element("ul", *(element("li", problem) for problem in problems))
        sections.append(section("Not in this page", told, key="problems"))
    return html.page(title, sections, heading=heading, links=[(key, name) for key, name, _ in parts])


def _labels(runs: Sequence[Left]) -> list[str]:
    """The end of each path, as long as it takes to tell them apart."""
    if len({left.name for left in runs}) == len(runs):
        return [left.name for left in runs]
    paths = [left.path for left in runs]
    common = os.path.commonprefix(paths).rpartition("/")[0]
    return [path[len(common) :].lstrip("/") or path for path in paths]


def _results(named: Mapping[str, Left], found: Mapping[str, Found]) -> Html:
    names = list(dict.fromkeys(name for of in found.values() for name in metric_names(of) if EVAL in of[name]))
    rows: list[tuple[str, ...]] = [("state", *(state(left)[0] for left in named.values()))]
    metric, goal = goal_of(next(iter(named.values())))
    tops = [best(_points(of, metric, EVAL), goal) for of in found.values()]
    rows.append((f"best {metric}", *(number(top[1]) if top else _ABSENT for top in tops)))
    rows.append(("at step", *(f"{top[0]:,}" if top else _ABSENT for top in tops)))
    for name in names:
        last = [_points(of, name, EVAL)[-1:] for of in found.values()]
        rows.append((f"last {name}", *(number(points[0][1]) if points else _ABSENT for points in last)))
    return table(("", *named), rows, label="final metrics")


def _learning(found: Mapping[str, Found]) -> list[tuple[str, str]]:
    names = list(dict.fromkeys(name for of in found.values() for name in metric_names(of)))
    pairs = [(name, kind) for name in names for kind in (EVAL, TRAIN)]
    return [*pairs, (LEARNING_RATE, TRAIN), (GRADIENT_NORM, TRAIN)]


def _charts(found: Mapping[str, Found], wanted: Sequence[tuple[str, str]]) -> Html:
    charts = []
    for name, kind in wanted:
        drawn = [Curve(label, _points(of, name, kind)) for label, of in found.items()]
        if any(curve.points for curve in drawn):
            title = (
                title_of(name)
                if name in (*SPEED, LEARNING_RATE, GRADIENT_NORM)
                else f"{title_of(name)}, {_KINDS[kind]}"
            )
            charts.append(
                Chart(title, drawn, from_zero=name in SPEED, log=name in (LOSS, GRADIENT_NORM, LEARNING_RATE))
            )
    return grid(charts, steps_of(charts), ()) if charts else note("Nothing was recorded yet.")


def _points(of: Found, name: str, kind: str) -> tuple[tuple[int, float], ...]:
    return of[name][kind].points if name in of and kind in of[name] else ()


def _time(named: Mapping[str, Left]) -> Html:
    receipts = {label: left.receipt for label, left in named.items() if left.receipt is not None}
    if not receipts:
        return note("None of them has a receipt.json.")
    longest = max(float(receipt["wall_secs"]) for receipt in receipts.values())
    spent_by = {label: spent.in_order(receipt) for label, receipt in receipts.items()}
    bars = [element("div", element("h3", label), spent.bar(parts, longest)) for label, parts in spent_by.items()]
    names = dict.fromkeys(part for parts in spent_by.values() for part in parts)
    rows = [
        (
            joined([spent.swatch(part), spent.words(part)]),
            *(duration(parts[part]) if part in parts else _ABSENT for parts in spent_by.values()),
        )
        for part in names
    ]
    rows.append(("in all", *(duration(float(receipt["wall_secs"])) for receipt in receipts.values())))
    rows.append(("goodput", *(f"{float(receipt['goodput_percent']):.1f}%" for receipt in receipts.values())))
    rows.append(("starts", *(f"{len(receipt['starts']):,}" for receipt in receipts.values())))
    return joined([*bars, table(("part", *receipts), rows, label="time by part and run")])


def _options(named: Mapping[str, Left]) -> Html:
    shown = {label: origin.shown(left.config or {}) for label, left in named.items()}
    names = dict.fromkeys(name for options in shown.values() for name in options)
    rows = [
        (name, *(options[name] if name in options else _ABSENT for options in shown.values()))
        for name in names
        if len({options.get(name) for options in shown.values()}) > 1
    ]
    data = [left.starts[-1]["data"] if left.starts else _ABSENT for left in named.values()]
    if len(set(data)) > 1:
        rows.append(("data", *data))
    return table(("option", *named), rows, label="options that differ") if rows else note("They have the same options.")
