"""Records as lines on the console."""

import logging
import time

from trainer.callbacks.records import Record

# Small models do thousands of steps a second; a person does not read thousands of lines.
INTERVAL_SECS = 2.0

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
    """The sink that is the log: all evaluations, the last train record, and of the others one every `INTERVAL_SECS`.

    In the JSON format of trainer/logs.py the values come as fields beside the line.

    Args:
        train_steps: steps of the whole run.
    """

    def __init__(self, train_steps: int):
        self._train_steps = train_steps
        self._said = -INTERVAL_SECS
        self._unsaid: Record | None = None

    def drop_after(self, step: int) -> None:
        """What was said cannot be unsaid."""
        self._unsaid = None

    def write(self, record: Record) -> None:
        """Says `record`, or holds it back in case it is the last."""
        now = time.monotonic()
        evaluates = all(name.startswith("eval/") for name in record.values)
        if evaluates or record.step == self._train_steps or now - self._said >= INTERVAL_SECS:
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
        fields = {"step": record.step, "train_steps": self._train_steps, **record.values}
        _log.info("%s", line(record, self._train_steps), extra={"fields": fields})


def line(record: Record, train_steps: int) -> str:
    """`step 150/240  loss 0.4312  accuracy 0.871  lr 9.1e-04  ...` or `step 150/240  eval loss 0.5  ...`."""
    parts = [f"step {record.step:,}/{train_steps:,}"]
    for name, value in record.values.items():
        kind, _, metric = name.partition("/")
        known = _FORMATS.get(name)
        parts.append(known.format(value) if known else f"{metric} {value:.4g}")
        if kind == "eval" and len(parts) == 2:
            parts[1] = f"eval {parts[1]}"
    return "  ".join(parts)
