"""Colours of the page: seen on their ground, and told apart by who sees no red or no green."""

import itertools
import math
import re

import pytest

from tests.conftest import ROOT

CSS = (ROOT / "trainer" / "report" / "page.css").read_text()
THEMES = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}
WORDS_ON_GROUND = ("words", "quiet", "link", "good", "bad", "warn")
LINES = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "idle")


def colours(theme: int) -> dict[str, tuple[float, float, float]]:
    """Name -> linear RGB."""
    found = re.findall(r"--([\w-]+): #(\w{2})(\w{2})(\w{2});", THEMES[theme])
    return {name: tuple(linear(int(part, 16) / 255) for part in parts) for name, *parts in found}


def linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def contrast(one: tuple, other: tuple) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: tuple) -> tuple[float, float, float]:
    """CIELAB under D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        f(max(0.0, sum(m * c for m, c in zip(row, colour, strict=True))) / w)
        for row, w in zip(matrix, white, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def f(value: float) -> float:
    return value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116


@pytest.mark.parametrize("theme", [0, 1])
def test_words_and_lines_stand_out(theme: int) -> None:
    of = colours(theme)
    for ground in ("ground", "raised"):
        assert all(contrast(of[name], of[ground]) >= 4.5 for name in WORDS_ON_GROUND)
    assert all(contrast(of[name], of["ground"]) >= 3 for name in LINES)
    for kind in ("right", "wrong"):
        assert all(
            contrast(of[f"{kind}{shade}"], of["on-pale" if shade < 4 else "on-strong"]) >= 4.5 for shade in range(1, 6)
        )


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("sight", SIGHTS)
def test_the_first_four_curves_are_told_apart(theme: int, sight: str) -> None:
    of = colours(theme)
    seen = [
        lab(
            tuple(
                min(1.0, max(0.0, sum(m * c for m, c in zip(row, of[f"c{index}"], strict=True))))
                for row in SIGHTS[sight]
            )
        )
        for index in range(4)
    ]
    for one, other in itertools.combinations(seen, 2):
        assert math.dist(one, other) > 15
