"""`Mover`: moves the entries of one shard's keys to the shards that store them under another number of shards.

No process changes the keys meanwhile. The mover copies entries first and deletes them then, some hundred at a time. A
copy has reached its level of durability before the mover deletes the entry. To copy an entry again changes nothing, so
a mover that was killed is simply run again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from aiodelay.backends.redis.records.keys import FIXED, Keys
from aiodelay.backends.redis.records.layouts import PLACED_BYTE, UNREADABLE, size_of, span
from aiodelay.backends.redis.records.shards import shard_of_member

from .calls import all_of
from .move_client import Entry, MoveClient, pairs_of

__all__ = ["Mover", "lane_of_letter"]

AT_ONCE = 600
REVISION_BYTES = size_of("LETTER_KEY")
_LANE = span("RECORD", "lane")
_SEQUENCE, _RECORD = span("MEMBER", "sequence"), span("PLACED_VALUE", "record")
_REMOVED = (
    *("graves:ids", "series", "superseded", "superseded:ids", "retries", "trials", "limits"),
    *("superseded:keys", "appended"),
)
"""Keys of a shard without a lane or a window in their names, in addition to `FIXED` and `_NAMING`."""
_NAMING = ("done", "lanes")
"""Keys that name the windows and lanes of which other keys have the names."""


class Mover:
    """Moves the entries of one shard.

    Args:
        client: Reads and writes the keys.
        namespace: The namespace.
        source: The number of the shard.
        shards: The new number of shards.
        told: Called with the number of messages of each batch, also if they stay in the shard. It may raise.
    """

    def __init__(
        self, client: MoveClient, namespace: str, source: int, shards: int, told: Callable[[int], Awaitable[None]]
    ) -> None:
        self._client, self._namespace, self._source, self._shards, self._told = client, namespace, source, shards, told
        self._keys = Keys(namespace, source)
        self._targets = [each for each in range(shards) if each != source]
        self._lanes: dict[int, bytes] = {}
        self._numbers: dict[int, dict[int, int]] = {}

    def _key(self, name: str, shard: int | None = None) -> str:
        return (self._keys if shard is None else Keys(self._namespace, shard)).key(name)

    async def move(self) -> None:
        """Move all entries that other shards store under the new number of shards."""
        await self._number_lanes()
        await self._end_pulses()
        await self._copy_shared()
        await self._hash("msg", _whole, self._value, counts=True)
        for number in self._lanes:
            await self._zset(f"due:{number}", _of_member)
            await self._zset(f"leased:{number}", _whole)
        await self._move_parked()
        for name in ("late", "late:held", "series"):
            await self._zset(name, _whole)
        await self._zset("superseded", lambda each: each[REVISION_BYTES:])
        await self._set("appended", _whole)
        for name in ("superseded:ids", "retries", "trials"):
            await self._hash(name, _whole)
        await self._hash("dead", _of_letter, self._letter, counts=True)
        await self._zset("graves", _of_letter)
        await self._zset("graves:ids", lambda each: _of_letter(each[2:]))
        await self._move_windows()

    async def remove(self) -> None:
        """Delete the keys of a shard that has no messages left. `_NAMING` goes last: a repetition reads it.

        The fields `schema` and `mover` stay for ever. So the scripts of a process that has not followed the move are
        still refused, and so are late writes of an earlier mover.
        """
        await self._number_lanes()
        windows = await self._client.read("ZRANGE", self._key("done"), 0, -1)
        names = [*(set(FIXED) - {*_NAMING, "meta"}), *_REMOVED, *(_window(each) for each in windows)]
        for number in self._lanes:
            names += [f"{kind}:{number}" for kind in ("due", "leased", "blocked", "why", "queues", "turns")]
            names += [f"{kind}:{number}" for kind in ("inflight", "running", "marks")]
        for name in (*names, *_NAMING):
            await self._client.write("UNLINK", self._key(name))
        fields = await self._client.read("HKEYS", self._key("meta"))
        if others := [each for each in fields if each not in (b"schema", b"mover")]:
            await self._client.write("HDEL", self._key("meta"), *others)

    async def _end_pulses(self) -> None:
        """Delete all incarnations: processes take new ones after the move, and until then nobody declares one dead."""
        for incarnation in await self._client.read("HKEYS", self._key("pulses")):
            await self._client.write("UNLINK", self._key(f"held:{incarnation.decode()}"))
            await self._client.write("HDEL", self._key("pulses"), incarnation)

    # --- lanes and shared data ----------------------------------------------------------------------------

    async def _number_lanes(self) -> None:
        """Give each lane of this shard a number in the other shards too."""
        own = pairs_of(await self._client.read("HGETALL", self._key("lanes")))
        self._lanes = {int(number): name for name, number in sorted(own, key=lambda each: int(each[1]))}
        for target in self._targets:
            known = dict(pairs_of(await self._client.read("HGETALL", self._key("lanes", target))))
            for name in self._lanes.values():
                if name not in known:
                    known[name] = b"%d" % (len(known) + 1)
                    await self._client.write("HSET", self._key("lanes", target), name, known[name])
            self._numbers[target] = {number: int(known[name]) for number, name in self._lanes.items()}

    async def _copy_shared(self) -> None:
        """Copy pauses, blocked addresses and counters to all shards."""
        sequence, claims, parity = await self._client.read("HMGET", self._key("meta"), "seq", "claims", "parity")
        holds = await self._client.read("SMEMBERS", self._key("holds"))
        for target in self._targets:
            meta = self._key("meta", target)
            others = await self._client.read("HMGET", meta, "seq", "claims")
            for name, own, other in zip(("seq", "claims"), (sequence, claims), others, strict=True):
                if int(own or 0) > int(other or 0):
                    await self._client.write("HSET", meta, name, own)
            if parity and not others[0]:
                await self._client.write("HSET", meta, "parity", 1)
            elif sequence and not parity:
                await self._client.write("HDEL", meta, "parity")
            if holds:
                await self._client.write(
                    "SADD", self._key("holds", target), *(self._placed(each, target) for each in holds)
                )
                count = await self._client.read("SCARD", self._key("holds", target))
                await self._client.write("HSET", meta, "holds", count)
            await self._copy_blocked(target)

    async def _copy_blocked(self, target: int) -> None:
        for number in self._lanes:
            other = self._numbers[target][number]
            blocked = await self._client.read("ZRANGE", self._key(f"blocked:{number}"), 0, -1, "WITHSCORES")
            known = set(await self._client.read("ZRANGE", self._key(f"blocked:{other}", target), 0, -1))
            if entries := [each for each in pairs_of(blocked) if each[0] not in known]:
                await self._client.write("ZADD", self._key(f"blocked:{other}", target), *_scored(entries))
            for name, why in pairs_of(await self._client.read("HGETALL", self._key(f"why:{number}"))):
                await self._client.write("HSETNX", self._key(f"why:{other}", target), name, why)

    def _placed(self, name: bytes, target: int) -> bytes:
        """Return `<lane>` or `<lane>:<address>` with the number of the lane in another shard."""
        number, colon, address = name.partition(b":")
        return b"%d" % self._numbers[target].get(int(number), int(number)) + colon + address

    # --- messages -----------------------------------------------------------------------------------------

    def _value(self, value: bytes, target: int) -> bytes:
        sequence, rest = value[_SEQUENCE], value[_SEQUENCE.stop :]
        if value and value[0] & PLACED_BYTE:
            start = _RECORD.start
            return value[:start] + _with_lane(value[start:], self._numbers[target])
        return sequence + _with_lane(rest, self._numbers[target])

    def _letter(self, value: bytes, target: int) -> bytes:
        if value[:1] == bytes([UNREADABLE]):
            lane = self._numbers[target].get(int.from_bytes(value[1:3], "big"))
            return value if lane is None else value[:1] + lane.to_bytes(2, "big") + self._value(value[3:], target)
        start = 1 + value[0]
        return value[:start] + _with_lane(value[start:], self._numbers[target])

    async def _move_parked(self) -> None:
        for name in await self._client.read("SMEMBERS", self._key("parked")):
            parked = f"parked:{name.decode('utf-8', 'surrogateescape')}"

            async def moved(target: int, entries: list[Entry], name: bytes = name, parked: str = parked) -> None:
                place = self._placed(name, target)
                key = self._key("parked:", target).encode() + place
                await self._client.write("SADD", self._key("parked", target), place)
                await self._client.write("ZADD", key, *_scored(entries))
                await self._client.write("ZREM", _bytes(self._key(parked)), *(each for each, _ in entries))

            await self._elsewhere("ZSCAN", parked, _of_member, moved)
            if not await self._client.read("EXISTS", _bytes(self._key(parked))):
                await self._client.write("SREM", self._key("parked"), name)

    async def _move_windows(self) -> None:
        """Move the memory of ended messages. The answers to commands have no id: all shards get them."""
        windows = pairs_of(await self._client.read("ZRANGE", self._key("done"), 0, -1, "WITHSCORES"))
        for window, until in windows:
            for target in self._targets:
                await self._client.write("ZADD", self._key("done", target), until, window)
            name = _window(window)
            if window[:1] == b"v":
                await self._hash(name, _whole)
                continue
            async for entries in self._client.scan("HSCAN", self._keys, self._key(name), AT_ONCE):
                answers = [part for pair in entries if pair[0][:1] == b"o" for part in pair]
                for target in self._targets if answers else ():
                    await self._client.write("HSET", self._key(name, target), *answers)
            await self._hash(name, lambda field: field[1:] if field[:1] == b"r" else None)

    # --- entries ------------------------------------------------------------------------------------------

    async def _hash(
        self,
        name: str,
        member_of: Callable[[bytes], bytes | None],
        changed: Callable[[bytes, int], bytes] | None = None,
        *,
        counts: bool = False,
    ) -> None:
        """Move the fields of a hash that belong to other shards."""

        async def moved(target: int, entries: list[Entry]) -> None:
            values = [
                part for field, value in entries for part in (field, changed(value, target) if changed else value)
            ]
            await self._client.write("HSET", self._key(name, target), *values)
            await self._client.write("HDEL", self._key(name), *(field for field, _ in entries))

        await self._elsewhere("HSCAN", name, member_of, moved, counts=counts)

    async def _zset(self, name: str, member_of: Callable[[bytes], bytes | None]) -> None:
        """Move the members of a sorted set that belong to other shards. The set may belong to a lane."""
        kind, colon, lane = name.partition(":")

        async def moved(target: int, entries: list[Entry]) -> None:
            other = f"{kind}:{self._numbers[target][int(lane)]}" if colon and lane.isdecimal() else name
            await self._client.write("ZADD", self._key(other, target), *_scored(entries))
            await self._client.write("ZREM", self._key(name), *(member for member, _ in entries))

        await self._elsewhere("ZSCAN", name, member_of, moved)

    async def _set(self, name: str, member_of: Callable[[bytes], bytes | None]) -> None:
        """Move the members of a small set that belong to other shards."""
        members = [(each, b"") for each in await self._client.read("SMEMBERS", self._key(name))]
        for target, entries in self._by_target(members, member_of).items():
            moved = [member for member, _ in entries]
            await self._client.write("SADD", self._key(name, target), *moved)
            await self._client.write("SREM", self._key(name), *moved)

    async def _elsewhere(
        self,
        scan: str,
        name: str,
        member_of: Callable[[bytes], bytes | None],
        moved: Callable[[int, list[Entry]], Coroutine[Any, Any, None]],
        *,
        counts: bool = False,
    ) -> None:
        """Move the entries of a key that belong to other shards, in batches, to all these shards at the same time."""
        async for entries in self._client.scan(scan, self._keys, _bytes(self._key(name)), AT_ONCE):
            for at in range(0, len(entries), AT_ONCE):
                parts = self._by_target(entries[at : at + AT_ONCE], member_of)
                await all_of([moved(target, own) for target, own in parts.items()])
            await self._told(len(entries) if counts else 0)

    def _by_target(
        self, entries: Sequence[Entry], member_of: Callable[[bytes], bytes | None]
    ) -> Mapping[int, list[Entry]]:
        found: dict[int, list[Entry]] = {}
        for entry in entries:
            member = member_of(entry[0])
            target = self._source if member is None else shard_of_member(member, self._shards)
            if target != self._source:
                found.setdefault(target, []).append(entry)
        return found


def _with_lane(record: bytes, numbers: Mapping[int, int]) -> bytes:
    """Return a record with the number that its lane has in another shard."""
    lane = numbers.get(int.from_bytes(record[_LANE], "big"))
    return record if lane is None else record[: _LANE.start] + lane.to_bytes(2, "big") + record[_LANE.stop :]


def lane_of_letter(value: bytes) -> int:
    """Return the number of the lane of a dead letter, from its value in `dead`."""
    lane = value[1:3] if value[:1] == bytes([UNREADABLE]) else value[1 + value[0] :][_LANE]
    return int.from_bytes(lane, "big")


def _whole(name: bytes) -> bytes:
    return name


def _of_member(name: bytes) -> bytes:
    return name[_SEQUENCE.stop :]


def _of_letter(name: bytes) -> bytes:
    return name[:-REVISION_BYTES]


def _window(name: bytes) -> str:
    return f"{'done' if name[:1] == b'o' else 'ended'}:{name[1:].decode()}"


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _scored(entries: Iterable[Entry]) -> list[bytes]:
    return [part for member, score in entries for part in (score, member)]
