"""A study as a picture: one SVG file without references, for light and dark backgrounds. Pure.

Trials stand from left to right in the order in which they were begun, each at its value; the line is the best so far.
"""

import math
from collections.abc import Sequence
from xml.sax import saxutils

from optuna.trial import FrozenTrial, TrialState

from scripts.launchers.study import Study

_WIDTH, _HEIGHT, _MARGIN = 920, 420, 24
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, _WIDTH - _MARGIN, 84, 350
_TICKS = 5
_RADIUS = 4.5
_LEGEND = "filled: to its end   hollow: ended early, its last value   cross: failed"
# No custom properties: converters such as librsvg do not know them.
_STYLE = """
.back { fill: #ffffff; }
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328;
  font-variant-numeric: tabular-nums; }
.title { font-size: 17px; font-weight: 600; }
.quiet { font-size: 12px; fill: #59636e; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.grid { stroke: #d1d9e0; }
.complete { fill: #8c96a3; }
.pruned { fill: none; stroke: #8c96a3; stroke-width: 1.5; }
.failed { stroke: #bc4c00; stroke-width: 1.5; }
.best { fill: #0969da; }
.sofar { fill: none; stroke: #0969da; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  .back { fill: #0d1117; }
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .grid { stroke: #3d444d; }
  .complete { fill: #6e7781; }
  .pruned { stroke: #6e7781; }
  .failed { stroke: #f0883e; }
  .best { fill: #4493f8; }
  .sofar { stroke: #4493f8; }
}
"""


def svg(study: Study, trials: Sequence[FrozenTrial], best: FrozenTrial | None) -> str:
    """The picture as the text of an SVG file."""
    found = "no trial has come to its end" if best is None else f"best {best.value:.6g}, of trial {best.number}"
    headline = f"{study.metric} by trial, {'more' if study.goal == 'max' else 'less'} is better: {found}"
    scale = _Scale([height for trial in trials if (height := _height(trial)) is not None], len(trials))
    parts = [
        *_axes(scale, len(trials)),
        _so_far(study, trials, scale),
        *(_mark(trial, scale, best is not None and trial.number == best.number) for trial in trials),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img" aria-label={saxutils.quoteattr(headline)}>',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
            _text(_MARGIN, 36, f"Tuning of {', '.join(parameter.name for parameter in study.parameters)}", "title"),
            _text(_MARGIN, 58, headline),
            *parts,
            _text(_MARGIN, _HEIGHT - 16, _LEGEND, "quiet"),
            "</svg>\n",
        ]
    )


class _Scale:
    """From trials and values to pixels, with round ticks."""

    def __init__(self, values: Sequence[float], num_trials: int):
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        span = high - low or abs(high) or 1.0
        magnitude = 10.0 ** math.floor(math.log10(span / _TICKS))
        self._step = next(nice * magnitude for nice in (1, 2, 5, 10) if nice * magnitude >= span / _TICKS)
        self._low, self._high = math.floor(low / self._step), math.ceil(high / self._step)
        self._high = max(self._high, self._low + 1)
        self._num_trials = num_trials

    def x(self, number: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (number + 0.5) / max(1, self._num_trials)

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value / self._step - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        return [self._step * index for index in range(self._low, self._high + 1)]


def _axes(scale: _Scale, num_trials: int) -> list[str]:
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 10, y + 4, f"{value:.6g}", "quiet right"))
    stride = math.ceil(num_trials / 20) or 1
    parts += [_text(scale.x(n), _BOTTOM + 20, str(n), "quiet middle") for n in range(0, num_trials, stride)]
    return parts


def _so_far(study: Study, trials: Sequence[FrozenTrial], scale: _Scale) -> str:
    better = max if study.goal == "max" else min
    points: list[str] = []
    best: float | None = None
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            new = trial.value if best is None else better(best, trial.value)
            if best is not None:
                points.append(f"{scale.x(trial.number):.1f},{scale.y(best):.1f}")
            points.append(f"{scale.x(trial.number):.1f},{scale.y(new):.1f}")
            best = new
    return f'<polyline class="sofar" points="{" ".join(points)}"/>'


def _mark(trial: FrozenTrial, scale: _Scale, is_best: bool) -> str:
    x, height = scale.x(trial.number), _height(trial)
    title = f"<title>trial {trial.number}: {saxutils.escape(str(trial.params))}</title>"
    if height is None:
        return f'<path class="failed" d="M{x - 4:.1f},{_BOTTOM - 4} l8,8 m0,-8 l-8,8">{title}</path>'
    kind = "best" if is_best else "complete" if trial.state == TrialState.COMPLETE else "pruned"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{scale.y(height):.1f}" r="{_RADIUS}">{title}</circle>'


def _height(trial: FrozenTrial) -> float | None:
    """The value of a trial, or the last one before it was ended early."""
    if trial.state == TrialState.PRUNED and trial.intermediate_values:
        return trial.intermediate_values[max(trial.intermediate_values)]
    return trial.value if trial.state == TrialState.COMPLETE else None


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{saxutils.escape(text)}</text>'
