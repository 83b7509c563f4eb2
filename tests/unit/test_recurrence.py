"""Every row in the tables of docs/recurrence.md, and properties checked against a clock read minute by minute."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.core.durations import MAX_HORIZON_MS, from_epoch_ms, parse_duration, to_epoch_ms
from aiodelay.errors import RecordFormatError, ScheduleTimeError
from aiodelay.recurrence import (
    MIN_INTERVAL_MS,
    Cron,
    Every,
    Missed,
    Overlap,
    Rule,
    decode_rule,
    describe,
    encode_rule,
    first_due,
    is_missed,
    is_overlapped,
    next_due,
    upcoming,
)

PAGE = Path(__file__).parents[2] / "docs" / "recurrence.md"
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
LAST_MS = to_epoch_ms(datetime(9999, 12, 31, 23, 59, tzinfo=UTC), field="last")


def ms(text: str) -> int:
    return to_epoch_ms(datetime.fromisoformat(text), field="test")


# --- the page -------------------------------------------------------------------------------------


def rows(*header: str) -> list[Any]:
    """All rows of the page's tables that have this header."""
    found, inside = [], False
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | ")) if line.startswith("| ") else ()
        if inside and cells and cells[0] != "---":
            found.append(pytest.param(*cells[1:], id=f"line {number}: {cells[0]}"))
        inside = cells == header or (inside and bool(cells))
    return found


def rule_of(cell: str) -> Rule:
    names = {"Cron": Cron, "Every": Every, "datetime": datetime, "UTC": UTC}
    return cast(Rule, eval(cell.strip("`"), {"__builtins__": {}}, names))


OCCURRENCES = rows("case", "rule", "zone", "now", "next occurrences, local = UTC")
MISSED = rows("case", "rule", "due", "claimed at", "this one", "next due")
OVERLAPS = rows("case", "rule", "earlier ones being retried", "this one")


def test_all_tables_of_the_page_are_read() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    tables = sum(line.startswith("| ---") for line in lines)
    assert len(OCCURRENCES) + len(MISSED) + len(OVERLAPS) == sum(line.startswith("|") for line in lines) - 2 * tables
    assert (len(OCCURRENCES) >= 60, len(MISSED) >= 20, len(OVERLAPS) >= 5) == (True, True, True)


@pytest.mark.parametrize(("rule_cell", "zone", "now", "expected"), OCCURRENCES)
def test_next_occurrences(rule_cell: str, zone: str, now: str, expected: str) -> None:
    rule = rule_of(rule_cell)
    if isinstance(rule, Cron):
        rule = replace(rule, tz=zone)
    lines = expected.split("<br>")
    found = [from_epoch_ms(due) for due in upcoming(rule, ms(now), len(lines))]
    local = [due.astimezone(ZoneInfo(zone)).isoformat(" ", "minutes") for due in found]
    assert [f"{wall} = {due:%Y-%m-%d %H:%M}Z" for wall, due in zip(local, found, strict=True)] == lines


@pytest.mark.parametrize(("rule_cell", "due", "claimed_at", "this_one", "following"), MISSED)
def test_missed(rule_cell: str, due: str, claimed_at: str, this_one: str, following: str) -> None:
    rule = rule_of(rule_cell)
    assert is_missed(rule, ms(due), ms(claimed_at)) == {"runs": False, "is skipped": True}[this_one]
    assert next_due(rule, ms(due), ms(claimed_at)) == ms(following)


@pytest.mark.parametrize(("rule_cell", "earlier", "this_one"), OVERLAPS)
def test_overlaps(rule_cell: str, earlier: str, this_one: str) -> None:
    live = [] if earlier == "none" else [ms(due) for due in earlier.split(", ")]
    assert is_overlapped(rule_of(rule_cell), live) == {"runs": False, "is skipped": True}[this_one]


# --- against a clock read minute by minute --------------------------------------------------------

CHANGES = {
    "Europe/Paris": ["2025-03-30", "2025-10-26"],
    "America/New_York": ["2025-03-09", "2025-11-02"],
    "Australia/Lord_Howe": ["2025-04-06", "2025-10-05"],
    "America/Santiago": ["2025-04-06", "2025-09-07"],
    "Africa/Cairo": ["2024-04-26", "2024-11-01"],
    "Pacific/Apia": ["2011-12-31"],
    "America/St_Johns": ["2006-04-02", "2006-10-29"],  # at 00:01
    "Asia/Kolkata": ["2025-03-30"],
    "UTC": ["2025-03-30"],
}
Wall = tuple[int, int, int]  # day's ordinal, hour, minute


