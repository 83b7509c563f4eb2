"""Why a message did not arrive, or when it did: its whole story, and the cause in one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from aiodelay.core.durations import format_duration, from_epoch_ms
from aiodelay.core.values import Blocked, DeadLetter, JournalEntry, Lane, LaneCounts, Record, Snapshot, State
from aiodelay.errors import UnsupportedByStoreError, cut
from aiodelay.scheduler import Scheduler

__all__ = ["Around", "Cause", "Story", "cause_of", "story_of"]

Cause: TypeAlias = Literal[
    "in_flight",
    "paused",
    "not_due",
    "retrying",
    "blocked",
    "read_by_nobody",
    "waiting",
    "dead_letter",
    "delivered",
    "cancelled",
    "dropped",
    "skipped",
    "gone",
    "unknown",
]
"""Where a message stands, or how it ended; `waiting`: it is due, and its lane is served by somebody who is busy."""

PAGE = 500


class Story(Struct, frozen=True):
    """What is known of a message.

    Attributes:
        cause: Where it stands, or how it ended.
        text: The same in a sentence.
        advice: What to do about it; empty where nothing is wrong.
        message: As it is stored, if it is pending or in flight.
        dead_letters: Of this id, oldest first; looked for where the message is not stored.
        journal: What happened to it, in order; None where no journal is kept, or this process does not know of it.
    """

    id: str
    cause: Cause
    text: str
    advice: str
    message: Snapshot | None
    dead_letters: Sequence[DeadLetter]
    journal: Sequence[JournalEntry] | None


class Around(Struct, frozen=True):
    """What a message's delivery depends on beside itself.

    Attributes:
        journal_from_ms: Of the oldest journal entry of all; None if there is none.
    """

    now_ms: int
    holds: Collection[tuple[Lane, str | None]]
    blocked: Sequence[Blocked]
    counts: Mapping[Lane, LaneCounts]
    journal_from_ms: int | None


async def story_of(scheduler: Scheduler, message_id: str) -> Story:
    """Tell the story of a message.

    Args:
        scheduler: Open; of a store that can be looked into.
        message_id: As it was scheduled, or as `pending` names a retry of a series' occurrence.

    Raises:
        MessageIdError: It is none.
        UnsupportedByStoreError: The store cannot be looked into.
        StoreUnavailableError: It does not answer.
    """
    snapshot = await scheduler.get(message_id)
    letters = [] if snapshot else [each async for each in scheduler.dead_letters(message_id=message_id)]
    entries, from_ms = await _journal(scheduler, message_id)
    store = scheduler.opened_store()
    around = Around(
        store.now_ms(),
        await store.holds(),
        await scheduler.blocked(),
        await scheduler.counts() if snapshot else {},
        from_ms,
    )
    cause, text, advice = cause_of(message_id, snapshot, letters, entries, around)
    return Story(message_id, cause, text, advice, snapshot, letters, entries)


async def _journal(scheduler: Scheduler, message_id: str) -> tuple[list[JournalEntry] | None, int | None]:
    """Return a message's entries, None if no journal is kept; and the time of the oldest entry of all."""
    entries: list[JournalEntry] = []
    try:
        while page := await scheduler.journal(message_id, after=entries[-1].number if entries else 0, limit=PAGE):
            entries += page
        oldest = await scheduler.journal(limit=1)
    except UnsupportedByStoreError:
        return None, None
    return entries, oldest[0].at_ms if oldest else None


def cause_of(
    message_id: str,
    snapshot: Snapshot | None,
    letters: Sequence[DeadLetter],
    entries: Sequence[JournalEntry] | None,
    around: Around,
) -> tuple[Cause, str, str]:
    """Return the cause, a sentence that tells it, and what to do about it."""
    if snapshot is not None:
        return _of_stored(snapshot, around)
    if letters:
        return _of_letter(letters[-1])
    if entries:
        return _of_ended(entries)
    return _of_unknown(message_id, entries, around)


def _of_stored(snapshot: Snapshot, around: Around) -> tuple[Cause, str, str]:
    record, envelope = snapshot.record, snapshot.record.envelope
    lane = envelope.lane
    if snapshot.state is State.IN_FLIGHT:
        end = "; it was cancelled, so that this attempt is the last" if record.no_retry else ""
        return "in_flight", f"attempt {record.attempt + 1} is being delivered now{end}", ""
    for held in ((lane, None), (lane, envelope.address)):
        if held in around.holds or (snapshot.state is State.HELD and held[1] is None and not envelope.address):
            name = lane if held[1] is None else f"{lane}:{held[1]}"
            return "paused", f"{name} is paused, so that nothing of it is delivered", f"aiodelay resume {name}"
    nobody, start = "", ""
    if around.counts.get(lane, LaneCounts()).read_by_nobody:
        nobody = f"no live instance serves {lane}"
        start = f"start a process with a handler or sink {lane}, or mend its name"
    is_read = not around.counts.get(lane, LaneCounts()).read_by_nobody
    nobody = "" if is_read else f"no live instance serves {lane}"
    start = "" if is_read else f"start a process with a handler or sink {lane}, or mend its name"
    if snapshot.next_attempt_ms > around.now_ms:
        return _of_future(snapshot, around.now_ms, nobody, start)
    return _of_overdue(snapshot, around, nobody, start)


