"""`receipt.json`: what a run cost, summed over its restarts.

A killed process has no last word, so the receipt is written again and again while it runs; the next start adds its own
entry. Seconds within a process are monotonic. The time between two processes is taken from the monotonic clock too
where both ran on the same boot of a machine; else from the wall clock, which may jump: that is then said.
"""

import datetime
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

# The parts of time (trainer/callbacks/clock.py) that are named here; all others are only added up.
STEPS = "steps"
WAITING = "waiting"

# A wait between two starts that is longer by the wall clock alone may be a weekend, or a clock that jumped.
LONG_WAIT_SECS = 24 * 3600.0
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


class Receipt:
    """The account of all starts of a run, this one last. Any thread may write it.

    Set `from_step`, `reached_step` and `num_devices` as they become known.

    Args:
        earlier: text of the receipt that stands there; None of a run that has none.
        seconds: by part, of this process until now; they sum to its age.
        write: writes the text of `receipt.json`, whole or not at all.
    """

    def __init__(
        self, earlier: str | None, *, seconds: Callable[[], Mapping[str, float]], write: Callable[[str], None]
    ):
        self._earlier = _entries(earlier)
        self._seconds, self._write = seconds, write
        self.from_step: int | None = None
        self.reached_step: int | None = None
        self.num_devices = 0
        self._exit_code: int | None = None
        self._boot = _boot_id()
        self._failing = False
        self._lock = threading.Lock()

    @property
    def reached_before(self) -> int:
        """Highest step that an earlier start is known to have reached; 0 of a run without any."""
        return max((entry["reached_step"] or 0 for entry in self._earlier), default=0)

    def write(self) -> bool:
        """Writes `receipt.json` as of now; a failure is a warning, once, and the answer False."""
        with self._lock:
            try:
                self._write(json.dumps(self.account(), indent=1) + "\n")
            except (OSError, tf.errors.OpError) as error:
                if not self._failing:
                    _log.warning("the receipt cannot be written; it is tried again later: %s", error)
                self._failing = True
                return False
            self._failing = False
            return True

    def finish(self, exit_code: int) -> bool:
        """Writes the last word of this start."""
        self._exit_code = exit_code
        return self.write()

    def account(self) -> dict[str, Any]:
        """What `receipt.json` holds: sums over all starts, notes about what they cannot know, and each start."""
        starts = [*self._earlier, self._entry()]
        seconds: dict[str, float] = {}
        for start in starts:
            for part, value in start["seconds"].items():
                seconds[part] = seconds.get(part, 0.0) + value
        between = sum(start["waited_secs"] for start in starts)
        running = sum(seconds.values())
        seconds[WAITING] = seconds.get(WAITING, 0.0) + between
        counts = seconds.get(STEPS, 0.0)
        return {
            "wall_secs": round(running + between, 3),
            "seconds": {part: round(value, 3) for part, value in seconds.items()},
            "goodput_percent": _percent(counts, running + between),
            "goodput_percent_while_running": _percent(counts, running),
            "device_seconds": round(sum(sum(s["seconds"].values()) * s["num_devices"] for s in starts), 3),
            "notes": [note for start in starts for note in start["notes"]],
            "starts": starts,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The account as (name, value) for a table."""
        account = self.account()
        wall = account["wall_secs"]
        rows = [
            (f"time, {part.replace('_', ' ')}", f"{value:10,.1f} s {value / wall if wall else 0:6.1%}")
            for part, value in account["seconds"].items()
            if value >= 0.05
        ]
        rows.append(("time, total", f"{wall:10,.1f} s"))
        rows.append(
            (
                "goodput",
                f"{account['goodput_percent']:.1f}%, {account['goodput_percent_while_running']:.1f}% while running",
            )
        )
        rows.append(("device-seconds", f"{account['device_seconds']:,.0f}"))
        if self._earlier:
            codes = ["killed" if e["exit_code"] is None else str(e["exit_code"]) for e in self._earlier]
            rows.append(("starts", f"{len(codes) + 1:,}; the earlier ones ended with {_runs(codes)}"))
        return rows + [("note", note) for note in account["notes"]]

    def _entry(self) -> dict[str, Any]:
        seconds = dict(self._seconds())
        age, now, monotonic = sum(seconds.values()), time.time(), time.monotonic()
        waited, notes = _wait(self._earlier[-1] if self._earlier else None, self._boot, now - age, monotonic - age)
        return {
            "started": _utc(now - age),
            "last_word": _utc(now),
            "exit_code": self._exit_code,
            "from_step": self.from_step,
            "reached_step": self.reached_step,
            "num_devices": self.num_devices,
            "waited_secs": round(waited, 3),
            "seconds": {part: round(value, 3) for part, value in seconds.items()},
            "notes": [f"start {len(self._earlier) + 1}: {note}" for note in notes],
            "clock": {"wall": now, "monotonic": monotonic, "boot": self._boot},
        }


def _wait(before: Mapping[str, Any] | None, boot: str | None, wall: float, monotonic: float) -> tuple[float, list[str]]:
    """Seconds from the last word of the start before until this one began at `wall` or `monotonic`, and what to say.

    `wall` is what the wall clock now says of that moment, so that one set right soon after the start does no harm.
    """
    if before is None:
        return 0.0, []
    clock = before["clock"]
    if boot is not None and clock["boot"] == boot:
        return max(0.0, monotonic - clock["monotonic"]), []
    gap = wall - clock["wall"]
    if gap < -1.0:
        return 0.0, [
            f"began {-gap:,.0f} s before the one before it ended, by the wall clock; the wait between them counts as 0"
        ]
    if gap > LONG_WAIT_SECS:
        return gap, [
            f"began {gap / 3600:,.1f} h after the one before it ended, by the wall clock; if that was a clock that "
            "jumped, only the goodput while running is right"
        ]
    return max(0.0, gap), []


def _entries(text: str | None) -> list[dict[str, Any]]:
    """Earlier starts; of a text that is no receipt none, with a warning: a run does not end over its bill."""
    if text is None:
        return []
    try:
        starts = json.loads(text)["starts"]
        for start in starts:
            sum(start["seconds"].values()), start["clock"]["wall"], start["clock"]["monotonic"], start["clock"]["boot"]
            start["reached_step"], start["exit_code"], start["waited_secs"], start["num_devices"], start["notes"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the receipt of the earlier starts cannot be read, so it begins anew: %r", error)
        return []
    return starts


def _boot_id() -> str | None:
    """Names this boot of this machine, on which the monotonic clock is the same for all processes."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _runs(codes: list[str]) -> str:
    """`3 x killed, 75`: what ended the earlier starts, by how often."""
    counts = {code: codes.count(code) for code in codes}
    return ", ".join(code if count == 1 else f"{count} x {code}" for code, count in counts.items())


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
