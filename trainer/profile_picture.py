"""The profile of an input pipeline as a picture. Pure.

Bars are time an example, not examples/s: times of stages add up, each bar begins where the one before ends, and the
longest is what to work on. Below stands the model's time; a pipeline that ends left of the dashed line is fast enough.
"""

import math

from trainer import picture
from trainer.profile_report import ENOUGH, Profile, Rate, headline

_WIDTH, _MARGIN = 920, 24
_BARS_LEFT, _BARS_RIGHT = 168, 580
_COLUMNS = (("adds", 672), ("examples/s", 782), ("MB/s", _WIDTH - _MARGIN))  # right edges
_TOP, _ROW, _BAR = 104, 38, 20
_TICKS = 5
_MILLI = 1e-3
_LIGHT = {
    "stage": "fill: #8c96a3;",
    "slow": "fill: #bc4c00;",
    "model": "fill: #0969da;",
    "limit": "stroke: #0969da; stroke-width: 1.5; stroke-dasharray: 5 4;",
    "spread": "stroke: #1f2328; stroke-width: 1.5;",
}
_DARK = {
    "stage": "fill: #6e7781;",
    "slow": "fill: #f0883e;",
    "model": "fill: #4493f8;",
    "limit": "stroke: #4493f8;",
    "spread": "stroke: #f0f6fc;",
}


def svg(profile: Profile) -> str:
    """The picture as the text of an SVG file."""
    added, model = profile.added_secs(), profile.model.secs_per_example
    longest = max(*(1 / min(rate.examples_per_sec) for rate in (*profile.stages, profile.model)), sum(added))
    scale = _Scale(longest)
    rows = len(profile.stages) + 1
    bottom = _TOP + rows * _ROW + _BAR
    parts = _heading(profile) + _axis(scale, bottom)
    begin = 0.0
    for index, (stage, secs) in enumerate(zip(profile.stages, added, strict=True)):
        kind = "slow" if index == profile.slowest else "stage"
        parts += _row(scale, index, stage, begin, begin + secs, kind)
        begin += secs
    # A gap between the stages and what they are held against.
    parts += _row(scale, rows - 0.5, profile.model, 0.0, model, "model")
    limit = scale.x(model / ENOUGH)
    text = f"fast enough: {ENOUGH:g} times the model's speed"
    parts += [
        picture.line(limit, _TOP - 8, limit, bottom, "limit"),
        picture.text(min(max(limit, _BARS_LEFT + 120), _BARS_RIGHT - 60), bottom + 36, text, "quiet middle"),
    ]
    height = bottom + 56
    return picture.document(parts, width=_WIDTH, height=height, label=headline(profile), light=_LIGHT, dark=_DARK)


class _Scale:
    """From seconds an example to pixels, with round ticks."""

    def __init__(self, longest: float):
        self.unit, self.factor = ("ms", 1e3) if longest >= _MILLI else ("µs", 1e6)
        self._step = picture.round_step(longest, _TICKS)
        self._end = self._step * math.ceil(longest / self._step)

    def x(self, secs: float) -> float:
        return _BARS_LEFT + (_BARS_RIGHT - _BARS_LEFT) * secs / self._end

    def ticks(self) -> list[float]:
        return [self._step * index for index in range(round(self._end / self._step) + 1)]

    def number(self, secs: float) -> str:
        value = secs * self.factor
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _heading(profile: Profile) -> list[str]:
    facts = profile.circumstances
    parts = [
        picture.text(_MARGIN, 36, f"Input pipeline of {facts.dataset}", "title"),
        picture.text(_MARGIN, 58, headline(profile)),
        picture.text(_MARGIN, 76, f"{facts.cores} cores; model on {facts.devices}", "quiet"),
    ]
    return parts + [picture.text(right, _TOP - 12, name, "quiet right") for name, right in _COLUMNS]


def _axis(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for secs in scale.ticks():
        x = scale.x(secs)
        parts.append(picture.line(x, _TOP - 8, x, bottom, "grid"))
        parts.append(picture.text(x, bottom + 16, scale.number(secs), "quiet middle"))
    return [*parts, picture.text(_BARS_LEFT - 12, bottom + 16, f"{scale.unit} an example", "quiet right")]


def _row(scale: _Scale, row: float, rate: Rate, begin: float, end: float, kind: str) -> list[str]:
    """A name, a bar with the spread over the rounds at its end, and the numbers."""
    y = _TOP + row * _ROW
    middle, baseline = y + _BAR / 2, y + _BAR / 2 + 5
    left, width = scale.x(begin), max(1.0, scale.x(end) - scale.x(begin))
    low, high = (scale.x(1 / value) for value in (max(rate.examples_per_sec), min(rate.examples_per_sec)))
    numbers = (f"{scale.number(end - begin)} {scale.unit}", f"{rate.median:,.0f}", f"{rate.mb_per_sec:,.1f}")
    return [
        picture.text(_BARS_LEFT - 12, baseline, rate.name, "right"),
        f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="2"/>',
        picture.line(low, middle, high, middle, "spread"),
        *(picture.text(x, baseline, number, "right") for number, (_, x) in zip(numbers, _COLUMNS, strict=True)),
    ]
