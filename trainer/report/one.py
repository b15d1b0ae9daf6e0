"""The page of one run: which parts it has, in which order, and what stands where there is nothing to show. Pure."""

from collections.abc import Callable, Mapping

from trainer.report import beforehand, happened, html, origin, predictions, spent
from trainer.report.charts import Chart, Mark, grid, marks_legend, steps_of
from trainer.report.curves import (
    EVAL,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MEMORY,
    PRECISION,
    SPEED,
    TRAIN,
    Curve,
    Found,
    curves,
    metric_names,
)
from trainer.report.headline import headline, state
from trainer.report.html import Html, element, joined, note, section
from trainer.report.left import Left

_TITLES = {
    LEARNING_RATE: "learning rate",
    GRADIENT_NORM: "gradient norm",
    "gradient_underflow": "gradients too small for the precision, share",
    "gradient_overflow": "steps undone by overflow, share",
    "loss_scale": "loss scale",
    "examples_per_sec": "examples/s",
    "tokens_per_sec": "tokens/s",
    "step_ms": "ms a step",
    "input_wait_ms": "waiting for input, ms a step",
    MEMORY: "host memory, MiB",
}
_CAN_BE_LOGARITHMIC = (LOSS, GRADIENT_NORM, LEARNING_RATE, "loss_scale")
# Of a file that another version wrote, or nobody.
_ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

Part = tuple[str, str, Callable[[], Html]]  # key, title, what is in it


def page(left: Left) -> str:
    """The whole file."""
    found = curves(left)
    parts = [*_course(left, found), *_results(left), *_before(left), *_origin(left)]
    sections = [section(title, tried(content), key=key) for key, title, content in parts]
    if left.problems:
        problems = element("ul", *(element("li", problem) for problem in left.problems))
        sections.append(section("Not in this page", problems, key="problems"))
    heading = joined(
        [
            element("h1", left.name),
            element("p", left.path, kind="path"),
            element("p", f"As of {left.read_at:%Y-%m-%d %H:%M:%S} UTC.", kind="more"),
        ]
    )
    links = [(key, title) for key, title, _ in parts]
    return html.page(f"{left.name}: {state(left)[0]}", sections, heading=heading, links=links)


def tried(content: Callable[[], Html]) -> Html:
    """A part of the page, or why it is not there: one odd file must not cost the rest."""
    try:
        return content()
    except _ODD as error:
        return note(f"This cannot be shown: what was left is not as this version writes it ({error!r}).")


def title_of(name: str) -> str:
    """What a metric is called above its chart."""
    return _TITLES[name] if name in _TITLES else name.replace("_", " ")


def chart(name: str, of: Mapping[str, Curve], *, hero: bool = False) -> Chart:
    """Training and evaluation of one metric in one chart."""
    drawn = [of[kind] if kind in of else Curve(kind, ()) for kind in (TRAIN, EVAL)]
    return Chart(title_of(name), drawn, from_zero=name in SPEED, log=name in _CAN_BE_LOGARITHMIC, hero=hero)


def _course(left: Left, found: Found) -> list[Part]:
    """What became of the run, and how."""
    marks = _marks(left)

    def learning() -> Html:
        names = [*metric_names(found), *(n for n in (LEARNING_RATE, GRADIENT_NORM, *PRECISION) if n in found)]
        return _charts(found, names, marks, hero=LOSS)

    def speed() -> Html:
        return _charts(found, [name for name in SPEED if name in found], marks)

    def time() -> Html:
        return note("There is no receipt.json.") if left.receipt is None else spent.spent(left.receipt)

    def events() -> Html:
        parts = [happened.alerts(left), tried(lambda: happened.postmortems(left)), happened.last_words(left)]
        return joined(parts)

    parts: list[Part] = [("state", "State", lambda: headline(left, found))]
    if left.is_run:
        parts += [
            ("learning", "Learning", learning),
            ("speed", "Speed", speed),
            ("time", "Where the time went", time),
            ("alerts", "Alerts", events),
        ]
    return parts


def _charts(found: Found, names: list[str], marks: list[Mark], hero: str = "") -> Html:
    if not names:
        return note("Nothing was recorded yet: metrics.jsonl gets a line every --log_every_steps.")
    # One axis for all charts, so that marks stand at one place.
    steps = steps_of([chart(name, of) for name, of in found.items()])
    charts = [chart(name, found[name], hero=name == hero) for name in names]
    return joined([marks_legend(marks), grid(charts, steps, marks)])


def _marks(left: Left) -> list[Mark]:
    try:
        return happened.marks(left)
    except _ODD:  # told where the receipt and the alerts are
        return []


def _results(left: Left) -> list[Part]:
    examples = left.examples
    if examples is None:
        return []
    return [
        ("predictions", "Predictions", lambda: predictions.predictions(examples)),
        ("worst", "Worst examples", lambda: predictions.worst(examples)),
    ]


def _before(left: Left) -> list[Part]:
    parts: list[Part] = []
    if (checked := left.preflight) is not None:
        parts.append(("preflight", "Preflight", lambda: beforehand.preflight(checked)))
    if (compared := left.parity) is not None:
        parts.append(("parity", "Parity", lambda: beforehand.parity(compared)))
    if left.pictures:
        parts.append(("pictures", "Sweep and input", lambda: beforehand.pictures(left.pictures)))
    return parts


def _origin(left: Left) -> list[Part]:
    if not left.is_run:
        return []
    config = left.config
    return [
        ("options", "Options", lambda: note("There is no config.json.") if config is None else origin.options(config)),
        ("provenance", "Provenance", lambda: origin.provenance(left)),
        ("checkpoints", "Checkpoints", lambda: origin.checkpoints(left)),
    ]