@cache
def clock(zone: str, day: str) -> list[tuple[int, Wall]]:
    """Every minute of eight days around the change, and what the zone's clock shows."""
    start_ms, info = ms(f"{day} 00:00Z") - 4 * DAY, ZoneInfo(zone)
    times = [start_ms + i * MINUTE for i in range(8 * 1440)]
    walls = [from_epoch_ms(time).astimezone(info) for time in times]
    return [(time, (wall.toordinal(), wall.hour, wall.minute)) for time, wall in zip(times, walls, strict=True)]


def followed(shown: list[tuple[int, Wall]], hours: set[int], minutes: set[int]) -> list[int]:
    return [time for time, (_, hour, minute) in shown if hour in hours and minute in minutes]


def named(shown: list[tuple[int, Wall]], hours: set[int], minutes: set[int]) -> list[int]:
    """The first instant at which each wall time has been reached."""
    days = range(shown[0][1][0] + 1, shown[-1][1][0])
    due = sorted((day, hour, minute) for day in days for hour in hours for minute in minutes)
    found, reached = set[int](), iter(shown)
    time, wall = next(reached)
    for wanted in due:
        while wall < wanted:
            time, wall = next(reached)
        found.add(time)
    return sorted(found)


@st.composite
def cron_cases(
    draw: st.DrawFn, zones: Collection[str] = CHANGES.keys()
) -> tuple[str, str, str, set[int], set[int], int]:
    zone = draw(st.sampled_from(sorted(zones)))
    day = draw(st.sampled_from(CHANGES[zone]))
    hours = draw(st.sets(st.sampled_from([*range(6), 9, 22, 23]), min_size=1, max_size=6))
    minutes = draw(st.sets(st.sampled_from([0, 1, 15, 29, 30, 31, 45, 59]), min_size=1, max_size=5))
    shape = draw(st.sampled_from(["{m} {h} * * *", "{m} * * * *", "* {h} * * *", "*/7 {h} * * *", "{m} */2 * * *"]))
    if " * * * *" in shape or "*/2" in shape:
        hours = set(range(0, 24, 2 if "*/2" in shape else 1))
    if shape.startswith("*"):
        minutes = set(range(0, 60, 7 if "/7" in shape else 1))
    expression = shape.format(m=",".join(map(str, sorted(minutes))), h=",".join(map(str, sorted(hours))))
    return expression, zone, day, hours, minutes, draw(st.integers(-36 * 60, 36 * 60)) * MINUTE


@given(cron_cases(), st.integers(0, MINUTE - 1))
def test_cron_is_what_a_clock_on_the_wall_shows(
    case: tuple[str, str, str, set[int], set[int], int], within_ms: int
) -> None:
    expression, zone, day, hours, minutes, shift_ms = case
    oracle = followed if "*" in expression.removesuffix(" * * *") else named
    now_ms = ms(f"{day} 00:00Z") + shift_ms + within_ms
    expected = [due for due in oracle(clock(zone, day), hours, minutes) if due > now_ms][:10]
    assert upcoming(Cron(expression, tz=zone), now_ms, len(expected)) == expected


def test_cronsim_by_itself_would_lose_occurrences() -> None:
    """Why the step from wall time to instants is ours; once this fails, look whether it still needs to be."""
    after = datetime(2025, 10, 4, 14, tzinfo=UTC).astimezone(ZoneInfo("Australia/Lord_Howe"))
    assert next(CronSim("*/15 3 * * *", after)).minute == 30
    inside = datetime(2025, 10, 26, 1, 10, tzinfo=UTC).astimezone(ZoneInfo("Europe/Paris"))
    assert next(CronSim("30 2 * * *", inside)).astimezone(UTC) < inside


@given(cron_cases(["Europe/Paris", "America/New_York", "Asia/Kolkata"]))
def test_elsewhere_cronsim_agrees(case: tuple[str, str, str, set[int], set[int], int]) -> None:
    expression, zone, day, *_, shift_ms = case
    now = from_epoch_ms(ms(f"{day} 00:00Z") - abs(shift_ms) - 6 * HOUR).astimezone(ZoneInfo(zone))
    simulated = CronSim(expression, now)
    peers = sorted({to_epoch_ms(next(simulated), field="due") for _ in range(10)})
    assert upcoming(Cron(expression, tz=zone), to_epoch_ms(now, field="now"), len(peers)) == peers


# --- properties -----------------------------------------------------------------------------------

