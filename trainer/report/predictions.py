"""What a classifier takes for what: the confusion matrix, recall and precision, the worst examples. Pure."""

import re
from collections.abc import Sequence
from typing import Any

from trainer.report.html import Html, element, joined, note, table
from trainer.report.left import Json
from trainer.report.numbers import number, percent

_MOST_CLASSES = 20  # of a matrix that can still be read
_FEW_CHARS = 3
_SHADES = 5  # of page.css: right1, ..., wrong5
_MOST_CARDS = 48
_MOST_FEATURES = 12
# Nothing else is an image that a browser draws without running or loading anything.
_IMAGE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+")


def predictions(examples: Json) -> Html:
    """All of it.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not as `examples.json` is written.
    """
    seen, total = examples["examples"], examples["total"]
    how_many = f"All {total:,}" if seen == total else f"{seen:,} of {total:,}"
    parts = [
        note(f"{how_many} examples of the split {examples['split']}, by the weights of step {examples['step']:,}.")
    ]
    confusion = examples["confusion"]
    if confusion is None:
        parts.append(note("There is no confusion matrix: the classes are too many, or an example has several."))
    else:
        parts += [element("h3", "Confusion matrix"), _matrix(examples["classes"], confusion)]
    return joined(parts)


def worst(examples: Json) -> Html:
    """Cards of the examples with the largest losses."""
    cards = [_card(example) for example in examples["worst"][:_MOST_CARDS]]
    return element("ul", *cards, kind="worst") if cards else note("There are none.")


def most_confused(confusion: Sequence[Sequence[int]], most: int) -> list[int]:
    """The classes that are taken for others, or others for them, most often; in their order."""
    columns = list(zip(*confusion, strict=True))
    wrong = [sum(row) + sum(columns[index]) - 2 * row[index] for index, row in enumerate(confusion)]
    return sorted(sorted(range(len(wrong)), key=lambda index: -wrong[index])[:most])


def _matrix(classes: Sequence[str], confusion: Sequence[Sequence[int]]) -> Html:
    shown = most_confused(confusion, _MOST_CLASSES)
    right = sum(row[index] for index, row in enumerate(confusion))
    count = sum(map(sum, confusion))
    share = percent(right / count) if count else "-"
    told = f"{right:,} of {count:,} are right ({share}). Rows: what it is; columns: what the model says."
    if len(shown) < len(classes):
        told += f" Of the {len(classes):,} classes these are the {len(shown)} with most confusions."
    corner = element("td", kind="corner")
    head = element("tr", corner, *(element("th", element("span", classes[index]), scope="col") for index in shown))
    rows = [
        element(
            "tr",
            element("th", classes[label], scope="row"),
            *(_cell(classes, confusion[label], label, predicted) for predicted in shown),
        )
        for label in shown
    ]
    is_narrow = all(len(classes[index]) <= _FEW_CHARS for index in shown)  # else the names of columns stand upright
    kind = "confusion narrow" if is_narrow else "confusion"
    grid = element("table", element("thead", head), element("tbody", *rows), kind=kind)
    box = element("div", grid, kind="scroll", tabindex=0, role="region", aria_label="confusion matrix")
    return joined([element("p", told), element("div", box, _by_class(classes, confusion, shown), kind="beside")])


def _cell(classes: Sequence[str], row: Sequence[int], label: int, predicted: int) -> Html:
    count = row[predicted]
    if not count:
        return element("td", "0", kind="none")
    shade = 1 + min(int(_SHADES * count / sum(row)), _SHADES - 1)
    kind = "right" if label == predicted else "wrong"
    title = f"{classes[label]} taken for {classes[predicted]}: {count:,}"
    return element("td", f"{count:,}", kind=f"{kind}{shade}", title=title)


def _by_class(classes: Sequence[str], confusion: Sequence[Sequence[int]], shown: Sequence[int]) -> Html:
    rows = []
    for index in shown:
        of_label, of_predicted = sum(confusion[index]), sum(row[index] for row in confusion)
        right = confusion[index][index]
        rows.append(
            (
                classes[index],
                f"{of_label:,}",
                percent(right / of_label) if of_label else "-",
                percent(right / of_predicted) if of_predicted else "-",
            )
        )
    head = ("class", "examples", "recall", "precision")
    return table(head, rows, label="recall and precision by class")


def _card(example: Json) -> Html:
    parts: list[Html] = []
    image = example.get("image")
    if isinstance(image, str) and _IMAGE.fullmatch(image):
        parts.append(element("img", src=image, alt=f"example {example['index']}"))
    label, predicted = _words(example["label"]), _words(example["predicted"])
    said = [element("b", predicted), _share(example.get("predicted_probability"))]
    told = [" for ", element("b", label), _share(example.get("probability"))] if label != predicted else [", and right"]
    parts.append(element("p", *said, *told))
    if example.get("text"):
        parts.append(element("p", str(example["text"]), kind="quote"))
    if example.get("features"):
        features = list(example["features"].items())[:_MOST_FEATURES]
        parts.append(element("p", ", ".join(f"{name} {number(value)}" for name, value in features), kind="quote"))
    record = example.get("record")
    where = str(record).rpartition("/")[2] if record else f"example {number(example['index'])}"
    parts.append(element("p", f"loss {number(example['loss'])}, {where}", kind="more", title=record))
    return element("li", *parts)


def _words(value: Any) -> str:
    """A label; several of them, where an example has several."""
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"


def _share(value: Any) -> str:
    return f" ({percent(value)})" if isinstance(value, int | float) else ""
