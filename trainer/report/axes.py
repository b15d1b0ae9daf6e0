"""From steps and values to pixels, with round ticks. Pure."""

import dataclasses
import math
from collections.abc import Sequence

from trainer import picture
from trainer.report.numbers import short

WIDTH, HEIGHT = 400, 212
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 10, 14, HEIGHT - 24
_X_TICKS, _Y_TICKS = 5, 5
_PADDING = 0.04  # of the height, above and below what is drawn
_FEW_DECADES = 1.5  # within which a logarithmic axis has 1, 2 and 5 of each


@dataclasses.dataclass(frozen=True)
class Steps:
    """The horizontal axis, the same for all charts of a page."""

    first: int
    last: int

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return LEFT + (RIGHT - LEFT) * (step - self.first) / max(self.last - self.first, 1)

    def drawn(self) -> list[str]:
        """Ticks and their numbers."""
        size = max(picture.round_step(max(self.last - self.first, 1), _X_TICKS), 1.0)
        begin = math.ceil(self.first / size)
        ticks = [index * size for index in range(begin, math.floor(self.last / size) + 1)]
        parts = []
        for tick in ticks:
            x = self.x(tick)
            parts.append(picture.line(x, BOTTOM, x, BOTTOM + 4, "grid"))
            # A number at the very edge would be cut off.
            kind = "quiet right" if x > RIGHT - 14 else "quiet middle"
            parts.append(picture.text(min(x, RIGHT + 8), BOTTOM + 17, short(tick), kind))
        return parts


@dataclasses.dataclass(frozen=True)
class Values:
    """The vertical axis. `low` and `high` as values, or their logarithms."""

    low: float
    high: float
    is_log: bool

    def y(self, value: float) -> float:
        """Pixels from the top."""
        at = math.log10(value) if self.is_log else value
        return BOTTOM - (BOTTOM - TOP) * (at - self.low) / (self.high - self.low)

    def drawn(self) -> list[str]:
        """Ticks, their numbers, and lines across."""
        parts = []
        for tick in self._ticks():
            y = self.y(tick)
            parts.append(picture.line(LEFT, y, RIGHT, y, "grid"))
            parts.append(picture.text(LEFT - 6, y + 4, short(tick), "quiet right"))
        return parts

    def _ticks(self) -> list[float]:
        if not self.is_log:
            return _multiples(self.low, self.high)
        each = (1, 2, 5) if self.high - self.low < _FEW_DECADES else (1,)
        every = math.ceil((self.high - self.low) / (2 * _Y_TICKS))
        exponents = [e for e in range(math.floor(self.low), math.ceil(self.high) + 1) if e % every == 0]
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in each]
        inside = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
        return inside if len(inside) > 1 else _multiples(10.0**self.low, 10.0**self.high)


def _multiples(low: float, high: float) -> list[float]:
    """Multiples of a round number."""
    size = picture.round_step(high - low, _Y_TICKS)
    return [index * size for index in range(math.ceil(low / size), math.floor(high / size) + 1)]


def values_axis(values: Sequence[float], *, from_zero: bool, is_log: bool) -> Values:
    """An axis that holds all of some finite values; above 0 where it is to be logarithmic."""
    if is_log:
        low, high = math.log10(min(values)), math.log10(max(values))
        spread = max(high - low, 0.3)
    else:
        low, high = min(values), max(values)
        low = min(low, 0.0) if from_zero else low
        spread = high - low or abs(high) or 1.0
    padding = _PADDING * spread if high > low else spread / 2
    bottom = 0.0 if from_zero and not is_log and low == 0 else low - padding
    return Values(bottom, high + padding, is_log)