missed_words: st.SearchStrategy[Missed] = st.sampled_from(["coalesce", "all", "skip"])
overlap_words: st.SearchStrategy[Overlap] = st.sampled_from(["allow", "skip"])
instants = st.integers(0, 4_000_000_000_000)
starts = st.none() | st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
everies = st.builds(
    Every,
    st.integers(MIN_INTERVAL_MS, MAX_HORIZON_MS).map(lambda n: timedelta(milliseconds=n)),
    start=starts,
    missed=missed_words,
    overlap=overlap_words,
)
expressions = st.sampled_from(
    [
        "* * * * *",
        "*/7 * * * *",
        "0 * * * *",
        "30 2 * * *",
        "0 9 * * mon",
        "0 0 29 2 *",
        "15 1-3 L * *",
        "0 0 1 1 sun#1",
    ]
)
crons = st.builds(Cron, expressions, tz=st.sampled_from(sorted(CHANGES)), missed=missed_words, overlap=overlap_words)
rules = everies | crons


@given(rules, instants, instants)
def test_the_next_is_later_than_the_last_whatever_the_clock_does(rule: Rule, due_ms: int, now_ms: int) -> None:
    following = next_due(rule, due_ms, now_ms)
    assert following is not None
    assert following > due_ms
    assert following > now_ms or rule.missed == "all"


@given(rules, instants, st.integers(0, 30 * DAY))
def test_coalescing_leaves_out_nothing_ahead(rule: Rule, due_ms: int, late_ms: int) -> None:
    each, together = replace(rule, missed="all"), replace(rule, missed="coalesce")
    step: int | None = due_ms
    for _ in range(50):
        assert step is not None
        if step > due_ms + late_ms:
            break
        step = next_due(each, step, due_ms + late_ms)
    else:
        return  # too many to count here
    assert next_due(together, due_ms, due_ms + late_ms) == (step if late_ms else next_due(each, due_ms, 0))


@given(rules, instants, instants)
def test_a_missed_one_has_a_successor_that_is_due(rule: Rule, due_ms: int, now_ms: int) -> None:
    successor = next_due(replace(rule, missed="all"), due_ms, now_ms)
    assert successor is not None
    assert is_missed(rule, due_ms, now_ms) == (rule.missed == "skip" and successor <= now_ms)


@given(everies, instants, instants)
def test_every_keeps_its_grid(rule: Every, due_ms: int, now_ms: int) -> None:
    following = next_due(rule, due_ms, now_ms)
    assert following is not None
    if rule.start is None:
        assert (following - due_ms) % rule.interval_ms == 0
        assert following - max(due_ms, now_ms if rule.missed != "all" else due_ms) <= rule.interval_ms
    else:
        assert (following - to_epoch_ms(rule.start, field="start")) % rule.interval_ms == 0
        assert from_epoch_ms(following) >= rule.start


@given(everies, instants)
def test_the_first_is_never_early(rule: Every, now_ms: int) -> None:
    try:
        due_ms = first_due(rule, now_ms)
    except ScheduleTimeError:
        assert rule.start is not None or rule.interval_ms > MAX_HORIZON_MS
        return
    if rule.start is None:
        assert due_ms == now_ms + rule.interval_ms
    else:
        start_ms = to_epoch_ms(rule.start, field="start")
        assert due_ms >= max(now_ms, start_ms)
        assert due_ms == start_ms or due_ms - now_ms < rule.interval_ms


@given(rules, rules)
def test_encoded_rules_are_equal_when_rules_are(one: Rule, other: Rule) -> None:
    assert (encode_rule(one) == encode_rule(other)) == (one == other)
    assert decode_rule(json.loads(json.dumps(encode_rule(one)))) == one


# --- Every and Cron as values ---------------------------------------------------------------------


def test_one_spelling_of_each_rule() -> None:
    assert Every("60m") == Every("1h") == Every(timedelta(hours=1))
    assert Every("60m").interval == "1h"
    assert Every("1h").interval_ms == HOUR
    assert Cron(" 0  9 * * mon ") == Cron("0 9 * * MON")
    assert Cron("0 9 * * mon").expression == "0 9 * * MON"
    assert hash(Every("60m")) == hash(Every("1h"))


def test_a_start_is_kept_in_utc_and_rounded_up() -> None:
    start = datetime(2025, 1, 1, 1, microsecond=1, tzinfo=ZoneInfo("Europe/Paris"))
    rule = Every("1h", start=start)
    assert rule.start == datetime(2025, 1, 1, microsecond=1000, tzinfo=UTC)
    assert first_due(rule, 0 + ms("2024-12-31 00:00Z")) == ms("2025-01-01 00:00:00.001Z")


