"""Deliveries, retries and messages given up in each minute of the last hour, counted from a store's journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from aiodelay.core.values import JournalEntry
from aiodelay.ports import JournalReader

__all__ = ["FIRST", "MINUTES", "MINUTE_MS", "Activity", "ActivityMeter", "Minute", "drain_ms"]

MINUTE_MS = 60_000
MINUTES = 60
PACE_MINUTES = 5
"""The number of whole minutes over which the delivery rate is measured."""
KINDS: Mapping[str, str] = {"delivered": "delivered", "again": "retried", "lapsed": "retried", "dead": "given_up"}
FIRST = 1
"""The number of the first entry of a journal. A journal that still has this entry was never trimmed."""


class Minute(Struct, frozen=True):
    """The attempts that ended within one minute.

    Attributes:
        from_ms: The start of the minute, epoch ms.
        delivered: The number of delivered messages.
        retried: The number of attempts that failed or lapsed and are repeated, and of deliveries that a sink did not
            take yet. A message that a handler put off by `Later`, or that a process gave back, is not counted.
        given_up: The number of messages that became dead letters.
    """

    from_ms: int
    delivered: int = 0
    retried: int = 0
    given_up: int = 0


class Activity(Struct, frozen=True):
    """The activity of the last hour.

    Attributes:
        minutes: The 60 minutes, oldest first. The last minute is not over yet.
        since_ms: All entries since this time are counted. Older entries are not read yet, or the journal does not have
            them any more. None = the whole hour is counted.
    """

    minutes: Sequence[Minute]
    since_ms: int | None

    def delivered_per_minute(self) -> float | None:
        """Return the delivery rate of the last five whole minutes; None if not all their entries are counted."""
        latest = self.minutes[-1 - PACE_MINUTES : -1]
        if self.since_ms is not None and self.since_ms > latest[0].from_ms:
            return None
        return sum(each.delivered for each in latest) / len(latest)


class ActivityMeter:
    """Counts the entries of a journal. Each read counts new entries, and older entries until an hour is covered."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str]] = {}
        self._read: dict[int, range] = {}  # by part of the journal: the numbers of the counted entries
        self._oldest_ms: dict[int, int] = {}  # by part: the time of the oldest counted entry
        self._begins: dict[int, int] = {}  # by part: the number of the oldest entry that the store still has

    async def read(self, reader: JournalReader, *, now_ms: int, most: int = 5_000) -> None:
        """Count the new entries of a journal, and some of the older entries that are not counted yet.

        Args:
            reader: The reader of the journal. Give every call a reader of the same store.
            now_ms: The time of the store.
            most: The most new entries, and the most older entries, to read of each part of the journal.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        spans = await reader.spans()
        if any(part in self._read and span.stop - self._read[part].stop > most for part, span in spans.items()):
            self._forget()  # too many new entries since the last read: start again with the newest entries
        for part, span in spans.items():
            self._begins[part] = span.start
            known = self._read.get(part, range(span.stop, span.stop))
            await self._count(reader, part, range(max(known.stop, span.stop - most), span.stop), now_ms)
            known = self._read.get(part, known)
            if self._oldest_ms.get(part, now_ms) > now_ms - MINUTES * MINUTE_MS:
                await self._count(reader, part, range(max(span.start, known.start - most), known.start), now_ms)
        oldest = self._minute(now_ms) - MINUTES
        self._counts = {minute: counts for minute, counts in self._counts.items() if minute > oldest}

    def _forget(self) -> None:
        for each in (self._counts, self._read, self._oldest_ms, self._begins):
            each.clear()

    async def _count(self, reader: JournalReader, part: int, span: range, now_ms: int) -> None:
        if span.start >= span.stop:
            return
        async for entries in reader.entries(part, span, lambda _: None):
            for entry in entries:
                self._note(entry)
            if entries:
                self._oldest_ms[part] = min(self._oldest_ms.get(part, now_ms), entries[0].at_ms)
        known = self._read.get(part, span)
        self._read[part] = range(min(known.start, span.start), max(known.stop, span.stop))

    def _note(self, entry: JournalEntry) -> None:
        if entry.event in KINDS and not entry.is_put_off:
            self._counts.setdefault(self._minute(entry.at_ms), Counter())[KINDS[entry.event]] += 1

    def last_hour(self, now_ms: int) -> Activity:
        """Return the activity of the last hour, as far as its entries have been counted."""
        last = self._minute(now_ms)
        minutes = [
            Minute(minute * MINUTE_MS, **self._counts.get(minute, Counter[str]()))
            for minute in range(last - MINUTES + 1, last + 1)
        ]
        short = [self._oldest_ms.get(part, now_ms) for part in self._read if not self._is_whole(part)]
        since_ms = max(short, default=0)
        return Activity(minutes, since_ms if since_ms > minutes[0].from_ms else None)

    def _is_whole(self, part: int) -> bool:
        """Return whether every entry is counted that this part of the journal has ever had."""
        return self._begins[part] <= FIRST and self._read[part].start <= FIRST

    @staticmethod
    def _minute(at_ms: int) -> int:
        return at_ms // MINUTE_MS


def drain_ms(overdue: int, delivered_per_minute: float, coming_per_minute: float) -> int | None:
    """Return the ms until no message is overdue, while further messages come due.

    None = at these rates, there will always be overdue messages.
    """
    if overdue == 0:
        return 0
    spare = delivered_per_minute - coming_per_minute
    return None if spare <= 0 else round(overdue / spare * MINUTE_MS)
