"""Imports the messages of a black box: the delay box of an article.

The article is "Implementing delayed message support with Apache Kafka". Its box keeps messages in Redis. The zset
`blackbox-delay-key` maps a UUID to its due time. For each UUID there is a string with JSON: `{"topic", "message"}`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil
from typing import Literal

import msgspec
from msgspec import Struct

from aiodelay.backends.redis.connection.client import Client
from aiodelay.core.durations import MAX_HORIZON_MS
from aiodelay.core.transitions import NO_OP
from aiodelay.core.validation import check_id
from aiodelay.core.values import At, Conflict, Envelope, Put
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.ports import Store

from .put_all import MOST_ID_BYTES, PAGE, VERSION, Imported, SkippedError, put_all
from .redis_keys import opened, scored

__all__ = ["take_over_black_box"]

SINK = "kafka"
_UNITS = {"s": 1000, "ms": 1}
TAKE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return end
if redis.call('EXISTS', KEYS[2]) == 0 then return redis.call('RENAME', KEYS[1], KEYS[2]) end
redis.call('ZUNIONSTORE', KEYS[2], 2, KEYS[1], KEYS[2])
redis.call('DEL', KEYS[1])
"""


class _Body(Struct):
    topic: str
    message: msgspec.Raw


async def take_over_black_box(
    url: str, store: Store, *, allow: Collection[str], key: str = "blackbox-delay-key", unit: Literal["s", "ms"] = "s"
) -> Imported:
    """Move each waiting message of a black box into a store, for the sink `kafka`. The UUID becomes the id.

    Stop the box first. The import renames the zset to `<key>:taken`, so a box that still runs finds no more messages.
    Up to ten due messages that the box is delivering during the rename may be delivered twice. The import removes a
    message from Redis after it has stored the message. So the import may be repeated: after an interruption, or if a
    box that still ran has added messages.

    Messages that cannot be imported stay in `<key>:taken`. The reasons are: the message has no content any more (the
    article lets the content expire 15 min after the due time), its content has another form, its topic is not allowed,
    its due time is too far from now, or its UUID cannot be an id.

    Args:
        url: The URL of the Redis server of the black box.
        store: The store, open. On Kafka it must own all partitions.
        allow: The topics to which messages may go.
        key: The key of the zset.
        unit: The unit of the zset's scores: seconds since 1970, or milliseconds.

    Raises:
        ConfigurationError: The unit is unknown.
        StoreUnavailableError: Redis or the store did not answer. Repeat the import.
    """
    if unit not in _UNITS:
        raise ConfigurationError("unit", shortened(unit), "'s' or 'ms'")
    taken, stored, known = f"{key}:taken", 0, 0
    skipped: dict[str, str] = {}
    async with opened(url) as client:
        await client.command("EVAL", TAKE, 2, key, taken)
        start = 0
        while reply := await client.command("ZRANGE", taken, start, start + PAGE - 1, "WITHSCORES"):
            puts, left = await _read(client, scored(reply), allow, _UNITS[unit], store.now_ms())
            new = await put_all(store, puts)
            stored, known = stored + new, known + len(puts) - new
            if puts:
                ids = [put.id for put in puts]
                await client.command("ZREM", taken, *ids)
                await client.command("UNLINK", *ids)
            skipped |= left
            start += len(left)
    return Imported(stored, known, skipped)


async def _read(
    client: Client, waiting: Sequence[tuple[bytes, bytes | float]], allow: Collection[str], unit_ms: int, now_ms: int
) -> tuple[list[Put], dict[str, str]]:
    """Return the commands that store the messages, and for each message that cannot be imported, the reason."""
    contents = await client.command("MGET", *(member for member, _ in waiting))
    puts: list[Put] = []
    left: dict[str, str] = {}
    for (member, score), content in zip(waiting, contents, strict=True):
        try:
            puts.append(_put_of(member, content, _due_ms(float(score), unit_ms, now_ms), allow))
        except SkippedError as error:
            left[member.decode("utf-8", "backslashreplace")] = str(error)
    return puts, left


def _due_ms(score: float, unit_ms: int, now_ms: int) -> int:
    if not -MAX_HORIZON_MS <= score * unit_ms - now_ms <= MAX_HORIZON_MS:
        raise SkippedError(
            f"its time is {score:g}, too far from now if the unit is {'ms' if unit_ms == 1 else 's'}; check the unit"
        )
    return ceil(score * unit_ms)


def _put_of(member: bytes, content: bytes | None, due_ms: int, allow: Collection[str]) -> Put:
    if not content:
        raise SkippedError("it has no content any more")
    try:
        body = msgspec.json.decode(content, type=_Body)
        payload = bytes(body.message)
        payload = payload if payload[:1] in b"{[" else msgspec.json.decode(payload, type=str).encode()
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SkippedError(f"it cannot be read: {error}") from None
    if body.topic not in allow:
        raise SkippedError(f"its topic {shortened(body.topic)} is not allowed")
    try:
        message_id = check_id(member.decode())
    except (UnicodeDecodeError, InputError):
        raise SkippedError(
            f"its key cannot be an id: allowed are 1 to {MOST_ID_BYTES} bytes of text without control characters, not "
            "ending in '~' and ten or more digits"
        ) from None
    envelope = Envelope(message_id, SINK, body.topic, payload=payload, version=VERSION)
    return Put(NO_OP, envelope, At(due_ms), Conflict.newer(VERSION))
