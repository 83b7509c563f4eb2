"""Queries that the page, the API and the CLI share: pages of messages and dead letters, and lateness.

A query takes about the same time however many messages are pending. Pages follow an index. If no index answers a
filter, a query compares a limited number of messages, and the answer tells this number.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias, get_args

from msgspec import Struct

from aiodelay.core.dispatch_rate import DispatchRate, RateMeter
from aiodelay.core.validation import check_letters_id
from aiodelay.core.values import (
    DeadKey,
    DeadLetter,
    DeadReason,
    JournalEntry,
    Lane,
    LaneCounts,
    Query,
    Snapshot,
    State,
)
from aiodelay.errors import InputError, UnsupportedByStoreError
from aiodelay.ports import JournalReader, Store
from aiodelay.scheduler import Scheduler

from .activity import FIRST

__all__ = [
    "DEAD_REASONS",
    "NO_CLASS",
    "DeadFilter",
    "DeadPage",
    "DeadPlace",
    "Filter",
    "Lateness",
    "LatenessMeter",
    "Page",
    "Place",
    "dead_letter",
    "dead_page",
    "error_class",
    "lateness_of",
    "oldest_overdue_ms",
    "page",
    "page_of_id",
    "series_page",
]

Place: TypeAlias = tuple[int, str]
"""The end of a page of messages: the (next attempt, id) of its last message."""
DeadPlace: TypeAlias = tuple[int, str, int]
"""The end of a page of dead letters: the (at_ms, id, revision) of its last letter.

