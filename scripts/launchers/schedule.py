"""When a job is due: the five fields of cron, checked here, and the same for systemd.

The grammar is that of crontab(5) without what its implementations disagree on: `*`, `N`, `A-B`, lists of these, and
`*/STEP` or `A-B/STEP`; names of months and weekdays; `@daily` and its like.
"""

import calendar
import dataclasses
import itertools
from collections.abc import Sequence

from trainer.errors import ConfigError

_MONTHS = tuple(name.lower() for name in calendar.month_abbr[1:])
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_SUNDAY = 7  # besides 0
_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_LEAP_YEAR = 2024


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()


_MINUTE, _HOUR = _Field("minute", 0, 59), _Field("hour", 0, 23)
_DAY, _MONTH = _Field("day of the month", 1, 31), _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("day of the week", 0, _SUNDAY, _WEEKDAYS)
_FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Minutes of local time at which a job is due.

    text: the five fields.
    minutes, hours, days, months, weekdays: what they name, rising; Sunday is 0.
    every_day, every_weekday: whether the field begins with `*`. Where neither does, either of the two is enough.
    """

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    every_day: bool
    every_weekday: bool

    def on_calendar(self) -> list[str]:
        """The same as values of OnCalendar= of systemd.timer(5); due whenever any of them is."""
        months, days = _listed(self.months, _MONTH), _listed(self.days, _DAY)
        time = f"{_listed(self.hours, _HOUR)}:{_listed(self.minutes, _MINUTE)}:00"
        weekdays = ",".join(_WEEKDAYS[day].capitalize() for day in self.weekdays) + " "
        if len(self.weekdays) == len(_WEEKDAYS):
            weekdays = ""
        if self.every_day or self.every_weekday:
            return [f"{weekdays}*-{months}-{days} {time}"]
        return [f"*-{months}-{days} {time}", f"{weekdays}*-{months}-* {time}"]


def parse(text: str) -> Schedule:
    """The schedule that five fields, or a name such as @daily, mean.

    Raises:
        ConfigError: one error with all that is wrong with them.
    """
    wanted = "a schedule has five fields: minute, hour, day of the month, month, day of the week, such as '30 3 * * *'"
    if text.startswith("@") and text not in _MACROS:
        raise ConfigError(f"{wanted}; or it is one of {', '.join(_MACROS)}. Received: {text!r}")
    fields = (_MACROS[text] if text in _MACROS else text).split()
    if len(fields) != len(_FIELDS):
        raise ConfigError(f"{wanted}. Received {len(fields)}: {text!r}")
    problems: list[str] = []
    minutes, hours, days, months, weekdays = (
        _values(field, value, problems) for field, value in zip(_FIELDS, fields, strict=True)
    )
    every_day, every_weekday = (fields[_FIELDS.index(field)].startswith("*") for field in (_DAY, _WEEKDAY))
    if not problems and every_weekday:
        longest = max(calendar.monthrange(_LEAP_YEAR, month)[1] for month in months)
        if min(days) > longest:
            problems.append(f"day of the month {min(days)} is in none of these months, so it is never due")
    if problems:
        raise ConfigError("\n  ".join([f"the schedule {text!r} cannot be used:", *problems]))
    weekdays = tuple(sorted({day % _SUNDAY for day in weekdays}))
    return Schedule(" ".join(fields), minutes, hours, days, months, weekdays, every_day, every_weekday)


def _values(field: _Field, text: str, problems: list[str]) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        try:
            found.update(_part(field, part))
        except ValueError as error:
            problems.append(f"{field.name}: {error}. Received: {text!r}")
    return tuple(sorted(found))


def _part(field: _Field, text: str) -> range:
    """The numbers of `*`, `N`, `A-B`, `*/STEP` or `A-B/STEP`."""
    span, slash, step_text = text.partition("/")
    low, dash, high = span.partition("-")
    if span == "*":
        begin, end = field.first, field.last
    else:
        begin = _number(field, low)
        end = _number(field, high) if dash else begin
    if end < begin:
        raise ValueError(f"{span} runs backwards; write {low}-{field.last},{field.first}-{high}")
    if not slash:
        return range(begin, end + 1)
    if span != "*" and not dash:
        raise ValueError(f"a step needs a range; write {span}-{field.last}/{step_text}")
    if not _is_number(step_text) or not 1 <= int(step_text) <= field.last - field.first:
        raise ValueError(f"a step goes from 1 to {field.last - field.first}")
    return range(begin, end + 1, int(step_text))


def _number(field: _Field, text: str) -> int:
    if text.lower() in field.names:
        return field.names.index(text.lower()) + field.first
    if not _is_number(text) or not field.first <= int(text) <= field.last:
        names = f", or {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise ValueError(f"{text or 'nothing'} is not a number from {field.first} to {field.last}{names}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _listed(values: Sequence[int], field: _Field) -> str:
    """`*`, or numbers and runs of them as systemd writes them: `00,15..20`."""
    if len(values) == field.last - field.first + 1:
        return "*"
    runs = [list(run) for _, run in itertools.groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ",".join(f"{begin:02d}" if begin == end else f"{begin:02d}..{end:02d}" for begin, end in ends)
