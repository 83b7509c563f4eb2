"""What the page, the API and the command line ask of a scheduler; nothing here knows HTTP.

Every question costs about the same however much is pending: pages follow an index, and what no index answers is
looked for among a bounded number of messages, of which the answer tells how many.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias, get_args

from msgspec import Struct

from aiodelay.core.validation import check_letters_id
from aiodelay.core.values import DeadKey, DeadLetter, DeadReason, JournalEntry, Lane, Query, Snapshot, State
from aiodelay.errors import InputError, UnsupportedByStoreError
from aiodelay.ports import Store, Trail
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
    "series_page",
]

Place: TypeAlias = tuple[int, str]
"""Where a page of messages ends: the (next attempt, id) of its last one."""
DeadPlace: TypeAlias = tuple[int, str, int]
"""Where a page of dead letters ends: the (at_ms, id, revision) of its last one."""

DEAD_REASONS: tuple[str, ...] = get_args(DeadReason)
"""Why messages are given up."""

NO_CLASS = "none"
"""Names, in a filter, the errors that name no class."""
_CLASS = re.compile(r"[A-Z]\w*(?=:|$)", re.MULTILINE)

AT_ONCE = 200
"""Most messages to ask a store for at once."""
OVERDUE_LOOKED_AT = 200


class Filter(Struct, frozen=True):
    """Which messages are wanted. Lanes and due times are looked up in an index; the rest is compared one by one.

    Attributes:
        lanes: Only of these handlers' or sinks' names; empty = all.
        from_ms: Only those whose next attempt is not before this.
        to_ms: Only those whose next attempt is before this.
        state: Only in this state.
        address: Only to this address of a sink.
        type: Only events of this type name.
        text: Only those whose id holds this text; the one whose id it is comes first, looked up in an index.
        recurs: Only those that recur.
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
        """Whether messages have to be compared one by one."""
        return self.recurs or any(each is not None for each in (self.state, self.address, self.type, self.text))

    def matches(self, found: Snapshot) -> bool:
        """Whether a message is wanted, as far as no index has answered that."""
        envelope = found.record.envelope
        return (
            self.state in (None, found.state)
            and self.address in (None, envelope.address)
            and self.type in (None, envelope.type or envelope.lane)
            and (self.text is None or self.text in envelope.id)
            and (not self.recurs or envelope.rule is not None)
        )


class Page(Struct, frozen=True):
    """Messages by next attempt.

    Attributes:
        messages: Those that are wanted.
        after: Where the next page begins; None = this was the last.
        examined: How many were looked at.
        of: How many there were to look at, where they were compared one by one.
    """

    messages: Sequence[Snapshot]
    after: Place | None
    examined: int
    of: int | None


async def page(scheduler: Scheduler, wanted: Filter, *, after: Place | None, limit: int, most: int) -> Page:
    """Return one page of what is pending or in flight.

    Args:
        scheduler: Open.
        wanted: Which messages.
        after: Where the page before ended.
        limit: Most messages to return.
        most: Most messages to look at.
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
    return Page(messages, None if is_last else after, examined, await _count(scheduler, wanted))


async def series_page(scheduler: Scheduler, *, after: Place | None, limit: int) -> Page:
    """Return one page of the recurring messages, by the store's index of them.

    Args:
        scheduler: Open.
        after: Where the page before ended.
        limit: Most messages to return.
    """
    found = await scheduler.opened_store().series(after=None if after is None else after[1], limit=limit)
    last = found[-1] if len(found) == limit else None
    return Page(found, None if last is None else (last.next_attempt_ms, last.record.id), len(found), None)


async def _of_exact_id(store: Store, wanted: Filter, bounds: tuple[int | None, int | None]) -> list[Snapshot]:
    """Return the message whose whole id is the text that is wanted, if it is wanted otherwise too."""
    if wanted.text is None:
        return []
    try:
        found = await store.get(check_letters_id(wanted.text))
    except (InputError, UnsupportedByStoreError):  # no message has such an id, or another process owns it
        return []
    if found is None or not wanted.matches(found):
        return []
    is_of_lane = not wanted.lanes or found.record.envelope.lane in wanted.lanes
    return [found] if is_of_lane and _is_within(found.next_attempt_ms, *bounds) else []


def _is_within(at_ms: int, from_ms: int | None, to_ms: int | None) -> bool:
    return (from_ms is None or at_ms >= from_ms) and (to_ms is None or at_ms < to_ms)


def _bounds(wanted: Filter, now_ms: int) -> tuple[int | None, int | None]:
    """Narrow the wanted time by the wanted state."""
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


async def oldest_overdue_ms(scheduler: Scheduler) -> int | None:
    """Return since when the longest waiting message could have been delivered, epoch ms; None = none is overdue.

    Looks at the first messages by time: what is held or in flight and stands before them may hide it.
    """
    wanted = Filter(state=State.OVERDUE)
    store = scheduler.opened_store()
    found = await store.search(Query((), None, store.now_ms() + 1, None, OVERDUE_LOOKED_AT))
    return next((each.next_attempt_ms for each in found if wanted.matches(each)), None)


# --- dead letters -----------------------------------------------------------------------------------------


class DeadFilter(Struct, frozen=True):
    """Which dead letters are wanted; all of it is compared one by one, save the time from which on.

    Attributes:
        lanes: Only of these handlers' or sinks' names; empty = all.
        reason: Only given up for this reason.
        from_ms: Only given up at this time or later.
        to_ms: Only given up before this time.
        text: Only those whose id holds this text; those whose id it is come first, looked up in an index.
        error: Only those whose last error is of this class; `NO_CLASS` = names none.
    """

    lanes: tuple[Lane, ...] = ()
    reason: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    text: str | None = None
    error: str | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter is wanted."""
        envelope = letter.record.envelope
        return (
            (not self.lanes or envelope.lane in self.lanes)
            and self.reason in (None, letter.reason)
            and self.error in (None, error_class(letter.record.last_error) or NO_CLASS)
            and (self.text is None or self.text in envelope.id)
        )


