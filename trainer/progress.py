"""How far a run is, and how that reads: in a record's line, and at the bottom of a terminal. Pure."""

import dataclasses
from collections.abc import Sequence

_MINUTE, _HOUR, _DAY = 60, 3600, 24 * 3600
_FAST = 10  # steps/s, of which nobody wants to know tenths
_MIN_BAR, _MAX_BAR = 10, 30  # columns
_DONE, _LEFT = "━", "─"
_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is.

    steps_per_epoch: 0 where the data has no length. steps_per_sec, secs_left: as things go now, with the evaluations
    and checkpoints to come in the second; None before that can be told. loss: None where none is known.
    """

    step: int
    train_steps: int
    steps_per_epoch: float
    steps_per_sec: float | None = None
    secs_left: float | None = None
    loss: float | None = None

    @property
    def percent(self) -> float:
        """Of the steps."""
        return 100 * self.step / self.train_steps

    @property
    def epoch(self) -> float:
        """Epochs done; 0 where the data has no length."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else 0.0


def place(progress: Progress) -> list[str]:
    """`62%`, and `epoch 6.2` where the data has epochs."""
    percent = f"{int(progress.percent)}%"  # not 100% before the end
    return [percent, f"epoch {progress.epoch:.1f}"] if progress.steps_per_epoch else [percent]


def left(progress: Progress) -> list[str]:
    """`2 min 31 s left`, as soon as that is known and as long as there is any."""
    secs = progress.secs_left
    return [] if secs is None or round(secs) == 0 else [f"{duration(secs)} left"]


def rate(progress: Progress) -> list[str]:
    """`1,204 steps/s`, of slow ones `2.3 s/step`."""
    speed = progress.steps_per_sec
    if not speed:
        return []
    if speed < 1:
        return [f"{1 / speed:.1f} s/step"]
    return [f"{speed:,.0f} steps/s" if speed >= _FAST else f"{speed:.1f} steps/s"]


def duration(secs: float) -> str:
    """`45 s`, `2 min 31 s`, `1 h 02 min`, `3 d 4 h`."""
    whole = round(secs)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def live(columns: int, doing: str = "", progress: Progress | None = None) -> str:
    """The line at the bottom of a terminal.

    Args:
        columns: that there are; where they do not suffice, what matters least goes first.
        doing: what is being done, if not training.
        progress: of the training, once it has begun.
    """
    if progress is None:
        return doing[:columns]
    percent, *epoch = place(progress)
    loss = [] if progress.loss is None else [f"loss {progress.loss:.4g}"]
    # In the order of reading, each with its rank: those of the highest go first.
    parts = [
        (0, percent),
        (1, f"step {progress.step:,}/{progress.train_steps:,}"),
        *((6, part) for part in epoch),
        *((5, part) for part in loss),
        *((4, part) for part in rate(progress)),
        *((3, part) for part in left(progress)),
        *((2, part) for part in [doing] if part),
    ]
    while len(text := _joined(parts)) > columns and len(parts) > 1:
        parts.remove(max(parts))
    room = columns - len(text) - len(_GAP)
    if room >= _MIN_BAR:
        text = f"{_bar(progress.step / progress.train_steps, min(room, _MAX_BAR))}{_GAP}{text}"
    return text[:columns]


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return _GAP.join(text for _, text in parts)


def _bar(share: float, columns: int) -> str:
    done = int(share * columns)
    return _DONE * done + _LEFT * (columns - done)
