"""What became of a run, in a few figures. Pure."""

import datetime
import math
import statistics

from trainer.report.curves import EVAL, LOSS, TRAIN, Found, best
from trainer.report.html import Html, element
from trainer.report.left import Left
from trainer.report.numbers import duration, number
from trainer.report.spent import ended

_EXAMPLES_PER_SEC, _TOKENS_PER_SEC = "examples_per_sec", "tokens_per_sec"


def state(left: Left) -> tuple[str, str]:
    """One word for the run's state, and a sentence."""
    found = left.status
    if found is None:
        return ("unknown", "It has no status.json.") if left.config else ("not begun", "Nothing was trained here yet.")
    said = f": {found.reason}" if found.reason else "."
    if found.state == "running" and left.is_dead:
        return "killed", f"Its process {found.pid} on {found.host} has ended without a last word."
    if found.state == "running":
        heard = _age(found.time, left.read_at)
        return "running", f"{found.phase}, on {found.host}; last heard of {heard} before this page was written."
    if found.state == "finished":
        return found.state, f"On {found.host}, {_moment(found.time)}."
    return found.state, f"{ended(found.exit_code).capitalize()}{said}"


def headline(left: Left, found: Found) -> Html:
    """State, best and last evaluation, steps, speed and time."""
    word, sentence = state(left)
    cards = [("state", word, sentence), *_evaluations(left, found), *_steps(left, found), *_speed(found), *_time(left)]
    drawn = [
        _card(*card, kind=f"card state-{word.replace(' ', '-')}" if card[0] == "state" else "card") for card in cards
    ]
    return element("dl", *drawn, kind="cards")


def goal_of(left: Left) -> tuple[str, str]:
    """The metric that says which evaluation is best, and whether its least or its largest value is."""
    config = left.config or {}
    if isinstance(config.get("best_metric"), str) and config.get("best_goal") in ("min", "max"):
        return config["best_metric"], config["best_goal"]
    return LOSS, "min"


def at_step(found: Found, kind: str, step: int) -> dict[str, float]:
    """Metric -> its value at a step."""
    values = {name: dict(of[kind].points) for name, of in found.items() if kind in of}
    return {name: by_step[step] for name, by_step in values.items() if step in by_step}


def _card(name: str, value: str, more: str, *, kind: str) -> Html:
    return element("div", element("dt", name), element("dd", value), element("dd", more, kind="more"), kind=kind)


def _evaluations(left: Left, found: Found) -> list[tuple[str, str, str]]:
    metric, goal = goal_of(left)
    evaluated = {name: of[EVAL] for name, of in found.items() if EVAL in of}
    if not evaluated:
        return [("evaluation", "none", "It was not evaluated yet.")]
    cards = []
    if metric in evaluated and (top := best(evaluated[metric].points, goal)) is not None:
        others = {name: value for name, value in at_step(found, EVAL, top[0]).items() if name != metric}
        cards.append((f"best {metric}", number(top[1]), _more(top[0], others)))
    last = max(curve.points[-1][0] for curve in evaluated.values())
    values = at_step(found, EVAL, last)
    first = metric if metric in values else next(iter(values))
    others = {name: value for name, value in values.items() if name != first}
    cards.append((f"last {first}", number(values[first]), _more(last, others)))
    return cards


def _more(step: int, others: dict[str, float]) -> str:
    return ", ".join([f"evaluation of step {step:,}", *(f"{name} {number(value)}" for name, value in others.items())])


def _steps(left: Left, found: Found) -> list[tuple[str, str, str]]:
    steps = [curve.points[-1][0] for of in found.values() for curve in of.values()]
    if left.status is not None and left.status.step is not None:
        steps.append(left.status.step)
    config = left.config or {}
    asked = config.get("train_steps")
    more = f"of {asked:,}" if isinstance(asked, int) else ""
    batch = config.get("global_batch_size")
    more = ", ".join(filter(None, [more, f"{batch:,} examples each" if isinstance(batch, int) else ""]))
    return [("steps", f"{max(steps):,}", more)] if steps else []


def _speed(found: Found) -> list[tuple[str, str, str]]:
    cards = []
    for name, words in ((_EXAMPLES_PER_SEC, "examples/s"), (_TOKENS_PER_SEC, "tokens/s")):
        if name in found and TRAIN in found[name] and (values := found[name][TRAIN].finite):
            cards.append((words, f"{statistics.median(values):,.0f}", "median of all reports"))
    return cards


def _time(left: Left) -> list[tuple[str, str, str]]:
    if left.receipt is None:
        return []
    wall, goodput = (float(left.receipt[name]) for name in ("wall_secs", "goodput_percent"))
    if not math.isfinite(wall):
        return []
    starts = len(left.receipt["starts"])
    begun = "in one start" if starts == 1 else f"over {starts:,} starts"
    return [("time", duration(wall), begun), ("goodput", f"{goodput:.1f}%", "of it were steps that count")]


def _moment(time: str) -> str:
    return f"{time.replace('T', ' ').removesuffix('+00:00')} UTC"


def _age(time: str, now: datetime.datetime) -> str:
    try:
        return duration(max(0.0, (now - datetime.datetime.fromisoformat(time)).total_seconds()))
    except (ValueError, TypeError):
        return "an unknown time"