Letters whose id is exactly the text of the filter come first. After such a letter, the place has `-1 - at_ms`.
"""
BEFORE_ALL: Place = (0, "")
"""The place before all messages."""

DEAD_REASONS: tuple[str, ...] = get_args(DeadReason)
"""The reasons for which messages are given up."""

NO_CLASS = "none"
"""The value of an error filter that means errors without a class name."""
_CLASS = re.compile(r"[A-Z]\w*(?=:|$)", re.MULTILINE)

AT_ONCE = 200
"""The most messages to request from a store at once."""
OVERDUE_EXAMINED = 2_000
MOST_LANES = 100


class Filter(Struct, frozen=True):
    """A filter of messages.

    An index answers `lanes`, `from_ms` and `to_ms`. For all other attributes, messages are compared one by one.

    Attributes:
        lanes: Only these lanes; empty = all.
        from_ms: Only messages whose next attempt is at this time or later, epoch ms.
        to_ms: Only messages whose next attempt is before this time, epoch ms.
        state: Only messages in this state.
        address: Only messages to this address of a sink.
        type: Only events of this type name.
        text: Only messages whose id contains this text. The message with exactly this id comes first, because an index
            finds this message.
        recurs: Only recurring messages.
    """

    lanes: tuple[Lane, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    state: State | None = None
    address: str | None = None
    type: str | None = None
    text: str | None = None
    recurs: bool = False

    @property
    def compares(self) -> bool:
        """Whether the filter needs messages to be compared one by one."""
        return self.recurs or any(each is not None for each in (self.state, self.address, self.type, self.text))

    def matches(self, found: Snapshot) -> bool:
        """Return whether a message matches the parts of the filter that no index answers."""
        envelope = found.record.envelope
        return (
            self.state in (None, found.state)
            and self.address in (None, envelope.address)
            and self.type in (None, envelope.type or envelope.lane)
            and (self.text is None or self.text in envelope.id)
            and (not self.recurs or envelope.rule is not None)
        )


class Page(Struct, frozen=True):
    """A page of messages, by next attempt.

    Attributes:
        messages: The messages that match.
        after: The end of this page, after which the next page begins; None = this is the last page.
        examined: The number of messages that were compared.
        of: The number of messages to compare in all; None if an index answers the filter.
    """

    messages: Sequence[Snapshot]
    after: Place | None
    examined: int
    of: int | None


async def page(scheduler: Scheduler, wanted: Filter, *, after: Place | None, limit: int, most: int) -> Page:
    """Return one page of pending messages.

    Args:
        scheduler: An open scheduler.
        wanted: The filter.
        after: The end of the previous page.
        limit: The most messages to return.
        most: The most messages to compare.
    """
    store = scheduler.opened_store()
    from_ms, to_ms = _bounds(wanted, store.now_ms())
    most = most if wanted.compares else limit
    messages = await _of_exact_id(store, wanted, (from_ms, to_ms)) if after is None else []
    examined, is_last = 0, False
    while len(messages) < limit and examined < most and not is_last:
        size = min(AT_ONCE, most - examined)
        found = await store.search(Query(wanted.lanes, from_ms, to_ms, after, size))
        is_last = len(found) < size
        for number, each in enumerate(found, 1):
            examined, after = examined + 1, (each.next_attempt_ms, each.record.id)
            if wanted.matches(each) and each.record.id != wanted.text:
                messages.append(each)
                if len(messages) == limit:
                    is_last = is_last and number == len(found)
                    break
    return Page(messages, None if is_last else after or BEFORE_ALL, examined, await _count(scheduler, wanted))


async def page_of_id(scheduler: Scheduler, wanted: Filter, message_id: str) -> Page:
    """Return a page with the message that has this id; an empty page if it does not match the whole filter."""
    found = await scheduler.get(message_id)
    messages = [] if found is None or not _fits(found, wanted, (wanted.from_ms, wanted.to_ms)) else [found]
    return Page(messages, None, len(messages), None)


async def series_page(scheduler: Scheduler, *, after: Place | None, limit: int) -> Page:
    """Return one page of recurring messages, from the store's index of series.

    Args:
        scheduler: An open scheduler.
        after: The end of the previous page.
        limit: The most messages to return.
    """
    found = await scheduler.opened_store().series(after=None if after is None else after[1], limit=limit)
    last = found[-1] if len(found) == limit else None
    return Page(found, None if last is None else (last.next_attempt_ms, last.record.id), len(found), None)


async def _of_exact_id(store: Store, wanted: Filter, bounds: tuple[int | None, int | None]) -> list[Snapshot]:
    """Return the message whose id equals the text of the filter, if the message matches the whole filter."""
    if wanted.text is None:
        return []
    try:
        found = await store.get(check_letters_id(wanted.text))
    except (InputError, UnsupportedByStoreError):  # the text is no message id, or another process owns the message
        return []
    return [] if found is None or not _fits(found, wanted, bounds) else [found]


def _fits(found: Snapshot, wanted: Filter, bounds: tuple[int | None, int | None]) -> bool:
    """Return whether a message matches the whole filter, with these bounds of its next attempt."""
    is_of_lane = not wanted.lanes or found.record.envelope.lane in wanted.lanes
    return is_of_lane and wanted.matches(found) and _is_within(found.next_attempt_ms, *bounds)


def _is_within(at_ms: int, from_ms: int | None, to_ms: int | None) -> bool:
    return (from_ms is None or at_ms >= from_ms) and (to_ms is None or at_ms < to_ms)


def _bounds(wanted: Filter, now_ms: int) -> tuple[int | None, int | None]:
    """Return the time range of a filter, narrowed to the times that its state allows."""
    from_ms, to_ms = wanted.from_ms, wanted.to_ms
    if wanted.state is State.OVERDUE:
        to_ms = now_ms + 1 if to_ms is None else min(to_ms, now_ms + 1)
    if wanted.state is State.SCHEDULED:
        from_ms = now_ms if from_ms is None else max(from_ms, now_ms)
    return from_ms, to_ms


async def _count(scheduler: Scheduler, wanted: Filter) -> int | None:
    if not wanted.compares:
        return None
    counts = await scheduler.counts()
    lanes = [each for lane, each in counts.items() if not wanted.lanes or lane in wanted.lanes]
    return sum(each.scheduled + each.overdue + each.in_flight + each.held for each in lanes)


async def oldest_overdue_ms(scheduler: Scheduler, counts: Mapping[Lane, LaneCounts]) -> int | None:
    """Return the time since which the oldest overdue message waits, epoch ms; None = no message is overdue.

    The function examines the first 2,000 messages of the lanes that have overdue messages; of all lanes, if more than
    100 lanes have any. So thousands of messages in flight, or held for a paused address, can hide overdue messages.

    Args:
        scheduler: An open scheduler.
        counts: The counts of its messages.
    """
    lanes = tuple(lane for lane, each in counts.items() if each.overdue)
    if not lanes:
        return None
    wanted = Filter(lanes if len(lanes) <= MOST_LANES else (), state=State.OVERDUE)
    store, after = scheduler.opened_store(), None
    now_ms = store.now_ms()
    for _ in range(OVERDUE_EXAMINED // AT_ONCE):
        found = await store.search(Query(wanted.lanes, None, now_ms + 1, after, AT_ONCE))
        if overdue := next((each for each in found if wanted.matches(each)), None):
            return overdue.next_attempt_ms
        if len(found) < AT_ONCE:
            break
        after = found[-1].next_attempt_ms, found[-1].record.id
    return None


# --- dead letters -----------------------------------------------------------------------------------------


class DeadFilter(Struct, frozen=True):
    """A filter of dead letters. An index answers `from_ms`. For all other attributes, letters are compared one by one.

    Attributes:
        lanes: Only these lanes; empty = all.
        reason: Only letters given up for this reason.
        from_ms: Only letters given up at this time or later, epoch ms.
        to_ms: Only letters given up before this time, epoch ms.
        text: Only letters whose id contains this text. Letters with exactly this id come first, because an index finds
            these letters.
        error: Only letters whose last error has this class; `NO_CLASS` = errors that name no class.
    """

    lanes: tuple[Lane, ...] = ()
    reason: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    text: str | None = None
    error: str | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a letter matches the filter. This does not compare `from_ms` and `to_ms`."""
        envelope = letter.record.envelope
        return (
            (not self.lanes or envelope.lane in self.lanes)
            and self.reason in (None, letter.reason)
            and self.error in (None, error_class(letter.record.last_error) or NO_CLASS)
            and (self.text is None or self.text in envelope.id)
        )


