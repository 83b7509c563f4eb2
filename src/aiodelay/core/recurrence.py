"""Recurrence rules, and pure functions that compute due times from a rule and a time.

A rule is stored as wall time and zone (`encode_rule`), never as a list of instants. The process that schedules the next
occurrence computes its due time, with its own time zone data. docs/recurrence.md has a table of cases. Each row of the
table is a test.

cronsim parses and matches cron expressions, on wall time alone. This module converts wall times to instants, by the
rules of Debian's cron. cronsim's own conversion has two faults. It misses occurrences where clocks change by half an
hour. And inside an hour that occurs twice, it may return an instant before the given instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice
from typing import Literal, TypeAlias, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from aiodelay.errors import InputError, RecordFormatError, ScheduleTimeError, cut, shortened

from .durations import Duration, check_horizon, format_duration, from_epoch_ms, parse_duration, to_epoch_ms
from .spread import spread_ms_of

__all__ = [
    "MIN_INTERVAL_MS",
    "Cron",
    "Every",
    "Missed",
    "Overlap",
    "Rule",
    "decode_rule",
    "describe",
    "encode_rule",
    "first_due",
    "is_missed",
    "is_of_unknown_zone",
    "is_overlapped",
    "next_due",
    "placed",
    "upcoming",
]

Missed: TypeAlias = Literal["coalesce", "all", "skip"]
"""The rule for missed occurrences. An occurrence is missed if its successor is due before it runs.

`coalesce`: all missed occurrences together run once. `all`: each missed occurrence runs. `skip`: none of them runs.
"""

Overlap: TypeAlias = Literal["allow", "skip"]
"""The rule for an occurrence that is due while an earlier occurrence is still being retried.

`allow`: both run at the same time. `skip`: the later occurrence does not run.
"""

MIN_INTERVAL_MS = 100
"""Shortest interval of `Every`. For work that must run more often, write a loop of your own."""

_MAX_EXPRESSION = 255
_CRON_FIELDS = 5
_FIVE_FIELDS = 'five fields, minute hour day-of-month month day-of-week, e.g. "0 9 * * mon"'
_ZONES = 'a name of the IANA time zone database that this machine knows, e.g. "Europe/Paris"'
_MS = timedelta(milliseconds=1)
_SOME_DAY = datetime(2000, 1, 1, tzinfo=UTC)
_PRIVATE_ZONES = ("localtime", "posixrules", "posix/", "right/")  # their meaning depends on the machine


@dataclass(frozen=True, slots=True)
class Every:
    """A fixed interval of elapsed time. Clock changes do not affect it.

    Occurrences lie on a grid of whole intervals that begins at `start`. Without `start`, the grid begins at the first
    due time. A late run of an occurrence does not move the later occurrences.

    Attributes:
        interval: At least 100 ms; kept as the shortest text, so that `Every("60m") == Every("1h")`.
        start: An aware datetime, kept in UTC and rounded up to a whole millisecond. None = the first occurrence is due
            one interval after scheduling.
        missed: The rule for occurrences whose successor is due before they run (see `Missed`).
        overlap: Whether an occurrence runs while an earlier occurrence is still being retried (see `Overlap`).
        interval_ms: The interval in milliseconds.

    Raises:
        ScheduleTimeError: A value is not allowed. The error names it as `every.<name>`.
    """

    interval: Duration
    _: KW_ONLY
    start: datetime | None = None
    missed: Missed = "coalesce"
    overlap: Overlap = "allow"
    interval_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ms = parse_duration(self.interval, field="every.interval", least_ms=MIN_INTERVAL_MS)
        object.__setattr__(self, "interval_ms", ms)
        object.__setattr__(self, "interval", format_duration(ms))
        if self.start is not None:
            object.__setattr__(self, "start", _checked_start(self.start))
        _check_policies(self)


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, which matches wall times of a time zone.

    The syntax is that of Debian's cron: lists, ranges, steps and names. It also has `L` (last day), `LW` (last
    weekday), `5L` (last Friday) and `tue#2` (second Tuesday). If neither of the two day fields starts with `*`, a day
    must match at least one of them. Otherwise a day must match both.

    Clock changes affect the two kinds of expressions in different ways:

    - If neither the minute nor the hour starts with `*`, the expression names wall times. If the clock skips a named
      wall time, the occurrence runs right after the skip. If the wall time occurs twice, the occurrence runs once, the
      first time.
    - All other expressions follow the clock. If the clock skips a wall time, no occurrence runs. If the wall time
      occurs twice, the occurrence runs twice.

    Attributes:
        expression: Five fields, at most 255 characters; kept in upper case with single spaces.
        tz: A name of the IANA time zone database.
        missed: The rule for occurrences whose successor is due before they run (see `Missed`).
        overlap: Whether an occurrence runs while an earlier occurrence is still being retried (see `Overlap`).
        spread: A span after each match of the expression: each series runs at its own place in the span, which its id
            gives. Kept as the shortest text. None = each series runs at the match itself.
        spread_ms: The length of the span in milliseconds; 0 without a spread.
        moved_ms: By how much the occurrences come after the matches, in milliseconds. `schedule()` sets it.

    Raises:
        ScheduleTimeError: A value is not allowed. The error names it as `every.<name>`.
    """

    expression: str
    _: KW_ONLY
    tz: str = "UTC"
    missed: Missed = "coalesce"
    overlap: Overlap = "allow"
    spread: Duration | None = None
    spread_ms: int = field(init=False, default=0, repr=False, compare=False)
    moved_ms: int = field(init=False, default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "expression", _checked_expression(self.expression))
        if self.spread is not None:
            ms = parse_duration(self.spread, field="every.spread", least_ms=1)
            object.__setattr__(self, "spread_ms", ms)
            object.__setattr__(self, "spread", format_duration(ms))
        try:
            _zone(self.tz)
        except (KeyError, ValueError, OSError):  # zoneinfo raises each of these for some wrong names
            raise ScheduleTimeError("every.tz", shortened(self.tz), _ZONES) from None
        _check_policies(self)


