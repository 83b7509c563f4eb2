"""The last hour of activity, counted from a journal of any size, in parts and step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest
from msgspec import structs

from aiodelay.core.values import JournalEntry
from aiodelay.operations.activity import MINUTES, ActivityMeter, drain_ms

pytestmark = pytest.mark.asyncio

HOUR, MINUTE = 3_600_000, 60_000
NOW = 500 * HOUR + 30_000


class Parts:
    """A journal of several parts; `kept` entries of each are kept."""

    def __init__(self, parts: Mapping[int, Sequence[JournalEntry]], kept: int = 1_000_000) -> None:
        self.parts, self.kept, self.asked = parts, kept, 0

    async def spans(self) -> Mapping[int, range]:
        return {part: range(max(1, len(found) + 1 - self.kept), len(found) + 1) for part, found in self.parts.items()}

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        self.asked += len(span)
        for start in range(span.start, span.stop, 100):
            yield [self.parts[part][number - 1] for number in range(start, min(start + 100, span.stop))]


def entries(*events: tuple[int, str]) -> list[JournalEntry]:
    """Make a journal of events so many minutes before the present one."""
    ordered = sorted(events, key=lambda each: -each[0])
    return [
        JournalEntry(number, NOW - ago * MINUTE, event, "id", 1, "lane", 0, 1)
        for number, (ago, event) in enumerate(ordered, 1)
    ]


async def test_every_minute_is_counted_by_what_happened() -> None:
    journal = entries((70, "delivered"), (3, "delivered"), (3, "again"), (3, "lapsed"), (1, "dead"), (0, "stored"))
    journal = [structs.replace(each, detail="ValueError") if each.event == "again" else each for each in journal]
    journal.append(JournalEntry(len(journal) + 1, NOW - 3 * MINUTE, "again", "put off", 1, "lane", 0, 1))
    meter = ActivityMeter()
    await meter.read(Parts({0: journal}), now_ms=NOW)
    found = meter.last_hour(NOW)
    assert len(found.minutes) == MINUTES
    assert found.since_ms is None
    assert (found.minutes[-4].delivered, found.minutes[-4].retried, found.minutes[-2].given_up) == (1, 2, 1)
    assert sum(each.delivered + each.retried + each.given_up for each in found.minutes) == 4


async def test_a_long_journal_is_read_backwards_until_an_hour_is_covered() -> None:
    journal = entries(*((minute, "delivered") for minute in range(120) for _ in range(50)))
    reader, meter = Parts({0: journal, 1: entries((59, "dead"))}), ActivityMeter()
    await meter.read(reader, now_ms=NOW, most=500)
    found = meter.last_hour(NOW)
    assert found.since_ms == NOW - 9 * MINUTE
    assert found.delivered_per_minute() == 50
    for _ in range(20):
        await meter.read(reader, now_ms=NOW, most=500)
    found = meter.last_hour(NOW)
    assert found.since_ms is None
    assert {each.delivered for each in found.minutes} == {50}
    assert found.minutes[0].given_up == 1
    assert reader.asked < 60 * 50 + 1_000, "it goes no further back than it must"


async def test_what_is_written_later_is_counted_once_and_a_gap_begins_anew() -> None:
    journal = entries((2, "delivered"))
    reader, meter = Parts({0: journal}), ActivityMeter()
    for n in range(1, 4):
        await meter.read(reader, now_ms=NOW, most=10)
        assert sum(each.delivered for each in meter.last_hour(NOW).minutes) == n
        journal.append(JournalEntry(n + 1, NOW, "delivered", "id", 1, "lane", 0, 1))
    journal += [JournalEntry(n, NOW, "delivered", "id", 1, "lane", 0, 1) for n in range(5, 55)]
    await meter.read(reader, now_ms=NOW, most=10)
    assert sum(each.delivered for each in meter.last_hour(NOW).minutes) == 10
    for _ in range(6):
        await meter.read(reader, now_ms=NOW, most=10)
    assert sum(each.delivered for each in meter.last_hour(NOW).minutes) == 54


async def test_a_trimmed_journal_says_how_far_it_reaches() -> None:
    journal = entries(*((minute, "delivered") for minute in range(30)))
    meter = ActivityMeter()
    await meter.read(Parts({0: journal}, kept=10), now_ms=NOW)
    assert meter.last_hour(NOW).since_ms == NOW - 9 * MINUTE
    meter = ActivityMeter()
    await meter.read(Parts({0: journal}, kept=3), now_ms=NOW)
    assert meter.last_hour(NOW).delivered_per_minute() is None


async def test_an_empty_journal_is_a_quiet_hour() -> None:
    meter = ActivityMeter()
    await meter.read(Parts({0: []}), now_ms=NOW)
    found = meter.last_hour(NOW)
    assert (found.since_ms, found.delivered_per_minute()) == (None, 0)


async def test_how_long_a_backlog_takes() -> None:
    assert drain_ms(0, 0, 0) == 0
    assert drain_ms(600, 400, 100) == 2 * MINUTE
    assert drain_ms(600, 100, 100) is None
