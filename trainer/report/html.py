"""Markup. A text is escaped and rid of secrets wherever it is put into an element: nobody has to think of it. Pure."""

import base64
import hashlib
import html
import pathlib
from collections.abc import Iterable, Sequence

from trainer.redact import redact

_EMPTY = ("img", "input", "link", "meta")  # elements without an end
_CSS, _SCRIPT = (pathlib.Path(__file__).with_name(name) for name in ("page.css", "page.js"))


class Html(str):
    """A text that is markup already."""


def element(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """An element; children that are no `Html` are text.

    Args:
        name: of the element.
        children: what is in it.
        attributes: `kind` stands for class, an underscore for a hyphen; those that are None are left out.
    """
    names = {"kind": "class"}
    given = "".join(
        f' {names[key] if key in names else key.replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """One after the other."""
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def section(title: str, *children: str, key: str) -> Html:
    """A part of the page with a heading; `key` is what links name."""
    return element("section", element("h2", title), *children, id=key)


def note(text: str) -> Html:
    """A quiet sentence."""
    return element("p", text, kind="note")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, kind: str | None = None) -> Html:
    """A table with a heading a row; one that is too wide scrolls within itself.

    Args:
        head: names of the columns; all empty for none.
        rows: the first cell of each is its heading.
        label: for who cannot see it.
        kind: `facts` of one whose values may be long words, such as paths.
    """
    parts = []
    if any(head):
        parts.append(element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))))
    lines = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells))
        for first, *cells in rows
    ]
    body = element("table", *parts, element("tbody", *lines), kind=kind)
    return element("div", body, kind="scroll", tabindex=0, role="region", aria_label=label)


def moment(time: str) -> Html:
    """A time of ISO 8601 in UTC, for people."""
    return element("span", time.replace("T", " ").removesuffix("+00:00"), kind="time")


def folded(summary: str, *children: str) -> Html:
    """What shows when it is asked for."""
    return element("details", element("summary", summary), *children)


def page(title: str, sections: Sequence[Html], *, heading: Html, links: Sequence[tuple[str, str]]) -> str:
    """The whole file. It may load nothing, and run nothing but its own script.

    Args:
        title: of the window.
        sections: in their order.
        heading: stands above them.
        links: (key, name) of the sections, for the row of links.
    """
    css, script = (path.read_text(encoding="utf-8") for path in (_CSS, _SCRIPT))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(css)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(css)),
    )
    row = element("nav", *(element("a", name, href=f"#{key}") for key, name in links), aria_label="sections")
    body = element("body", element("header", heading, row), element("main", *sections), element("script", Html(script)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _escaped(text: str) -> str:
    # A path that is not in UTF-8 has halves of characters, which no file takes.
    return html.escape(redact(text)).encode(errors="replace").decode()


def _digest(text: str) -> str:
    """By which the policy knows a style sheet or a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
