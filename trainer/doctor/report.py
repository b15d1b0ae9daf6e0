"""What the doctor says: a page for people, an entry a finding for machines, a verdict and an exit code."""

import logging
import textwrap
from collections.abc import Sequence

from trainer import logs
from trainer.doctor.findings import Check, Finding, Status
from trainer.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRY

Result = tuple[Check, Finding]
_WIDTH = 100
_NAME_CHARS = 18  # a longer one, such as a variable's, goes beyond its column
_LEVELS: dict[Status, int] = {
    "pass": logs.RESULT,
    "skipped": logs.RESULT,
    "warn": logging.WARNING,
    "fail": logging.ERROR,
}

_log = logging.getLogger(__name__)


def exit_code(findings: Sequence[Finding]) -> int:
    """0: nothing fails; 75: the same command may succeed later; 78: something has to be mended first."""
    failures = [finding for finding in findings if finding.status == "fail"]
    if not failures:
        return EXIT_OK
    return EXIT_RETRY if all(finding.retryable for finding in failures) else EXIT_CONFIG


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {status: sum(finding.status == status for finding in findings) for status in _LEVELS}
    numbers = f"{counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed, {counts['skipped']} skipped"
    says = {
        EXIT_OK: "nothing stands in the way of a run",
        EXIT_RETRY: "a run would end now, and may succeed later without a change (exit code 75)",
        EXIT_CONFIG: "a run would end; mend what failed first (exit code 78)",
    }
    return f"{numbers}: {says[exit_code(findings)]}"


def page(results: Sequence[Result]) -> str:
    """Aligned columns by group, what to do under what needs it."""
    groups = list(dict.fromkeys(check.group for check, _ in results))
    names = [finding.name for _, finding in results if len(finding.name) <= _NAME_CHARS]
    widths = [max(map(len, column), default=0) for column in (groups, _LEVELS, names)]
    lines = []
    for group in groups:
        label = group
        for finding in [finding for check, finding in results if check.group == group]:
            head = "  ".join(
                f"{cell:<{width}}" for cell, width in zip((label, finding.status, finding.name), widths, strict=True)
            )
            lines += _wrapped(f"{head}  ", finding.what)
            if finding.remedy:
                lines += _wrapped(" " * len(head) + "  -> ", finding.remedy)
            label = ""
    return "\n".join(lines)


def say(results: Sequence[Result], log_format: str) -> None:
    """Says it all, through logging."""
    findings = [finding for _, finding in results]
    if log_format == "json":
        for check, finding in results:
            fields = {"group": check.group, "check": finding.name, "status": finding.status, "remedy": finding.remedy}
            fields["retryable"] = str(finding.retryable).lower()
            _log.log(_LEVELS[finding.status], "%s: %s", finding.name, finding.what, extra={"fields": fields})
    else:
        _log.log(logs.RESULT, "%s", page(results))
    _log.log(logs.RESULT, "%s", verdict(findings), extra={"fields": {"exit_code": exit_code(findings)}})


def _wrapped(head: str, text: str) -> list[str]:
    width = max(_WIDTH, len(head) + _WIDTH // 2)
    # No address, path or command is broken: they are there to be copied.
    return textwrap.wrap(
        text or "-",
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
