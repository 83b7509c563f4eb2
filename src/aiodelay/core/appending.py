"""Decisions about `Conflict.append()`, as pure functions: the joining of payloads, and the items left after a claim.

A message may get more items while it is in flight. The run under way does not know them, so they wait beside its
payload, in `Record.appended`. If the run ends the message, they become the next message of the id. If the message is
tried again, they join its payload. docs/guarantees.md, "Messages that gather items", has these cases.
"""

from __future__ import annotations

from msgspec.structs import replace

from . import transitions as t
from .values import Put, Record, Refused

__all__ = [
    "OTHER_KIND",
    "SEPARATOR",
    "append_refused",
    "next_message",
    "with_appended",
    "with_item",
    "with_item_in_flight",
    "without_appended",
]

OTHER_KIND = "which is of another kind"
"""The detail of a refused append to a message that recurs, or has another destination, type or encoding."""
SEPARATOR = b"\n"
"""The byte between two items of a payload."""


def append_refused(put: Put, current: Record) -> Refused | None:
    """Return why a payload cannot join the stored message; None = it can.

    `duplicate`: the stored message recurs, or has another destination, type or encoding. `too_large`: the joined
    payload would be larger than `Conflict.max_bytes`.
    """
    given, stored, most = put.envelope, current.envelope, put.conflict.max_bytes
    kinds = ((each.lane, each.address, each.type, each.encoding) for each in (given, stored))
    if len(set(kinds)) > 1 or stored.rule is not None:
        return Refused("duplicate", OTHER_KIND)
    size = len(_joined(stored.payload, current.appended, given.payload))
    return Refused("too_large") if most is not None and size > most else None


def with_item(put: Put, current: Record, revision: int, now_ms: int) -> Record:
    """Return a pending message with one more item. If the message is full, it is due now."""
    payload = _joined(current.envelope.payload, put.envelope.payload)
    record = replace(current, envelope=replace(current.envelope, payload=payload), revision=revision, op=put.op)
    return t.fired(record, now_ms) if _is_full(put, payload) else record


def with_item_in_flight(put: Put, current: Record, due_ms: int, now_ms: int) -> Record:
    """Return a message in flight with one more item for the next message of its id.

    That message is due at the earliest due time of its items, and now if it is full.
    """
    appended = _joined(current.appended, put.envelope.payload)
    if current.appended_due_ms is not None:
        due_ms = min(due_ms, current.appended_due_ms)
    if _is_full(put, appended):
        due_ms = min(due_ms, now_ms)
    return replace(current, appended=appended, appended_due_ms=due_ms)


def with_appended(record: Record, now_ms: int) -> Record:
    """Return a message that is tried again, with the items that came while it was in flight, if any.

    The revision is new, because the delivery id must differ if the payload differs.
    """
    if record.appended is None:
        return record
    payload = _joined(record.envelope.payload, record.appended)
    revision = t.next_revision(now_ms, record.revision)
    return replace(without_appended(record), envelope=replace(record.envelope, payload=payload), revision=revision)


def next_message(record: Record, now_ms: int) -> Record:
    """Return the message of the items that came while the ended message was in flight. Attempts begin at 0."""
    due_ms = record.due_ms if record.appended_due_ms is None else record.appended_due_ms
    return Record(
        replace(record.envelope, payload=record.appended or b""),
        t.next_revision(now_ms, record.revision),
        due_ms,
        record.op,
        record.expires_ms - record.due_ms + due_ms if record.expires_ms else 0,
        record.late,
    )


def without_appended(record: Record) -> Record:
    """Return a message without the items that came while it was in flight."""
    return record if record.appended is None else replace(record, appended=None, appended_due_ms=None)


def _joined(*payloads: bytes | None) -> bytes:
    return SEPARATOR.join(payload for payload in payloads if payload is not None)


def _is_full(put: Put, payload: bytes) -> bool:
    most = put.conflict.max_items
    return most is not None and payload.count(SEPARATOR) + 1 >= most