Rule: TypeAlias = Every | Cron


def _check_policies(rule: Rule) -> None:
    for name, value, words in (
        ("every.missed", rule.missed, get_args(Missed)),
        ("every.overlap", rule.overlap, get_args(Overlap)),
    ):
        if value not in words:
            raise ScheduleTimeError(name, shortened(value), ", ".join(repr(word) for word in words))


def _checked_start(start: datetime) -> datetime:
    try:
        return from_epoch_ms(to_epoch_ms(start, field="every.start"))
    except OverflowError:
        raise ScheduleTimeError("every.start", start.isoformat(), "the years 1 to 9999 in UTC") from None


def _checked_expression(expression: object) -> str:
    """Return the expression in its normal spelling. Refuse an expression that never matches."""
    if not isinstance(expression, str) or len(expression) > _MAX_EXPRESSION:
        raise ScheduleTimeError("every.expression", shortened(expression), f"text of {_FIVE_FIELDS}")
    fields = expression.upper().split()
    if len(fields) != _CRON_FIELDS:
        allowed = f"{_FIVE_FIELDS}; for a rule in seconds, use Every"
        raise ScheduleTimeError("every.expression", shortened(expression), allowed)
    try:
        # Days and weekdays repeat within 50 years, so an expression without a match by then never matches.
        next(CronSim(" ".join(fields), _SOME_DAY))
    except CronSimError as error:
        raise ScheduleTimeError("every.expression", shortened(expression), f"{_FIVE_FIELDS} ({error})") from error
    except StopIteration:
        allowed = "an expression that matches some day of the calendar"
        raise ScheduleTimeError("every.expression", shortened(expression), allowed) from None
    return " ".join(fields)


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC  # needs no time zone data
    if not isinstance(name, str) or name.startswith(_PRIVATE_ZONES):
        raise ValueError(name)
    return ZoneInfo(name)


# --- due times ------------------------------------------------------------------------------------


def placed(rule: Rule, series_id: str) -> Rule:
    """Return the rule of one series: with a spread, its occurrences have the place in the span that the id gives."""
    return _moved(rule, spread_ms_of(series_id, rule.spread_ms)) if isinstance(rule, Cron) and rule.spread_ms else rule


def _moved(rule: Cron, moved_ms: int) -> Cron:
    moved = copy(rule)
    object.__setattr__(moved, "moved_ms", moved_ms)
    return moved


def first_due(rule: Rule, now_ms: int) -> int:
    """Return the first due time of a series that is scheduled now.

    Args:
        rule: The series' rule.
        now_ms: The store's time, in epoch milliseconds.

    Returns:
        For `Every` without `start`: one interval from now. For `Every` with `start`: the first point of the grid that
        is neither before now nor before `start`. For `Cron`: the first match after now.

    Raises:
        ScheduleTimeError: The rule has no occurrence within `MAX_HORIZON_MS` (3650 days).
    """
    has_start = isinstance(rule, Every) and rule.start is not None
    due_ms = _following(rule, now_ms, now_ms - 1 if has_start else now_ms)
    if due_ms is None:
        raise ScheduleTimeError("every", cut(repr(rule)), "a rule with an occurrence before the year 10000")
    check_horizon(due_ms, now_ms, "every")
    return due_ms