def error_class(error: str | None) -> str:
    """Return the exception class with which an error text begins, as in "KeyError: 'total'"; "" if there is none."""
    found = _CLASS.match(error or "")
    return found[0] if found else ""


class DeadPage(Struct, frozen=True):
    """A page of dead letters, oldest first. `of` is the number of all dead letters; for the rest, see `Page`."""

    letters: Sequence[DeadLetter]
    after: DeadPlace | None
    examined: int
    of: int


async def dead_page(
    scheduler: Scheduler, wanted: DeadFilter, *, after: DeadPlace | None, limit: int, most: int
) -> DeadPage:
    """Return one page of dead letters. The arguments mean the same as in `page`."""
    store = scheduler.opened_store()
    letters: list[DeadLetter] = []
    examined, is_last = 0, False
    if after is None or after[0] < 0:
        letters, examined, after = await _letters_of_exact_id(store, wanted, after, min(limit, AT_ONCE))
        if after is not None:
            return DeadPage(letters, after, examined, await _dead_count(scheduler))
        after = wanted.from_ms or 0, "", -1
    while len(letters) < limit and examined < most and not is_last:
        size = min(AT_ONCE, most - examined)
        found = await store.dead_letters(after=after, limit=size)
        is_last = len(found) < size
        for number, letter in enumerate(found, 1):
            if wanted.to_ms is not None and letter.at_ms >= wanted.to_ms:
                is_last = True
                break
            examined, after = examined + 1, (letter.at_ms, *letter.key)
            if wanted.matches(letter) and letter.record.id != wanted.text:
                letters.append(letter)
                if len(letters) == limit:
                    is_last = is_last and number == len(found)
                    break
    return DeadPage(letters, None if is_last else after, examined, await _dead_count(scheduler))


async def _dead_count(scheduler: Scheduler) -> int:
    return sum(each.dead for each in (await scheduler.counts()).values())


async def _letters_of_exact_id(
    store: Store, wanted: DeadFilter, after: DeadPlace | None, limit: int
) -> tuple[list[DeadLetter], int, DeadPlace | None]:
    """Find the letters whose id equals the text of the filter, after a place of such a letter.

    Returns:
        The letters that match the whole filter; the number of letters examined, and the place of the last one, if
        there may be more: otherwise 0 and None.
    """
    if wanted.text is None:
        return [], 0, None
    begin = None if after is None else (-1 - after[0], *after[1:])
    try:
        found = await store.dead_letters(message_id=check_letters_id(wanted.text), after=begin, limit=limit)
    except (InputError, UnsupportedByStoreError):  # the text is no message id, or another process owns the letters
        return [], 0, None
    fit = [each for each in found if wanted.matches(each) and _is_within(each.at_ms, wanted.from_ms, wanted.to_ms)]
    if len(found) < limit:
        return fit, 0, None
    return fit, len(found), (-1 - found[-1].at_ms, *found[-1].key)


async def dead_letter(scheduler: Scheduler, key: DeadKey) -> DeadLetter | None:
    """Return the dead letter with this key; None if it does not exist."""
    async for letter in scheduler.dead_letters(message_id=key.id):
        if letter.key == key:
            return letter
    return None


# --- lateness ---------------------------------------------------------------------------------------------

LATENESS_WINDOW_MS = 300_000
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


class Lateness(Struct, frozen=True):
    """The lateness of the first attempts of the last 5 minutes, measured from the journal, in ms.

    Attributes:
        samples: The number of first attempts.
        p50_ms: The lateness that half of the attempts did not exceed; None if there are no samples.
        p99_ms: The lateness that 99 of 100 attempts did not exceed; None if there are no samples.
        max_ms: The highest lateness; None if there are no samples.
        buckets: Pairs of an upper bound in ms, and the number of attempts whose lateness is above the previous bound
            and not above this bound. The last bound is None: no limit.
        is_complete: Whether all entries of the last 5 minutes were read. If not, only the newest entries were read; if
            these entries give no samples, the lateness is unknown.
    """

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    buckets: Sequence[tuple[int | None, int]]
    is_complete: bool