def _of_future(snapshot: Snapshot, now_ms: int, nobody: str, start: str) -> tuple[Cause, str, str]:
    record, when = snapshot.record, _when(snapshot.next_attempt_ms, now_ms)
    also = f"; and {nobody}" if nobody else ""
    if record.attempt:
        return "retrying", f"attempt {record.attempt} failed{_error_of(record)}; the next is due {when}{also}", start
    return "not_due", f"it is due {when}{also}", start


def _of_overdue(snapshot: Snapshot, around: Around, nobody: str, start: str) -> tuple[Cause, str, str]:
    record, envelope = snapshot.record, snapshot.record.envelope
    since = f"it is due since {_when(snapshot.next_attempt_ms, around.now_ms)}"
    for each in around.blocked:
        if (each.lane, each.address) == (envelope.lane, envelope.address):
            to = f"{each.lane}:{each.address}"
            return "blocked", f"{since}; {to} takes nothing: {each.reason}", f"mend {to}; it is tried again by itself"
    if nobody:
        return "read_by_nobody", f"{since}; {nobody}", start
    lapses = f"; the last {record.lapses} who took it did not settle it in time" if record.lapses else ""
    failed = f"; attempt {record.attempt} failed{_error_of(record)}" if record.attempt else ""
    text = f"{since}; {envelope.lane} is served, and its turn has not come{lapses}{failed}"
    return "waiting", text, "see `aiodelay top`: is all that serves it busy, or blocked?"


def _error_of(record: Record) -> str:
    return f": {cut(record.last_error, 200)}" if record.last_error else ""


def _of_letter(letter: DeadLetter) -> tuple[Cause, str, str]:
    record = letter.record
    reason = letter.reason.replace("_", " ")
    text = f"it was given up {_at(letter.at_ms)} as a dead letter, {reason} (attempts {record.attempt})"
    return "dead_letter", text + _error_of(record), f"mend the reason, then: aiodelay dead redrive {record.id}"


_ENDS: Mapping[str, tuple[Cause, str]] = {
    "delivered": ("delivered", "it was delivered"),
    "cancelled": ("cancelled", "it was cancelled"),
    "dropped": ("dropped", "it was dropped: it was too late for its `late` policy"),
    "skipped": ("skipped", "its occurrence was skipped by its rule"),
    "dead": ("gone", "it became a dead letter, which has been purged since"),
}


def _of_ended(entries: Sequence[JournalEntry]) -> tuple[Cause, str, str]:
    for entry in reversed(entries):
        if entry.event in _ENDS:
            cause, text = _ENDS[entry.event]
            if entry.event == "delivered":
                late = f"{format_duration(max(entry.at_ms - entry.due_ms, 0))} after it was due"
                return cause, f"{text} {_at(entry.at_ms)}, {late}, attempt {max(entry.attempt, 1)}", ""
            detail = f" ({cut(entry.detail, 200)})" if entry.detail else ""
            return cause, f"{text} {_at(entry.at_ms)}{detail}", ""
    last = entries[-1]
    text = f"it is stored no more; the last that the journal tells is {last.event!r}, {_at(last.at_ms)}"
    return "gone", text, "a process without a journal may have ended it: open the store with the same URL everywhere"


def _of_unknown(message_id: str, entries: Sequence[JournalEntry] | None, around: Around) -> tuple[Cause, str, str]:
    text = f"{cut(message_id)} is not stored, and no dead letter"
    if entries is None:
        advice = (
            "to know more next time, keep a journal: ?journal=100000 in the URL of every process (docs/reference.md)"
        )
        return "unknown", f"{text}; whether it ever was cannot be told: no journal is kept", advice
    since = "is empty" if around.journal_from_ms is None else f"begins {_at(around.journal_from_ms)}"
    text += f"; the journal, which {since}, does not know it: it was never stored here, or ended before"
    return "unknown", text, "check the id, the store and the namespace; or keep a longer journal"


def _at(ms: int) -> str:
    return from_epoch_ms(ms).strftime("on %Y-%m-%d at %H:%M:%S.%f")[:-3] + "Z"


def _when(ms: int, now_ms: int) -> str:
    away = format_duration(abs(ms - now_ms))
    return f"{_at(ms)}, {f'in {away}' if ms > now_ms else f'{away} ago'}"
