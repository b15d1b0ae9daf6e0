"""What went wrong on the way: alerts, steps that were not finite, files with last words. Pure."""

from trainer.report.charts import ALERT, RESTART, Mark
from trainer.report.html import Html, element, folded, joined, moment, note, table
from trainer.report.left import Json, Left
from trainer.report.numbers import number
from trainer.report.spent import ended

_MOST_ROWS = 50
_MOST_RECORDS = _MOST_POSTMORTEMS = 10
_FINISHED = "finished"  # the alert of a run that nothing happened to


def marks(left: Left) -> list[Mark]:
    """Restarts and alerts, for the curves."""
    found = []
    starts = (left.receipt or {"starts": []})["starts"]
    for number_, (before, start) in enumerate(zip(starts, starts[1:], strict=False), start=2):
        if start["from_step"] is not None:
            why = ended(before["exit_code"], has_gone=True)
            found.append(Mark(start["from_step"], RESTART, f"start {number_}, from step {start['from_step']:,}: {why}"))
    for alert in left.alerts:
        step = alert.get("step")
        if isinstance(step, int) and alert.get("event") != _FINISHED:
            found.append(Mark(step, ALERT, f"{alert.get('event')} at step {step:,}: {alert.get('message')}"))
    return found


def alerts(left: Left) -> Html:
    """The newest alerts, the last one first."""
    if not left.alerts:
        return note("No alert was sent.")
    rows = [
        (
            element("span", str(alert.get("event")), kind=f"event {str(alert.get('severity')).lower()}"),
            number(alert.get("step")),
            element("span", str(alert.get("message")), kind="words"),
            moment(str(alert.get("time"))),
        )
        for alert in reversed(left.alerts)
    ]
    shown = table(("alert", "step", "what", "when, UTC"), rows[:_MOST_ROWS], label="alerts")
    more = len(rows) - _MOST_ROWS
    return joined([shown, note(f"{more:,} earlier ones are in alerts.jsonl.")]) if more > 0 else shown


def postmortems(left: Left) -> Html:
    """What was found of the last steps that were not finite."""
    more = len(left.postmortems) - _MOST_POSTMORTEMS
    shown = [_postmortem(found) for found in left.postmortems[-_MOST_POSTMORTEMS:]]
    return joined([*shown, note(f"{more:,} earlier steps were not finite either.")] if more > 0 else shown)


def _postmortem(found: Json) -> Html:
    suspects = [f"{record['shard']}, record {record['index']}" for record in found["suspects"]]
    rows = [
        ("went bad first", found["first"] or "nothing, done again on another machine"),
        ("records at fault", "; ".join(suspects[:_MOST_RECORDS]) or "no single one"),
        ("loss", number(found["loss"])),
        ("learning rate", number(found["learning_rate"])),
    ]
    norms = sorted(found["gradient_norms"].items(), key=lambda item: str(item[1]) not in ("nan", "inf", "-inf"))
    return joined(
        [
            element("h3", f"Step {found['step']:,} was not finite"),
            table(("", ""), rows, label=f"post-mortem of step {found['step']}", kind="facts"),
            folded(
                f"gradient norms of {len(norms)} variables",
                table(
                    ("variable", "norm"), [(n, number(norm)) for n, norm in norms[:_MOST_ROWS]], label="gradient norms"
                ),
            ),
        ]
    )


def last_words(left: Left) -> Html:
    """Names of files that tell more."""
    if not left.last_words:
        return Html("")
    return element("p", "Stacks and tracebacks: ", ", ".join(left.last_words), ".", kind="note")
