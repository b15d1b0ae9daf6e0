"""What was found out before the run: preflight, parity, the sweep of the learning rate, the input profile. Pure."""

import base64
from collections.abc import Mapping

from trainer import run_dir
from trainer.report.html import Html, element, folded, joined, note, table
from trainer.report.left import Json
from trainer.report.numbers import number

_GIB = 2**30
_MILLI = 1e3
_MOST_DIFFERENCES = 100


def preflight(found: Json) -> Html:
    """A row a slice."""
    rows = [_slice(each) for each in found["slices"]]
    head = ("slice", "replicas", "a replica", "verdict", "HBM GiB", "of", "step ms", "examples/s")
    problems = [note(f"{each['slice']}: {each['problem']}") for each in found["slices"] if each["problem"]]
    return joined([table(head, rows, label="preflight"), *problems])


def parity(found: Json) -> Html:
    """The verdict, and what differs."""
    findings = [
        (
            "by nature" if each["inherent"] else "wrong",
            ". ".join(filter(None, [each["cause"], ", ".join(each["where"]), each["remedy"]])),
        )
        for each in found["findings"]
    ]
    differences = [
        _difference(f"{compared['one']} - {compared['other']}", each)
        for compared in found["compared"]
        for each in compared["differences"]
        if not each["agrees"]
    ]
    parts = [element("p", f"One and several replicas: {found['verdict']}.")]
    if findings:
        parts.append(table(("", "what differs"), findings, label="findings of parity"))
    if differences:
        head = ("compared", "step", "kind", "of", "relative difference")
        rows = differences[:_MOST_DIFFERENCES]
        parts.append(
            folded(f"{len(differences):,} differences beyond rounding", table(head, rows, label="differences"))
        )
    return joined(parts)


def pictures(found: Mapping[str, str]) -> Html:
    """The pictures that the modes have drawn. As images they can neither run nor load anything."""
    names = {
        run_dir.SWEEP_PICTURE: "sweep of the learning rate",
        run_dir.INPUT_PICTURE: "profile of the input pipeline",
    }
    coded = {name: base64.b64encode(svg.encode()).decode() for name, svg in found.items()}
    return joined(
        element("img", src=f"data:image/svg+xml;base64,{image}", alt=names[name], kind="picture")
        for name, image in coded.items()
    )


def _difference(compared: str, each: Json) -> tuple[str, ...]:
    return compared, number(each["step"]), str(each["kind"]), str(each["name"]), f"{float(each['value']):.1e}"


def _slice(each: Json) -> tuple[str, ...]:
    estimate = each["estimate"]
    return (
        str(each["slice"]),
        number(each["num_replicas"]),
        number(each["per_replica_batch_size"]),
        str(each["verdict"]),
        f"{each['used_bytes'] / _GIB:.2f}" if each["used_bytes"] is not None else "-",
        f"{each['hbm_bytes'] / _GIB:.2f}",
        f"{estimate['step_secs'] * _MILLI:,.2f}" if estimate else "-",
        f"{estimate['examples_per_sec']:,.0f}" if estimate else "-",
    )
