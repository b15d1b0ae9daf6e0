"""What was run: options, command, code, versions, machine, data; and the checkpoints that are kept. Pure."""

from collections.abc import Mapping
from typing import Any

from trainer.config import FIELDS, to_flag
from trainer.options.field import default
from trainer.report.html import Html, element, folded, joined, moment, note, table
from trainer.report.left import Json, Left
from trainer.report.numbers import number

_MIB = 2**20
_MOST_STARTS = 20  # besides the last


def options(config: Json) -> Html:
    """Those that are not as by default, and all of them behind a fold."""
    known = shown(config)
    changed = [
        (name, text, _default(name)) for name, text in known.items() if name in FIELDS and text != _default(name)
    ]
    rows = [(name, text, _default(name) if name in FIELDS else "-") for name, text in known.items()]
    head = ("option", "value", "by default")
    parts = [table(head, changed, label="options that differ from their defaults", kind="facts")]
    return joined([*parts, folded(f"all {len(rows)} options", table(head, rows, label="all options", kind="facts"))])


def shown(config: Json) -> dict[str, str]:
    """Options as text, without those that are secret."""
    return {
        name: to_flag(value)
        for name, value in config.items()
        if name not in FIELDS or not FIELDS[name].metadata["secret"]
    }


def provenance(left: Left) -> Html:
    """The last start; and those before it, the newest first, each behind a fold."""
    if not left.starts:
        return note("There is no provenance.json.")
    *before, last = left.starts
    parts = [table(("", ""), _facts(last), label="provenance of the last start", kind="facts")]
    for index, start in list(enumerate(before, start=1))[: -_MOST_STARTS - 1 : -1]:
        label = f"start {index} of {len(left.starts)}"
        parts.append(folded(label, table(("", ""), _facts(start), label=f"provenance of {label}", kind="facts")))
    if len(before) > _MOST_STARTS:
        parts.append(note(f"{len(before) - _MOST_STARTS:,} earlier ones are in provenance.json."))
    return joined(parts)


def checkpoints(left: Left) -> Html:
    """Those that are complete, the newest first."""
    if not left.checkpoints:
        return note("None is complete.")
    rows = []
    for step, marker in sorted(left.checkpoints.items(), key=lambda item: -item[1].serial):
        metrics = marker.facts["metrics"] if "metrics" in marker.facts else {}
        told = ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
        rows.append((f"{step:,}", moment(marker.time), f"{marker.num_bytes / _MIB:,.1f}", told or "-"))
    return table(("step", "saved, UTC", "MiB", "evaluation"), rows, label="checkpoints")


def _default(name: str) -> str:
    return to_flag(default(FIELDS[name]))


def _facts(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    code = start["git_commit"] or "not from a checkout of git"
    packages = ", ".join(f"{name} {version}" for name, version in start["packages"].items())
    rows = [
        ("begun, UTC", moment(start["time"])),
        ("command", element("code", " ".join(start["command"]))),
        ("code", f"{code}{', with changes' if start['git_dirty'] else ''}"),
        ("data", start["data"]),
        ("devices", f"{start['devices']}, host {start['host']}"),
        ("versions", f"Python {start['python']}, {packages}"),
    ]
    rows += [(name, value) for name, value in start["platform"].items()]
    rows += [(f"options from {source}", ", ".join(values)) for source, values in start["options"].items()]
    if start["skipped_records"]:
        rows.append(("left out", "; ".join(start["skipped_records"])))
    return rows
