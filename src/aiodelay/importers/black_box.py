"""Takes over what a delay box of the article "Implementing delayed message support with Apache Kafka" keeps in Redis.

Its keys: zset `blackbox-delay-key`, a UUID -> when it is due; and for each UUID a string, JSON `{"topic", "message"}`.
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
    """Move each message that waits in a black box into a store, for the sink `kafka`; its id is the UUID.

    First the zset is renamed, to `<key>:taken`, so that a box which still runs finds nothing more; what it is just
    delivering then, up to ten messages that are due, may come out of both, so stop it before. A message leaves Redis
    once it is stored. So this may be repeated: after it was interrupted, or for what a box that still takes requests in
    has added since.

    What cannot be taken over stays, in `<key>:taken`: it has no content any more (the article lets that expire 15 min
    after it is due), is not of its form, or is for a topic that is not allowed.

    Args:
        url: Of the Redis server that the black box uses.
        store: Open; on Kafka, owning all partitions.
        allow: Topics that messages may go to.
        key: Its zset.
        unit: What its scores count: seconds since 1970, or ms.

    Raises:
        ConfigurationError: There is no such unit.
        StoreUnavailableError: One of the two does not answer; repeat it.
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
    """Return the puts that members of the zset come to, and why others come to none."""
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
        raise SkippedError(f"its time is {score:g}, which is far from now if it counts {'ms' if unit_ms == 1 else 's'}")
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
        raise SkippedError(f"as an id it is not 1 to {MOST_ID_BYTES} bytes of text") from None
    envelope = Envelope(message_id, SINK, body.topic, payload=payload, version=VERSION)
    return Put(NO_OP, envelope, At(due_ms), Conflict.newer(VERSION))
