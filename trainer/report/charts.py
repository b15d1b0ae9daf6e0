"""Curves over steps as figures: SVG drawn here, seen without any script, with their values for `page.js`. Pure."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

from trainer import picture
from trainer.report.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Steps, Values, values_axis
from trainer.report.curves import Curve, Point, thinned
from trainer.report.html import Html, element, joined
from trainer.report.numbers import number

_COLOURS = 8  # of page.css: c0, c1, ...
_FEW_POINTS = 40  # that are drawn as dots too
_DIGITS = 6
_MARK_PIXELS = 4  # marks that are closer together are one
RESTART, ALERT = "restart", "alert"
# Restarts stand on the lower edge and alerts on the upper one: they often share a step.
_SIGNS = {RESTART: ("M-4,0H4L0,-7Z", BOTTOM), ALERT: ("M0,-8L4,-4L0,0L-4,-4Z", TOP)}


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at a step: RESTART or ALERT."""

    step: int
    kind: str
    words: str


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a figure shows.

    title: also says the unit. curves: in the order of their colours; some may be empty.
    from_zero: whether the axis begins there, where a length is to be read off. log: whether it can be logarithmic.
    hero: whether it is to be larger than the others.
    """

    title: str
    curves: Sequence[Curve]
    from_zero: bool = False
    log: bool = False
    hero: bool = False


def steps_of(charts: Sequence[Chart]) -> Steps:
    """The axis that all of some charts fit on."""
    steps = [point[0] for chart in charts for curve in chart.curves for point in curve.points]
    return Steps(0, max(steps, default=1))


def figure(chart: Chart, steps: Steps, marks: Sequence[Mark] = ()) -> Html:
    """A chart with its legend, which also shows the values under the cursor."""
    drawn = [thinned(curve) for curve in chart.curves]
    values = [value for curve in drawn for value in curve.finite]
    keys = [_key(index, curve) for index, curve in enumerate(drawn) if curve.points]
    caption = element(
        "figcaption",
        element("h3", chart.title),
        element("p", *keys, element("span", kind="at", aria_live="polite"), kind="keys"),
    )
    if not values:
        words = "None of its values is finite." if any(curve.points for curve in drawn) else "Nothing was recorded yet."
        return element("figure", caption, element("p", words, kind="note"), kind="chart")
    label = f"{chart.title} by step: {'; '.join(_told(curve) for curve in drawn if curve.points)}"
    has_log = chart.log and min(values) > 0
    pictures = [_svg(drawn, steps, values_axis(values, from_zero=chart.from_zero, is_log=False), marks, label)]
    switch: list[Html] = []
    if has_log:
        switch = [
            element("label", element("input", type="checkbox", kind="switch"), "logarithmic", kind="log"),
        ]
        pictures.append(_svg(drawn, steps, values_axis(values, from_zero=False, is_log=True), marks, label))
    kinds = "chart hero" if chart.hero else "chart"
    return element("figure", caption, *switch, *pictures, _data(drawn, steps), kind=kinds)


def marks_legend(marks: Sequence[Mark]) -> Html:
    """What the signs above the curves mean."""
    names = {RESTART: "begun again", ALERT: "alert"}
    kinds = [kind for kind in names if any(mark.kind == kind for mark in marks)]
    signs = [
        element("span", element("svg", _sign(kind, 6, 11), viewBox="0 0 12 14", kind="key"), names[kind])
        for kind in kinds
    ]
    return element("p", *signs, kind="keys") if signs else Html("")


def _svg(curves: Sequence[Curve], steps: Steps, axis: Values, marks: Sequence[Mark], label: str) -> Html:
    parts = [*axis.drawn(), *steps.drawn(), *_marks(steps, marks)]
    for index, curve in enumerate(curves):
        parts += _line(index, curve, steps, axis)
    kind = "logarithmic" if axis.is_log else "linear"
    return element(
        "svg",
        Html("".join(parts)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        kind=f"plot {kind}",
        role="img",
        tabindex=0,
        aria_label=f"{label}; logarithmic axis" if axis.is_log else label,
    )


def _line(index: int, curve: Curve, steps: Steps, axis: Values) -> list[str]:
    """A path that is broken where a value is not finite; such values are crosses on the upper edge."""
    words, pen_is_down, kind = [], False, f"c{index % _COLOURS}"
    crosses, dots = [], []
    for step, value in curve.points:
        x = steps.x(step)
        if not math.isfinite(value):
            crosses.append(f"M{x - 3:.1f},{TOP - 9:.1f}l6,6m0,-6l-6,6")
            pen_is_down = False
            continue
        y = axis.y(value)
        words.append(f"{'L' if pen_is_down else 'M'}{x:.1f},{y:.1f}")
        if not pen_is_down:
            words.append("h0")  # a point alone is a dot
        pen_is_down = True
        dots.append(f'<circle class="{kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>')
    parts = [f'<path class="{kind} line" d="{"".join(words)}"/>'] if words else []
    if len(dots) <= _FEW_POINTS:
        parts += dots
    if crosses:
        parts.append(f'<path class="{kind} line" d="{"".join(crosses)}"/>')
    return parts


def _marks(steps: Steps, marks: Sequence[Mark]) -> list[str]:
    """One sign for those of a kind that are closer together than it is wide."""
    places: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        if steps.first <= mark.step <= steps.last:
            places.setdefault((mark.kind, round(steps.x(mark.step) / _MARK_PIXELS)), []).append(mark)
    parts: list[str] = []
    for (kind, _), there in places.items():
        x = steps.x(there[0].step)
        title = element("title", "\n".join(mark.words for mark in there))
        line = picture.line(x, TOP, x, BOTTOM, f"mark {kind}")
        parts.append(element("g", title, Html(line), _sign(kind, x, _SIGNS[kind][1])))
    return parts


def _sign(kind: str, x: float, y: float) -> Html:
    path = element("path", kind=f"sign {kind}", d=_SIGNS[kind][0])
    return element("g", path, transform=f"translate({x:.1f} {y:.1f})")


def _key(index: int, curve: Curve) -> Html:
    line = Html(f'<svg class="key" viewBox="0 0 22 10"><path class="c{index % _COLOURS} line" d="M1,5H21"/></svg>')
    last = element("b", number(curve.points[-1][1]), data_curve=index)
    return element("span", line, f"{curve.name} ", last)


def _told(curve: Curve) -> str:
    """A curve in words."""
    step, value = curve.points[-1]
    bad = len(curve.points) - len(curve.finite)
    extent = f", between {number(min(curve.finite))} and {number(max(curve.finite))}" if curve.finite else ""
    return f"{curve.name} {number(value)} at step {step:,}{extent}{f', {bad} not finite' if bad else ''}"


def _data(curves: Sequence[Curve], steps: Steps) -> Html:
    """What the script reads. Numbers only, so nothing in it can end the element."""
    content = {
        "steps": [steps.first, steps.last],
        "pixels": [LEFT, RIGHT, TOP, BOTTOM, WIDTH],
        "curves": [_columns(curve.points) for curve in curves],
    }
    return element("script", Html(json.dumps(content, separators=(",", ":"))), type="application/json")


def _columns(points: Sequence[Point]) -> Mapping[str, list[float | None]]:
    return {
        "step": [step for step, _ in points],
        "value": [_rounded(value) if math.isfinite(value) else None for _, value in points],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def grid(charts: Sequence[Chart], steps: Steps, marks: Sequence[Mark]) -> Html:
    """Figures beside and below each other, as the width allows."""
    return element("div", joined(figure(chart, steps, marks) for chart in charts), kind="charts")
