"""`RedisLimits`: the store's methods for limits of lanes and of their keys. The scripts keep the limits."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any

import msgspec

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.core import limits as rules
from aiodelay.core.limits import Marks, Use
from aiodelay.core.values import NO_LIMITS, Lane, LaneLimits, Limit, LimitedKey
from aiodelay.core.values.limits import ADDRESS
from aiodelay.core.version import __version__

from .inspection import Inspection

__all__ = ["RedisLimits"]

MOST_KEYS = 50_000
"""The largest number of keys with waiting messages that one list of keys reads."""
_BEGINNING = struct.Struct(">6sI")


class RedisLimits(Inspection):
    """Implements `Limits` for the store."""

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        """Set the limits of a lane. Limits without any number end them.

        The limits of an operator wait for the durability level of the URL. Declared limits do not, because each process
        declares them again when it starts.

        The store then sorts the messages of the lane by key, some hundred in each call, until all are sorted. If this
        process ends meanwhile, claims and housekeeping go on with it.
        """
        given, none = msgspec.json.encode(limits), msgspec.json.encode(NO_LIMITS)
        arguments: list[Arg] = [_counted_by(limits), _packed(limits.whole), _packed(limits.each), given, none]
        first = [lane, *arguments, int(is_declared), __version__]
        is_left = await self.run("set_limits", first, durable=not is_declared)
        self.waiters.wake()
        while is_left:
            is_left = await self.run("set_limits", [lane])
        self.waiters.wake()

    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        """Return the limits of all lanes that have any, or the limits that code declared last."""
        lanes, found = await self._commands(
            [("HGETALL", self._keys.key("lanes")), ("HGETALL", self._keys.key("limits"))]
        )
        field = "declared" if is_declared else "limits"
        names = {number: name.decode() for name, number in _pairs(lanes).items()}
        given = {names[number]: _limits_in(value, field) for number, value in _pairs(found).items() if number in names}
        return {lane: given[lane] for lane in sorted(given) if given[lane]}

    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        """List keys of a lane that have messages in flight or waiting because of a limit, most waiting messages first.

        If more than 50,000 keys have waiting messages, the list is made from about 50,000 of them.
        """
        given = (await self.limits()).get(lane)
        if given is None:
            return []
        found: dict[bytes, LimitedKey] = {}
        for what, first in (("turns", b"0"), ("running", b"")) if key is None else (("key", key),):
            after = first
            while True:
                reply = await self.run("limited_keys", [lane, what, after])
                found |= {each.key or b"": each for each in _keys_in(lane, given, reply)}
                after = reply[1]
                if not after or len(found) >= MOST_KEYS:
                    break
        shown = (each for each in found.values() if each.running or each.waiting)
        return nsmallest(limit, shown, key=lambda each: (-each.waiting, -each.running, each.key or b""))


def _counted_by(limits: LaneLimits) -> str:
    """Return what each message counts under, as `set_limits.lua` expects it."""
    if not limits:
        return ""
    if limits.each is None:
        return "lane"
    return "address" if limits.each.key == ADDRESS else "key"


def _packed(limit: Limit | None) -> bytes:
    numbers: dict[str, int] = {}
    if limit is not None and limit.concurrency is not None:
        numbers["concurrency"] = limit.concurrency
    if limit is not None and limit.window is not None:
        numbers["most"], numbers["span"] = limit.window
    return msgspec.msgpack.encode(numbers)


def _limits_in(value: bytes, field: str) -> LaneLimits:
    """Decode the limits in a field of a lane. Older versions wrote an empty array for a lane that never had limits."""
    known = msgspec.msgpack.decode(value)
    written = known.get(field) if isinstance(known, dict) else None
    return msgspec.json.decode(written, type=LaneLimits) if written else NO_LIMITS


def _keys_in(lane: Lane, limits: LaneLimits, reply: Sequence[Any]) -> list[LimitedKey]:
    now_ms, _, running, marks, *rows = reply
    now_ms = int(now_ms)
    whole = Use(int(running), _marks_in(marks))
    found: list[LimitedKey] = []
    for name, own, number, place, own_marks in zip(*[iter(rows)] * 5, strict=True):
        use, waiting = Use(int(own), _marks_in(own_marks)), int(number)
        why, until_ms = rules.why_waiting(limits, whole, use, now_ms) if waiting else ("", None)
        key = None if limits.each is None else name
        found.append(LimitedKey(lane, key, use.running, waiting, why, until_ms, int(place) if waiting else None))
    return found


def _marks_in(written: bytes) -> Marks:
    return tuple((int.from_bytes(at, "big"), number) for at, number in _BEGINNING.iter_unpack(written))


def _pairs(reply: Mapping[bytes, bytes] | Sequence[bytes]) -> Mapping[bytes, bytes]:
    """Return the fields of a hash: a list with protocol 2, a map with protocol 3."""
    return reply if isinstance(reply, Mapping) else dict(zip(reply[::2], reply[1::2], strict=True))