def error_class(error: str | None) -> str:
    """Return the exception class that an error's text begins with, as in "KeyError: 'total'"; "" if it names none."""
    found = _CLASS.match(error or "")
    return found[0] if found else ""


class DeadPage(Struct, frozen=True):
    """Dead letters, oldest first; attributes as of `Page`."""

    letters: Sequence[DeadLetter]
    after: DeadPlace | None
    examined: int
    of: int


async def dead_page(
    scheduler: Scheduler, wanted: DeadFilter, *, after: DeadPlace | None, limit: int, most: int
) -> DeadPage:
    """Return one page of dead letters; arguments as of `page`."""
    store = scheduler.opened_store()
    letters = await _letters_of_exact_id(store, wanted) if after is None else []
    if after is None and wanted.from_ms is not None:
        after = (wanted.from_ms, "", -1)
    examined, is_last = 0, False
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
    counts = await scheduler.counts()
    return DeadPage(letters, None if is_last else after, examined, sum(each.dead for each in counts.values()))


async def _letters_of_exact_id(store: Store, wanted: DeadFilter) -> list[DeadLetter]:
    """Return the letters whose whole id is the text that is wanted, if they are wanted otherwise too."""
    if wanted.text is None:
        return []
    try:
        found = await store.dead_letters(message_id=check_letters_id(wanted.text), limit=AT_ONCE)
    except (InputError, UnsupportedByStoreError):  # no letter has such an id, or another process owns them
        return []
    return [each for each in found if wanted.matches(each) and _is_within(each.at_ms, wanted.from_ms, wanted.to_ms)]


async def dead_letter(scheduler: Scheduler, key: DeadKey) -> DeadLetter | None:
    """Return one dead letter, None if there is none."""
    async for letter in scheduler.dead_letters(message_id=key.id):
        if letter.key == key:
            return letter
    return None


# --- lateness ---------------------------------------------------------------------------------------------

LATENESS_WINDOW_MS = 300_000
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


class Lateness(Struct, frozen=True):
    """How late first attempts of the last 5 minutes began, by the journal; all in ms.

    Attributes:
        samples: How many first attempts.
        buckets: Pairs of a bound and how many were at most that late, and later than the bound before; the last
            bound is None.
        is_complete: Every entry of the last 5 minutes was read. Otherwise the newest ones were: no samples then means
            that nothing is known.
    """

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    buckets: Sequence[tuple[int | None, int]]
    is_complete: bool


class LatenessMeter:
    """Follows a journal from its newest entries on.

    Args:
        keep: How many first attempts to remember at most, the latest ones.
    """

    def __init__(self, keep: int = 10_000) -> None:
        self._keep = keep
        self._next: dict[int, int] = {}  # by part of the journal: the number to go on with
        self._gap_ms: int | None = None  # entries before this time were passed over
        self._begun: OrderedDict[tuple[str, int, int], tuple[int, int]] = OrderedDict()  # by occurrence: at, lateness

    async def measure(self, scheduler: Scheduler, *, most: int = 5_000) -> Lateness:
        """Read the journal's new entries, and measure the last 5 minutes.

        Args:
            scheduler: Always the same.
            most: Most entries to read now of each part of the journal, the newest ones.

        Raises:
            UnsupportedByStoreError: The store keeps no journal.
            StoreUnavailableError: No answer.
        """
        store = scheduler.opened_store()
        async with store.trail() as trail:
            for part, span in (await trail.spans()).items():
                await self._read_on(trail, part, span, most, store.now_ms())
        since_ms = store.now_ms() - LATENESS_WINDOW_MS
        samples = [lateness_ms for at_ms, lateness_ms in self._begun.values() if at_ms >= since_ms]
        is_complete = self._gap_ms is None or self._gap_ms < since_ms
        return lateness_of(samples, is_complete=is_complete)

    async def _read_on(self, trail: Trail, part: int, span: range, most: int, now_ms: int) -> None:
        following = self._next.get(part, span.start)
        first = max(following, span.stop - most)
        was_trimmed = part not in self._next and span.start > FIRST and first < span.stop
        has_gap = first > following or was_trimmed

        def trimmed(_: range) -> None:
            nonlocal has_gap
            has_gap = True

        async for entries in trail.entries(part, range(first, span.stop), trimmed):
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
        # What is claimed is told of twice, what a server moves by itself once: the first tells when it began.
        self._begun.setdefault(occurrence, (entry.at_ms, max(entry.at_ms - entry.due_ms, 0)))
        while len(self._begun) > self._keep:
            _, (at_ms, _) = self._begun.popitem(last=False)
            self._gap_ms = max(self._gap_ms or 0, at_ms)


def lateness_of(samples: Sequence[int], *, is_complete: bool) -> Lateness:
    """Return the distribution of latenesses, in ms."""
    ordered = sorted(samples)
    upto = [0, *(bisect_right(ordered, bound) for bound in BOUNDS_MS), len(ordered)]
    buckets = [(bound, upto[i + 1] - upto[i]) for i, bound in enumerate((*BOUNDS_MS, None))]
    return Lateness(len(ordered), _share(ordered, 50), _share(ordered, 99), _share(ordered, 100), buckets, is_complete)


def _share(ordered: Sequence[int], percent: int) -> int | None:
    """Return the least value that so many percent do not exceed."""
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)] if ordered else None
