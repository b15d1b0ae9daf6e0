"""Numbers and times in words, as the page writes them. `page.js` writes numbers in the same way. Pure."""

import math
from typing import Any

_SHORT = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_HUGE = 1e15  # from there on nobody counts digits


def number(value: Any) -> str:
    """A value with four digits that count; what is no number as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "not finite"
    if value != 0 and not 1e-3 <= abs(value) < _HUGE:
        return f"{value:.2e}"
    return f"{value:,.0f}" if isinstance(value, int) or value == 0 or abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """A number for an axis: 1.5M, 200k, 0.05."""
    if abs(value) >= _HUGE:
        return f"{value:.3g}"
    for unit, letter in _SHORT:
        if abs(value) >= unit * (10 if letter == "k" else 1):
            return f"{value / unit:.4g}{letter}"
    return f"{value:.0e}" if 0 < abs(value) < 1e-4 else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(secs: float) -> str:
    """In the two units that say most: 3 h 20 min."""
    if secs < _MINUTE:
        return f"{secs:.1f} s"
    for unit, name, part, part_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if secs >= unit:
            whole, rest = divmod(round(secs / part), unit // part)
            return f"{whole} {name} {rest} {part_name}"
    return f"{secs:.1f} s"


def percent(share: float) -> str:
    """Of a share between 0 and 1."""
    return f"{share:.1%}"


def to_float(value: Any) -> float | None:
    """A number of a JSON file, where NaN and infinity are text; None of anything else."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
