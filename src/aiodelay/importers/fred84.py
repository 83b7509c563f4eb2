"""Imports the events that fred84/delayedQueue (0.5) keeps in Redis.

All keys of delayedQueue have a prefix. The zset `delayed_events` maps the name of an event, `<class>###<id>`, to the
epoch ms of its next attempt. The hash `events` maps the name to the JSON of the event: `{payload, type, attempt,
logContext}`. For each class there is a list with the JSON of events; the key of the list is the simple class name in
lower case. An event in a list is also in the zset until it is handled, except at its last attempt: it is then only in
the list.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec import Struct

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.store.commands import MOST_MS
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, At, Conflict, Envelope, Put
from aiodelay.ports import Store

from .put_all import MOST_ID_BYTES, PAGE, VERSION, Imported, SkippedError, put_all
from .redis_keys import opened, scored

__all__ = ["import_fred84", "simple_name"]


class _Event(Struct):
    payload: msgspec.Raw
    type: str
    log_context: dict[str, str | None] | None = msgspec.field(default=None, name="logContext")


class _Identified(Struct):
    id: str | int


class _Found(Struct):
    key: str
    score: bytes | float | None
    value: bytes


def simple_name(class_name: str) -> str:
    """Return the last part of the name of a Java class: `com.shop.Order$Paid` -> `Paid`."""
    return class_name.rpartition(".")[2].rpartition("$")[2]


async def import_fred84(
    url: str, store: Store, *, prefix: str = "de_", type_of: Callable[[str], str] = simple_name
) -> Imported:
    """Store each event as a message for the handler of its type, due at its next attempt.

    An event that is only in a list is due now. Stop the dispatchers of delayedQueue first. The import removes nothing
    from the data of delayedQueue, and may be repeated: it stores no message again that is pending, or that has ended
    within 24 h. The message id is `<class>###<id>`, the payload is the JSON of the event, and `logContext` becomes
    headers.

    Args:
        url: The URL of the Redis server of delayedQueue.
        store: The store, open.
        prefix: The `dataSetPrefix` of delayedQueue.
        type_of: Returns the event type for the name of a class.

    Raises:
        StoreUnavailableError: Redis or the store did not answer. Repeat the import.
    """
    stored = known = 0
    skipped: dict[str, str] = {}
    async with opened(url) as client:
        async for page in _pages(client, prefix):
            puts: list[Put] = []
            for found in page:
                try:
                    puts.append(_put_of(found, type_of))
                except SkippedError as error:
                    skipped[found.key] = str(error)
            new = await put_all(store, puts)
            stored, known = stored + new, known + len(puts) - new
    return Imported(stored, known, skipped)


async def _pages(client: Client, prefix: str) -> AsyncIterator[list[_Found]]:
    start = 0
    while reply := await client.command("ZRANGE", f"{prefix}delayed_events", start, start + PAGE - 1, "WITHSCORES"):
        pairs = scored(reply)
        values = await client.command("HMGET", f"{prefix}events", *(member for member, _ in pairs))
        yield [
            _Found(member.decode("utf-8", "backslashreplace"), score, value or b"")
            for (member, score), value in zip(pairs, values, strict=True)
        ]
        start += PAGE
    async for name in _lists(client, prefix):
        start = 0
        while values := await client.command("LRANGE", name, start, start + PAGE - 1):
            waiting = [_Found(_key_of(value), None, value) for value in values]
            scores = [await client.command("ZSCORE", f"{prefix}delayed_events", each.key) for each in waiting]
            yield [each for each, score in zip(waiting, scores, strict=True) if score is None]
            start += PAGE


async def _lists(client: Client, prefix: str) -> AsyncIterator[bytes]:
    pattern = "".join(f"\\{each}" if each in "*?[]^\\-" else each for each in prefix) + "*"
    cursor, names = b"0", set[bytes]()
    while True:
        cursor, found = await client.command("SCAN", cursor, "MATCH", pattern, "COUNT", PAGE)
        names.update(found)
        if cursor == b"0":
            break
    for name in sorted(names):
        if await client.command("TYPE", name) in (b"list", "list"):
            yield name


def _key_of(value: bytes) -> str:
    """Return the name that an event of a list has in the zset. If the event cannot be read, return its first bytes."""
    try:
        event = msgspec.json.decode(value, type=_Event)
        return f"{event.type}###{msgspec.json.decode(event.payload, type=_Identified).id}"
    except (msgspec.MsgspecError, UnicodeError):
        return value[:100].decode("utf-8", "backslashreplace")


def _put_of(found: _Found, type_of: Callable[[str], str]) -> Put:
    if not found.value:
        raise SkippedError("it has no content")
    try:
        event = msgspec.json.decode(found.value, type=_Event)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise SkippedError(f"it cannot be read: {error}") from None
    if not 0 < len(found.key.encode()) <= MOST_ID_BYTES:
        raise SkippedError(f"its key cannot be an id: allowed are 1 to {MOST_ID_BYTES} bytes")
    headers = {name: value.encode() for name, value in (event.log_context or {}).items() if value is not None}
    envelope = Envelope(
        found.key, type_of(event.type), encoding="json", payload=bytes(event.payload), headers=headers, version=VERSION
    )
    return Put(new_op(), envelope, _due_of(found.score), Conflict.newer(VERSION))


def _due_of(score: bytes | float | None) -> At | After:
    if score is None:
        return After(0)
    at_ms = float(score)
    if not abs(at_ms) <= MOST_MS:
        raise SkippedError(f"its time is {at_ms:g}, which is out of range")
    return At(int(at_ms))
