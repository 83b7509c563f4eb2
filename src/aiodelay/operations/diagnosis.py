"""Explains the state of one message: why it was not delivered yet, or how it ended, with its journal and advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from aiodelay.core.durations import LAST_MS, format_duration, from_epoch_ms
from aiodelay.core.values import (
    Blocked,
    DeadLetter,
    JournalEntry,
    Lane,
    LaneCounts,
    LimitedKey,
    Record,
    Snapshot,
    State,
)
from aiodelay.errors import UnsupportedByStoreError, cut, shortened
from aiodelay.ports import Limits
from aiodelay.scheduler import Scheduler

__all__ = ["Around", "Cause", "Story", "cause_of", "limited_key", "story_of"]

Cause: TypeAlias = Literal[
    "in_flight",
    "paused",
    "not_due",
    "retrying",
    "blocked",
    "limited",
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
"""The state of a message, or its end.

`limited`: the message is due, but a limit of its lane or its key makes it wait. `waiting`: the message is due and a
process serves its lane, but the message is not claimed yet. `gone`: the message is not stored any more, or its dead
letter was purged. `unknown`: neither the store nor a journal knows the id.
"""

PAGE = 500


class Story(Struct, frozen=True):
    """The explanation of one message.

    Attributes:
        id: The id of the message.
        cause: The state of the message, or its end.
        text: The cause as a sentence.
        advice: A command or a change that helps; empty if nothing is wrong.
        message: The stored message, if it is pending.
        dead_letters: The dead letters of this id, oldest first; empty if the message is pending.
        journal: The journal entries of the message, in order; None if this process knows of no journal.
    """

    id: str
    cause: Cause
    text: str
    advice: str
    message: Snapshot | None
    dead_letters: Sequence[DeadLetter]
    journal: Sequence[JournalEntry] | None


class Around(Struct, frozen=True):
    """The facts about a store that decide, together with a message, whether the message is delivered.

    Attributes:
        now_ms: The time of the store.
        paused: The lane and the address of each paused destination; the address None = the whole lane is paused.
        blocked: The blocked destinations.
        counts: The counts of messages by lane.
        limited: The key of the message, if its lane has limits and the key has messages in flight or waiting.
        journal_from_ms: The time of the oldest entry of the whole journal; None if the journal is empty.
    """

    now_ms: int
    paused: Collection[tuple[Lane, str | None]]
    blocked: Sequence[Blocked]
    counts: Mapping[Lane, LaneCounts]
    journal_from_ms: int | None
    limited: LimitedKey | None = None


async def story_of(scheduler: Scheduler, message_id: str) -> Story:
    """Explain the state of a message.

    Args:
        scheduler: An open scheduler.
        message_id: The id of the message. The retry of an occurrence has its own id, which `scheduler.pending` shows.

    Raises:
        MessageIdError: The text is not a message id.
        UnsupportedByStoreError: This process cannot inspect the store.
        StoreUnavailableError: The store did not answer.
    """
    snapshot = await scheduler.get(message_id)
    letters = [] if snapshot else [each async for each in scheduler.dead_letters(message_id=message_id)]
    entries, from_ms = await _journal(scheduler, message_id)
    store = scheduler.opened_store()
    around = Around(
        store.now_ms(),
        await store.paused(),
        await scheduler.blocked(),
        await scheduler.counts() if snapshot else {},
        from_ms,
        await limited_key(scheduler, snapshot) if snapshot else None,
    )
    cause, text, advice = cause_of(message_id, snapshot, letters, entries, around)
    return Story(message_id, cause, text, advice, snapshot, letters, entries)


async def limited_key(scheduler: Scheduler, snapshot: Snapshot) -> LimitedKey | None:
    """Return the key of a message, if its lane has limits, and the key has messages in flight or waiting."""
    envelope, store = snapshot.record.envelope, scheduler.opened_store()
    if not isinstance(store, Limits) or (limits := (await store.limits()).get(envelope.lane)) is None:
        return None
    key = None if limits.each is None else limits.key_of(envelope)
    return next(iter(await store.limited_keys(envelope.lane, key=key)), None)


async def _journal(scheduler: Scheduler, message_id: str) -> tuple[list[JournalEntry] | None, int | None]:
    """Return the journal entries of a message, and the time of the journal's oldest entry.

    If there is no journal, both are None.
    """
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
    """Return the cause, the cause as a sentence, and the advice, as in `Story`."""
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
        end = "; it was cancelled, so this attempt is the last" if record.no_retry else ""
        return "in_flight", f"attempt {record.attempt + 1} is being delivered now{end}", ""
    for held in ((lane, None), (lane, envelope.address)):
        if held in around.paused or (snapshot.state is State.HELD and held[1] is None and not envelope.address):
            name = lane if held[1] is None else f"{lane}:{held[1]}"
            return "paused", f"{name} is paused, so its messages are not delivered", f"aiodelay resume {name}"
    is_read = not around.counts.get(lane, LaneCounts()).read_by_nobody
    nobody = "" if is_read else f"no live instance serves {lane}"
    start = "" if is_read else f"start a process with a handler or sink {lane}, or correct its name"
    if snapshot.next_attempt_ms > around.now_ms:
        return _of_future(snapshot, around.now_ms, nobody, start)
    return _of_overdue(snapshot, around, nobody, start)


def _of_future(snapshot: Snapshot, now_ms: int, nobody: str, start: str) -> tuple[Cause, str, str]:
    record, when = snapshot.record, _when(snapshot.next_attempt_ms, now_ms)
    also = f"; and {nobody}" if nobody else ""
    if record.attempt:
        return "retrying", f"attempt {record.attempt} failed{_error_of(record)}; a retry is due {when}{also}", start
    return "not_due", f"it is due {when}{also}", start


def _of_overdue(snapshot: Snapshot, around: Around, nobody: str, start: str) -> tuple[Cause, str, str]:
    record, envelope = snapshot.record, snapshot.record.envelope
    since = f"it was due {_when(snapshot.next_attempt_ms, around.now_ms)}"
    for each in around.blocked:
        if (each.lane, each.address) == (envelope.lane, envelope.address):
            to = f"{each.lane}:{each.address}"
            advice = f"repair {to}; aiodelay then delivers the message by itself"
            return "blocked", f"{since}; {to} takes nothing: {each.reason}", advice
    if nobody:
        return "read_by_nobody", f"{since}; {nobody}", start
    if around.limited is not None and around.limited.why:
        return "limited", f"{since}; {_of_limit(around.limited, around.now_ms)}", f"aiodelay limit {envelope.lane}"
    lapses = f"; its last {record.lapses} claims were not settled in time" if record.lapses else ""
    failed = f"; attempt {record.attempt} failed{_error_of(record)}" if record.attempt else ""
    text = f"{since}; {envelope.lane} is served, but the turn of this message has not come{lapses}{failed}"
    return "waiting", text, "see `aiodelay top`: the processes of its lane may be busy, or its destination is blocked"


def _of_limit(key: LimitedKey, now_ms: int) -> str:
    whose = (
        "its lane" if key.key is None or key.why == "lane" else f"its key {shortened(key.key.decode(errors='replace'))}"
    )
    also = f"{key.waiting} messages of its key wait"
    if key.until_ms is not None:
        return f"{whose} has used up its rate, which has room again {_when(key.until_ms, now_ms)}; {also}"
    return f"{whose} has as many messages in flight as its limit allows; {also}"


def _error_of(record: Record) -> str:
    return f": {cut(record.last_error, 200)}" if record.last_error else ""


def _of_letter(letter: DeadLetter) -> tuple[Cause, str, str]:
    record = letter.record
    reason = letter.reason.replace("_", " ")
    text = f"it became a dead letter {_at(letter.at_ms)}, with the reason {reason} (attempts: {record.attempt})"
    return "dead_letter", text + _error_of(record), f"remove the reason, then: aiodelay dead redrive {record.id}"


_ENDS: Mapping[str, tuple[Cause, str]] = {
    "delivered": ("delivered", "it was delivered"),
    "cancelled": ("cancelled", "it was cancelled"),
    "dropped": ("dropped", "it was too late for its `late` policy, and was dropped"),
    "skipped": ("skipped", "its rule skipped this occurrence"),
    "dead": ("gone", "its dead letter has been purged; it was given up"),
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
    text = f"it is not stored any more; its last journal entry is {last.event!r}, {_at(last.at_ms)}"
    return "gone", text, "a process without a journal may have ended it: open the store with the same URL everywhere"


def _of_unknown(message_id: str, entries: Sequence[JournalEntry] | None, around: Around) -> tuple[Cause, str, str]:
    text = f"{cut(message_id)} is not pending, and it has no dead letter"
    if entries is None:
        advice = (
            "to know more next time, keep a journal: ?journal=100000 in the URL of every process (docs/reference.md)"
        )
        return "unknown", f"{text}; whether it was ever stored is not known, because no journal is kept", advice
    since = "is empty" if around.journal_from_ms is None else f"begins {_at(around.journal_from_ms)}"
    text += f"; the journal, which {since}, does not know it: it was never stored here, or ended earlier"
    return "unknown", text, "check the id, the store and the namespace; or keep a longer journal"


def _at(ms: int) -> str:
    return from_epoch_ms(min(ms, LAST_MS)).strftime("on %Y-%m-%d at %H:%M:%S.%f")[:-3] + "Z"


def _when(ms: int, now_ms: int) -> str:
    away = format_duration(abs(ms - now_ms))
    return f"{_at(ms)}, {f'in {away}' if ms > now_ms else f'{away} ago'}"
