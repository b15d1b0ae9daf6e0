"""Records as lines on the console."""

import logging
import time
from collections.abc import Callable

from trainer import progress
from trainer.callbacks.records import Record
from trainer.progress import Progress

# Small models do thousands of steps a second, and a run may take weeks; a person does not read thousands of lines.
# So the time between two is this share of the time so far, within bounds: 2 s in the first minute, 10 s after five
# minutes, a minute from half an hour on.
INTERVAL_SHARE = 1 / 30
INTERVAL_SECS, LONGEST_INTERVAL_SECS = 2.0, 60.0

_FORMATS = {
    "train/learning_rate": "lr {:.1e}",
    "train/gradient_norm": "grad {:.3g}",
    "train/gradient_underflow": "underflow {:.1%}",
    "train/gradient_overflow": "overflow {:.1%}",
    "train/loss_scale": "scale {:,.0f}",
    "train/examples_per_sec": "{:,.0f} examples/s",
    "train/tokens_per_sec": "{:,.0f} tokens/s",
    "train/step_ms": "{:,.1f} ms/step",
    "train/input_wait_ms": "input {:,.1f} ms",
    "train/host_memory_mib": "{:,.0f} MiB",
}

_log = logging.getLogger(__name__)


class Lines:
    """The sink that is the log: all evaluations, the last train record, and of the others one now and then.

    In the JSON format of trainer/logs.py the values come as fields beside the line.

    Args:
        train_steps: steps of the whole run.
        reached: how far the run is, for train records.
    """

    def __init__(self, train_steps: int, reached: Callable[[], Progress] | None = None):
        self._train_steps, self._reached = train_steps, reached
        self._begun = time.monotonic()
        self._said = -INTERVAL_SECS
        self._unsaid: Record | None = None

    def drop_after(self, step: int) -> None:
        """What was said cannot be unsaid."""
        self._unsaid = None

    def write(self, record: Record) -> None:
        """Says `record`, or holds it back in case it is the last."""
        now = time.monotonic()
        evaluates = all(name.startswith("eval/") for name in record.values)
        interval = min(max(INTERVAL_SECS, INTERVAL_SHARE * (now - self._begun)), LONGEST_INTERVAL_SECS)
        if evaluates or record.step == self._train_steps or now - self._said >= interval:
            self._say(record)
            self._said = self._said if evaluates else now
            self._unsaid = self._unsaid if evaluates else None
        else:
            self._unsaid = record

    def flush(self) -> None:
        """Nothing to do: the log flushes every line."""

    def close(self) -> None:
        """Says the last record, if it was held back."""
        if self._unsaid is not None:
            self._say(self._unsaid)
            self._unsaid = None

    def _say(self, record: Record) -> None:
        evaluates = all(name.startswith("eval/") for name in record.values)
        at = self._reached() if self._reached and not evaluates else None
        fields = {"step": record.step, "train_steps": self._train_steps, **record.values, **(_fields(at) if at else {})}
        _log.info("%s", line(record, self._train_steps, at), extra={"fields": fields})


def _fields(at: Progress) -> dict[str, float | None]:
    return {
        "progress_percent": at.percent,
        "epoch": at.epoch,
        "steps_per_sec": at.steps_per_sec,
        "secs_left": at.secs_left,
    }


def line(record: Record, train_steps: int, at: Progress | None = None) -> str:
    """`step 150/240  62%  epoch 6.2  12 s left  loss 0.4312  ...` or `step 150/240  eval loss 0.5  ...`.

    Args:
        record: of one step.
        train_steps: steps of the whole run.
        at: how far the run is, if the line is to say more of it than the step.
    """
    parts = [f"step {record.step:,}/{train_steps:,}", *([*progress.place(at), *progress.left(at)] if at else [])]
    for name, value in record.values.items():
        kind, _, metric = name.partition("/")
        known = _FORMATS.get(name)
        parts.append(known.format(value) if known else f"{metric} {value:.4g}")
        if kind == "eval" and len(parts) == 2:
            parts[1] = f"eval {parts[1]}"
    return "  ".join(parts)
