"""What the pictures of reports have in common: one SVG file, for light and dark, without references. Pure."""

import math
from collections.abc import Mapping, Sequence
from xml.sax import saxutils

# No custom properties: converters such as librsvg do not know them.
_STYLE = """
.back {{ fill: #ffffff; }}
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328;
  font-variant-numeric: tabular-nums; }}
.title {{ font-size: 17px; font-weight: 600; }}
.quiet {{ font-size: 12px; fill: #59636e; }}
.right {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }}
.grid {{ stroke: #d1d9e0; }}
{light}@media (prefers-color-scheme: dark) {{
.back {{ fill: #0d1117; }}
text {{ fill: #f0f6fc; }}
.quiet {{ fill: #9198a1; }}
.grid {{ stroke: #3d444d; }}
{dark}}}
"""


def document(
    parts: Sequence[str], *, width: float, height: float, label: str, light: Mapping[str, str], dark: Mapping[str, str]
) -> str:
    """The text of an SVG file.

    Args:
        parts: elements, in the order in which they are drawn.
        width, height: in pixels.
        label: what a screen reader says.
        light, dark: class -> its style on a light background, and what of that differs on a dark one.
    """
    style = _STYLE.format(light=_rules(light), dark=_rules(dark))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label={saxutils.quoteattr(label)}>',
            f"<style>{style}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _rules(styles: Mapping[str, str]) -> str:
    return "".join(f".{name} {{ {style} }}\n" for name, style in styles.items())


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words, of one or more classes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{saxutils.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of a class."""
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def round_step(length: float, count: int) -> float:
    """The least of 1, 2, 5 times a power of ten that divides `length` into `count` parts or fewer."""
    rough = length / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(nice * magnitude for nice in (1, 2, 5, 10) if nice * magnitude >= rough)