def test_replacing_a_part_keeps_the_rest() -> None:
    assert replace(Every("60m", overlap="skip"), missed="all") == Every("1h", missed="all", overlap="skip")


@pytest.mark.parametrize(
    ("rule", "encoded"),
    [
        (Every("10m"), {"e": 600_000}),
        (
            Every("10m", start=datetime(1970, 1, 2, tzinfo=UTC), missed="all", overlap="skip"),
            {"e": 600_000, "s": DAY, "m": "all", "o": "skip"},
        ),
        (Cron("0 9 * * mon"), {"c": "0 9 * * MON", "z": "UTC"}),
        (Cron("* * * * *", tz="Europe/Paris", missed="skip"), {"c": "* * * * *", "z": "Europe/Paris", "m": "skip"}),
    ],
)
def test_encoding_is_a_format_and_does_not_change(rule: Rule, encoded: dict[str, str | int]) -> None:
    assert encode_rule(rule) == encoded
    assert decode_rule(encoded) == rule
    assert decode_rule({**encoded, "future": [1]}) == rule


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        "e",
        {},
        {"x": 1},
        {"e": 600_000, "c": "* * * * *", "z": "UTC"},
        {"e": 1},
        {"e": -600_000},
        {"e": True},
        {"e": 600_000.5},
        {"e": "10m"},
        {"e": None},
        {"e": 10**30},
        {"e": 600_000, "s": "now"},
        {"e": 600_000, "s": 10**30},
        {"e": 600_000, "m": "some"},
        {"e": 600_000, "m": None},
        {"e": 600_000, "o": 1},
        {"c": "* * * * *"},
        {"c": "* * * *", "z": "UTC"},
        {"c": 5, "z": "UTC"},
        {"c": "* * * * *", "z": 5},
        {"c": "* * * * *", "z": "Mars/Olympus"},
    ],
)
def test_junk_is_refused(junk: object) -> None:
    with pytest.raises(RecordFormatError, match=r"stored record cannot be read: its recurrence rule .* is not valid: "):
        decode_rule(junk)


def test_a_zone_that_this_machine_lacks_is_named() -> None:
    with pytest.raises(RecordFormatError, match=r"Mars/Olympus.*time zone database that this machine knows"):
        decode_rule({"c": "0 9 * * *", "z": "Mars/Olympus"})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Cron("0 9 * * mon", tz="Europe/Paris"), "At 09:00 on Monday (Europe/Paris)"),
        (Cron("* * * * *", missed="all"), "Every minute (UTC); runs each missed occurrence"),
        (Every("90m"), "Every 1h30m"),
        (Every("1h", missed="skip"), "Every 1h; skips missed occurrences"),
        (
            Every("1d", start=datetime(2025, 1, 1, tzinfo=UTC), overlap="skip"),
            "Every 1d, counted from 2025-01-01T00:00:00+00:00; skipped while an earlier occurrence is being retried",
        ),
    ],
)
def test_describe(rule: Rule, text: str) -> None:
    assert describe(rule) == text


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "allowed: five fields"),
        ("* * * *", "allowed: five fields, minute hour day-of-month month day-of-week"),
        ("* * * * * *", "for a rule in seconds, use Every"),
        ("@daily", "allowed: five fields"),
        ("60 * * * *", "(Bad minute)"),
        ("* 24 * * *", "(Bad hour)"),
        ("* * 0 * *", "(Bad day-of-month)"),
        ("* * * 13 *", "(Bad month)"),
        ("* * * * 8", "(Bad day-of-week)"),
        ("* * * * mon#6", "(Bad day-of-week)"),
        ("0 0 30 2 *", "(Bad day-of-month)"),
        ("0 0 */31 * mon#5", "allowed: an expression that matches some day of the calendar"),
        ("0 0 1--100000000 * *", "(Bad day-of-month)"),
        (f"{'0,' * 200}0 * * * *", "allowed: text of five fields"),
        (None, "every.expression is None; allowed: text of five fields"),
        (5, "every.expression is 5; allowed: text of five fields"),
        (b"* * * * *", "allowed: text of five fields"),
    ],
)
def test_bad_expressions(expression: object, message: str) -> None:
    with pytest.raises(ScheduleTimeError) as caught:
        Cron(expression)  # type: ignore[arg-type]
    assert str(caught.value).startswith("every.expression is ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "zone",
    [
        *["", "Mars/Olympus", "europe/pariss", "Europe", "../etc/passwd", "/etc/localtime", "a\0b", "é", "x" * 300],
        *["\ud800", "localtime", "posixrules", "right/UTC", "posix/UTC", None, 5, UTC],
    ],
)
def test_bad_zones(zone: object) -> None:
    with pytest.raises(ScheduleTimeError, match=r"^every\.tz is .*; allowed: a name of the IANA time zone database"):
        Cron("* * * * *", tz=zone)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["10x", "99ms", "0s", "3651d", 10, None, timedelta(-1)])