def next_due(rule: Rule, due_ms: int, now_ms: int) -> int | None:
    """Return the due time after the occurrence that was due at `due_ms`.

    The result is always later than `due_ms`, even if the clock was set back, so that no occurrence comes twice. It is
    also later than `now_ms`, except with `missed="all"`.

    Args:
        rule: The series' rule.
        due_ms: The due time of the occurrence that ends.
        now_ms: The store's time at which the occurrence began, not at which it ended: an occurrence that came due
            meanwhile must be claimed. Epoch milliseconds, like all times here.

    Returns:
        The next due time; None if the rule has no occurrence up to the end of the year 9999.
    """
    return _following(rule, due_ms, due_ms if rule.missed == "all" else max(due_ms, now_ms))


def is_missed(rule: Rule, due_ms: int, now_ms: int) -> bool:
    """Return whether `missed="skip"` forbids the occurrence due at `due_ms`, because its successor is due too."""
    if rule.missed != "skip":
        return False
    successor_ms = _following(rule, due_ms, due_ms)
    return successor_ms is not None and successor_ms <= now_ms


def is_overlapped(rule: Rule, live: Sequence[int]) -> bool:
    """Return whether `overlap="skip"` forbids an occurrence, because an earlier occurrence is still being retried.

    Args:
        rule: The series' rule.
        live: The due times of earlier occurrences that are still being retried.
    """
    return rule.overlap == "skip" and len(live) > 0


def upcoming(rule: Rule, now_ms: int, n: int) -> list[int]:
    """Return the first `n` due times of a series scheduled now, ascending; fewer if the series ends with the year 9999.

    Raises:
        ScheduleTimeError: The rule has no occurrence within `MAX_HORIZON_MS` (3650 days).
    """
    return list(islice(_series(rule, now_ms), n))


def _series(rule: Rule, now_ms: int) -> Iterator[int]:
    due_ms: int | None = first_due(rule, now_ms)
    while due_ms is not None:
        yield due_ms
        due_ms = _following(rule, due_ms, due_ms)