class LatenessMeter:
    """Measures lateness and dispatch rates from a journal.

    The first call reads the newest entries; each later call reads new entries.

    Args:
        keep: The most first attempts to remember. If there are more, the meter remembers the latest attempts.
    """

    def __init__(self, keep: int = 10_000) -> None:
        self._keep = keep
        self._next: dict[int, int] = {}  # by part of the journal: the number of the next entry to read
        self._gap_ms: int | None = None  # some entries before this time were not read
        self._begun: OrderedDict[tuple[str, int, int], tuple[int, int]] = OrderedDict()  # by occurrence: at, lateness
        self._started: list[tuple[int, int, Lane]] = []  # first attempts that the rates do not count yet: at, due, lane
        self._rates: defaultdict[Lane, RateMeter] = defaultdict(RateMeter)

    async def measure(self, scheduler: Scheduler, *, most: int = 5_000) -> Lateness:
        """Read the new entries of the journal, and return the lateness of the last 5 minutes.

        Args:
            scheduler: An open scheduler. Give every call the same scheduler.
            most: The most entries to read of each part of the journal. If there are more, the newest entries are read.

        Raises:
            UnsupportedByStoreError: The store keeps no journal.
            StoreUnavailableError: The store did not answer.
        """
        store = scheduler.opened_store()
        async with store.journal_reader() as reader:
            for part, span in (await reader.spans()).items():
                await self._read_on(reader, part, span, most, store.now_ms())
        self._count_started()
        since_ms = store.now_ms() - LATENESS_WINDOW_MS
        samples = [lateness_ms for at_ms, lateness_ms in self._begun.values() if at_ms >= since_ms]
        is_complete = self._gap_ms is None or self._gap_ms < since_ms
        return lateness_of(samples, is_complete=is_complete)

    def rates(self) -> Mapping[Lane, DispatchRate]:
        """Return the dispatch rate of each lane whose backlogs were long enough to measure it."""
        measured = {lane: meter.rate() for lane, meter in self._rates.items()}
        return {lane: rate for lane, rate in measured.items() if rate is not None}

    def _count_started(self) -> None:
        for at_ms, due_ms, lane in sorted(self._started):  # the parts of a journal were read one after the other
            self._rates[lane].note(at_ms, due_ms)
        self._started.clear()

    def _skip(self) -> None:
        for meter in self._rates.values():
            meter.skip()

    async def _read_on(self, reader: JournalReader, part: int, span: range, most: int, now_ms: int) -> None:
        following = self._next.get(part, span.start)
        first = max(following, span.stop - most)
        if first > following:
            self._skip()
        was_trimmed = part not in self._next and span.start > FIRST and first < span.stop
        has_gap = first > following or was_trimmed

        def trimmed(_: range) -> None:
            nonlocal has_gap
            has_gap = True

        async for entries in reader.entries(part, range(first, span.stop), trimmed):
            if has_gap and entries:
                self._gap_ms, has_gap = max(self._gap_ms or 0, entries[0].at_ms), False
            for entry in entries:
                self._note(entry)
        if has_gap:
            self._gap_ms = now_ms
        self._next[part] = span.stop

    def _note(self, entry: JournalEntry) -> None:
        if entry.event not in ("claimed", "delivered") or entry.attempt > 0:
            return
        occurrence = entry.id, entry.revision, entry.due_ms
        # A claimed message has two entries, "claimed" and "delivered". A message that the server itself moves has only
        # "delivered". The first entry gives the start of the delivery.
        if occurrence not in self._begun:
            self._started.append((entry.at_ms, entry.due_ms, entry.lane))
        self._begun.setdefault(occurrence, (entry.at_ms, max(entry.at_ms - entry.due_ms, 0)))
        while len(self._begun) > self._keep:
            _, (at_ms, _) = self._begun.popitem(last=False)
            self._gap_ms = max(self._gap_ms or 0, at_ms)


def lateness_of(samples: Sequence[int], *, is_complete: bool) -> Lateness:
    """Return the distribution of lateness samples, in ms."""
    ordered = sorted(samples)
    upto = [0, *(bisect_right(ordered, bound) for bound in BOUNDS_MS), len(ordered)]
    buckets = [(bound, upto[i + 1] - upto[i]) for i, bound in enumerate((*BOUNDS_MS, None))]
    return Lateness(len(ordered), _share(ordered, 50), _share(ordered, 99), _share(ordered, 100), buckets, is_complete)


def _share(ordered: Sequence[int], percent: int) -> int | None:
    """Return a percentile: the smallest value that `percent` % of the values do not exceed; None if there are none."""
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)] if ordered else None