def test_bad_intervals(value: object) -> None:
    with pytest.raises(ScheduleTimeError, match=r"^every\.interval is .*; allowed: "):
        Every(value)  # type: ignore[arg-type]


def test_the_shortest_interval() -> None:
    assert Every("100ms").interval_ms == parse_duration("100ms", field="interval") == MIN_INTERVAL_MS


@pytest.mark.parametrize(
    "start",
    [
        "2025-01-01",
        0,
        datetime(2025, 1, 1),  # noqa: DTZ001 - what is refused
        datetime.min.replace(tzinfo=ZoneInfo("Asia/Tokyo")),
        datetime.max.replace(tzinfo=UTC),
    ],
)
def test_bad_starts(start: object) -> None:
    with pytest.raises(ScheduleTimeError, match=r"^every\.start is "):
        Every("1h", start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "text"), [(Every, "1h"), (Cron, "* * * * *")])
def test_bad_policies(kind: Callable[..., Rule], text: str) -> None:
    with pytest.raises(ScheduleTimeError, match=r"^every\.missed is 'later'; allowed: 'coalesce', 'all', 'skip'$"):
        kind(text, missed="later")
    with pytest.raises(ScheduleTimeError, match=r"^every\.overlap is None; allowed: 'allow', 'skip'$"):
        kind(text, overlap=None)


def test_a_start_beyond_the_horizon_is_refused_when_scheduled() -> None:
    rule = Every("1h", start=datetime(2100, 1, 1, tzinfo=UTC))
    with pytest.raises(ScheduleTimeError, match=r"^every is .* ahead; allowed: at most 3650d ahead$"):
        first_due(rule, ms("2025-01-01 00:00Z"))


@pytest.mark.parametrize("expression", ["* * * * *", "0 0 29 2 *", "0 9 * * mon", "0 0 1 1 *"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_the_calendar_ends_with_the_year_9999(expression: str, zone: str) -> None:
    rule = Cron(expression, tz=zone, missed="skip")
    late_ms = LAST_MS + 14 * HOUR
    assert next_due(rule, late_ms, late_ms) is None
    assert not is_missed(rule, late_ms, late_ms)
    assert len(upcoming(Cron("0 * * * *", tz=zone), LAST_MS - DAY, 100)) < 50
    with pytest.raises(ScheduleTimeError, match=r"^every is Cron.*before the year 10000$"):
        first_due(rule, late_ms)


words = st.sampled_from(
    [*"0123456789*/,-#L", "LW", "mon", "5L", "mon#2", "jan", "*/2", "1-5", "59", "31", "٣", "²", " "]
)
fields = st.lists(words, min_size=1, max_size=4).map("".join)


@given(st.text(max_size=300) | st.lists(fields, min_size=5, max_size=5).map(" ".join))
def test_any_text_is_a_cron_or_refused(text: str) -> None:
    try:
        rule = Cron(text)
    except ScheduleTimeError:
        return
    assert describe(rule)
    assert decode_rule(encode_rule(rule)) == rule
    due_ms = next_due(rule, 0, 0)
    assert due_ms is not None
    assert due_ms > 0


junk_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)


@given(st.dictionaries(st.sampled_from(["e", "s", "c", "z", "m", "o", "x"]), junk_values))
def test_any_map_is_a_rule_or_refused(encoded: dict[str, Any]) -> None:
    with suppress(RecordFormatError):
        assert isinstance(decode_rule(encoded), Every | Cron)


def steps(rule: Rule, now_ms: int) -> Iterator[int]:
    due_ms: int | None = first_due(rule, now_ms)
    while due_ms is not None:
        yield due_ms
        due_ms = next_due(rule, due_ms, due_ms)


@given(rules.filter(lambda rule: isinstance(rule, Cron) or rule.start is None), instants)
def test_upcoming_is_what_a_punctual_worker_sees(rule: Rule, now_ms: int) -> None:
    series = steps(rule, now_ms)
    dues = upcoming(rule, now_ms, 5)
    assert dues == [next(series) for _ in range(5)]
    assert dues == sorted(set(dues))
    assert dues[0] > now_ms