def _following(rule: Rule, grid_ms: int, after_ms: int) -> int | None:
    """Return the rule's first due time after `after_ms`; None if there is none.

    Args:
        rule: The series' rule.
        grid_ms: For an `Every` without `start`: any due time of the series. All other due times are whole intervals
            away from it.
        after_ms: The result is later than this time.
    """
    if isinstance(rule, Cron):
        match_ms = _match_after(rule, after_ms - rule.moved_ms)
        return None if match_ms is None else match_ms + rule.moved_ms
    if rule.start is not None:
        grid_ms = to_epoch_ms(rule.start, field="every.start")
    return grid_ms + max(0, (after_ms - grid_ms) // rule.interval_ms + 1) * rule.interval_ms


def _match_after(rule: Cron, after_ms: int) -> int | None:
    zone, instants = _zone(rule.tz), _instants_named if _names_wall_times(rule) else _instants_followed
    try:
        after = from_epoch_ms(after_ms).astimezone(zone)
        wall = after.replace(tzinfo=None)
        # In an hour that occurs twice, earlier wall times will come again. Begin earlier by the clock change.
        matches = CronSim(rule.expression, wall - (_offset(after, fold=0) - _offset(after, fold=1)))
        found: list[int] = []
        while True:
            match = next(matches)
            found += [ms for ms in instants(match, zone) if ms > after_ms]
            if found and match > wall:
                return min(found)
    except (StopIteration, OverflowError):  # datetime's calendar ends with the year 9999
        return None


def _offset(at: datetime, *, fold: int) -> timedelta:
    return at.replace(fold=fold).utcoffset() or timedelta()


def _names_wall_times(rule: Cron) -> bool:
    """Return whether neither minute nor hour starts with `*`. If so, clock changes lose no run, as in Debian's cron."""
    return not any(part.startswith("*") for part in rule.expression.split()[:2])


def _readings(wall: datetime, zone: tzinfo) -> tuple[int, int]:
    """Return the two instants of a wall time: by the zone's offset before a nearby clock change, and after it.

    If the instants are equal, no change is near. If they ascend, the wall time occurs twice. If they descend, the wall
    time does not occur (PEP 495).
    """
    before, after = (to_epoch_ms(wall.replace(tzinfo=zone, fold=fold), field="every") for fold in (0, 1))
    return before, after


def _instants_named(wall: datetime, zone: tzinfo) -> list[int]:
    """Return the one instant of a wall time: its first occurrence, or the clock change that skips it."""
    before, after = _readings(wall, zone)
    return [before if before <= after else _jump_ms(zone, after, before)]


def _instants_followed(wall: datetime, zone: tzinfo) -> list[int]:
    """Return every instant at which the clock shows the wall time."""
    before, after = _readings(wall, zone)
    return [] if before > after else sorted({before, after})


def _jump_ms(zone: tzinfo, low_ms: int, high_ms: int) -> int:
    """Return the first instant after the zone's one clock change in `(low_ms, high_ms]`."""
    new = from_epoch_ms(high_ms).astimezone(zone).utcoffset()
    while high_ms - low_ms > 1:
        middle_ms = (low_ms + high_ms) // 2
        if from_epoch_ms(middle_ms).astimezone(zone).utcoffset() == new:
            high_ms = middle_ms
        else:
            low_ms = middle_ms
    return high_ms


# --- stored form and description ------------------------------------------------------------------


def encode_rule(rule: Rule) -> dict[str, str | int]:
    """Return the rule in the form that a record stores. Two rules are equal if and only if their forms are equal.

    Keys of `Every`: `e` is the interval in ms, `s` is the start in epoch ms (absent if there is none). Keys of `Cron`:
    `c` is the cron expression, `z` is the zone, `w` is the spread in ms and `d` is by how many ms the occurrences move
    (both absent without a spread). Keys of both: `m` is `missed` (absent for `coalesce`), `o` is `overlap` (absent for
    `allow`).
    """
    encoded: dict[str, str | int]
    if isinstance(rule, Cron):
        encoded = {"c": rule.expression, "z": rule.tz}
        if rule.spread_ms:
            encoded |= {"w": rule.spread_ms, "d": rule.moved_ms}
    else:
        encoded = {"e": rule.interval_ms}
        if rule.start is not None:
            encoded["s"] = to_epoch_ms(rule.start, field="every.start")
    if rule.missed != "coalesce":
        encoded["m"] = rule.missed
    if rule.overlap != "allow":
        encoded["o"] = rule.overlap
    return encoded


def decode_rule(encoded: object) -> Rule:
    """Return the rule that `encode_rule` wrote. Unknown keys are ignored.

    Raises:
        RecordFormatError: The value is not a rule, or this machine does not know the rule's time zone.
    """
    try:
        return _decoded(encoded)
    except (InputError, TypeError, KeyError, OverflowError) as error:
        raise RecordFormatError(f"its recurrence rule {shortened(encoded)} is not valid: {error}") from error


def is_of_unknown_zone(encoded: object) -> bool:
    """Return whether an encoded rule is valid, except that this machine does not know its time zone."""
    if not isinstance(encoded, Mapping) or not isinstance(encoded.get("z"), str):
        return False
    return _is_readable({**encoded, "z": "UTC"}) and not _is_readable(encoded)


def _is_readable(encoded: object) -> bool:
    try:
        decode_rule(encoded)
    except RecordFormatError:
        return False
    return True


def _decoded(encoded: object) -> Rule:
    if not isinstance(encoded, Mapping) or ("e" in encoded) == ("c" in encoded):
        raise TypeError("it must be a map with either e or c")
    missed, overlap = encoded.get("m", "coalesce"), encoded.get("o", "allow")
    if "c" in encoded:
        spread = _whole(encoded["w"]) * _MS if "w" in encoded else None
        rule = Cron(encoded["c"], tz=encoded["z"], missed=missed, overlap=overlap, spread=spread)
        return _moved(rule, _whole(encoded.get("d", 0)))
    start = from_epoch_ms(_whole(encoded["s"])) if "s" in encoded else None
    return Every(_whole(encoded["e"]) * _MS, start=start, missed=missed, overlap=overlap)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError("e, s, w and d must be whole numbers")
    return value


def describe(rule: Rule) -> str:
    """Return the rule in English, e.g. `At 09:00 on Monday (Europe/Paris)`."""
    if isinstance(rule, Cron):
        text = f"{CronSim(rule.expression, _SOME_DAY).explain()} ({rule.tz})"
        if rule.spread is not None:
            text += f", spread over {rule.spread}"
    else:
        start = f", counted from {rule.start.isoformat()}" if rule.start is not None else ""
        text = f"Every {rule.interval}{start}"
    missed = {"coalesce": "", "all": "; runs each missed occurrence", "skip": "; skips missed occurrences"}[rule.missed]
    overlap = "; skipped while an earlier occurrence is being retried" if rule.overlap == "skip" else ""
    return text + missed + overlap
