"""A sweep of the learning rate as a picture: loss over learning rate, on a logarithmic axis. Pure."""

import math

from trainer import picture
from trainer.sweep import Sweep, extent, headline

_WIDTH, _HEIGHT, _MARGIN = 920, 460, 24
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, _WIDTH - _MARGIN, 112, 400
_TICKS = 5
# Of the fall of the loss: how far beyond where it began the picture shows it coming apart.
_HEADROOM = 0.25
_LIGHT = {
    "raw": "fill: #8c96a3; fill-opacity: 0.55;",
    "loss": "fill: none; stroke: #0969da; stroke-width: 2; stroke-linejoin: round;",
    "least": "stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 5 4;",
    "suggestion": "stroke: #bc4c00; stroke-width: 2;",
    "named": "fill: #bc4c00; font-weight: 600;",
}
_DARK = {
    "raw": "fill: #9198a1;",
    "loss": "stroke: #4493f8;",
    "least": "stroke: #9198a1;",
    "suggestion": "stroke: #f0883e;",
    "named": "fill: #f0883e;",
}


def svg(sweep: Sweep, title: str) -> str:
    """The picture as the text of an SVG file; `title` says what was trained."""
    axes = _Axes(sweep)
    rates = [point.learning_rate for point in sweep.points]
    raw = [
        f'<circle class="raw" cx="{axes.x(point.learning_rate):.1f}" cy="{axes.y(point.loss):.1f}" r="2"/>'
        for point in sweep.points
        if axes.shows(point.loss)
    ]
    track = " ".join(f"{axes.x(r):.1f},{axes.y(v):.1f}" for r, v in zip(rates, sweep.smoothed, strict=True))
    parts = [
        picture.text(_MARGIN, 36, title, "title"),
        picture.text(_MARGIN, 58, headline(sweep)),
        picture.text(_MARGIN, 76, f"{extent(sweep)}; dots: loss of each batch, line: smoothed", "quiet"),
        *axes.drawn(),
        *raw,
        f'<polyline class="loss" points="{track}"/>',
        *_marks(axes, sweep),
    ]
    return picture.document(parts, width=_WIDTH, height=_HEIGHT, label=headline(sweep), light=_LIGHT, dark=_DARK)


def _marks(axes: "_Axes", sweep: Sweep) -> list[str]:
    if sweep.suggestion is None:
        return []
    least, suggested = axes.x(sweep.points[sweep.least].learning_rate), axes.x(sweep.suggestion)
    parts = [
        picture.line(least, _TOP, least, _BOTTOM, "least"),
        picture.text(least, _TOP - 8, "least", "quiet middle"),
    ]
    if suggested >= _LEFT:  # else it lies before the first step
        parts.append(picture.line(suggested, _TOP, suggested, _BOTTOM, "suggestion"))
        parts.append(picture.text(suggested, _TOP - 8, f"{sweep.suggestion:.2g}", "named middle"))
    return parts


class _Axes:
    """From learning rate and loss to pixels. What lies beyond the axes is drawn on their edge."""

    def __init__(self, sweep: Sweep):
        rates = [point.learning_rate for point in sweep.points]
        smoothed = sweep.smoothed
        self._low, self._high = math.log10(rates[0]), math.log10(max(rates[-1], rates[0] * 1.01))
        begin, least = max(smoothed[: sweep.least + 1]), min(smoothed)
        fall = (begin - least) or abs(begin) or 1.0
        step = picture.round_step(fall * (1 + 2 * _HEADROOM), _TICKS)
        self._bottom = math.floor((least - _HEADROOM * fall) / step) * step
        if least >= 0:
            self._bottom = max(0.0, self._bottom)
        self._top, self._step = math.ceil((begin + _HEADROOM * fall) / step) * step, step

    def x(self, rate: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(rate) - self._low) / (self._high - self._low)

    def shows(self, loss: float) -> bool:
        return self._bottom <= loss <= self._top

    def y(self, loss: float) -> float:
        within = min(max(loss, self._bottom), self._top)
        return _BOTTOM - (_BOTTOM - _TOP) * (within - self._bottom) / (self._top - self._bottom)

    def drawn(self) -> list[str]:
        parts = []
        for index in range(round((self._top - self._bottom) / self._step) + 1):
            loss = self._bottom + index * self._step
            parts.append(picture.line(_LEFT, self.y(loss), _RIGHT, self.y(loss), "grid"))
            parts.append(picture.text(_LEFT - 10, self.y(loss) + 4, f"{loss:.4g}", "quiet right"))
        for exponent in range(math.ceil(self._low), math.floor(self._high) + 1):
            x = self.x(10.0**exponent)
            parts.append(picture.line(x, _TOP, x, _BOTTOM, "grid"))
            parts.append(picture.text(x, _BOTTOM + 18, f"{10.0**exponent:g}", "quiet middle"))
        middle = (_LEFT + _RIGHT) / 2
        return [
            *parts,
            picture.text(middle, _BOTTOM + 40, "learning rate", "quiet middle"),
            picture.text(_LEFT - 10, _TOP - 8, "loss", "quiet right"),
        ]
