"""Old data of Redis: the keys of two namespaces and of a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace
from redis import Redis

from aiodelay.ports import Store
from aiodelay.redis import open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import Stage

from .answers import OldData, plain
from .redis_ends import read_ends, tell_ends
from .redis_keys import Key, load, read_keys, read_lines, written
from .story import FAR, JOURNAL, Told, tell

__all__ = ["OldRedis", "of_the_store"]

FILE, NAMESPACE, SHOP = "keys.jsonl", "old-data", "old-data-shop"
OURS = "*old-data*"
_SMALL_MAPS = range(0x80, 0x90)
"""The first bytes of MessagePack maps with up to 15 pairs."""
_TAG = b"{old-data:00}:"
_OCCURRENCE = b"\x03"  # the first byte of the id of an occurrence
_OF_THE_SERVER = (b"fanout:", b"log:", b"logs", b"wake")
"""The suffixes of keys with times of the server's clock, or with names of processes."""


class OldRedis(OldData):
    """The keys of an old version.

    Args:
        fixture: The folder with the keys.
        url: The URL of the server that gets the keys.
    """

    wakes_other_processes: ClassVar[bool] = True

    def __init__(self, fixture: Path, url: str) -> None:
        self._fixture, self.url = fixture, url
        self.namespace: str = NAMESPACE

    async def restore(self) -> None:
        """Write the keys into the server. They replace its data."""
        self.clear()
        with Redis.from_url(self.url) as server:
            load(server, self.old_keys())

    def clear(self) -> None:
        """Delete the keys from the server."""
        with Redis.from_url(self.url) as server:
            for key in server.keys(OURS):
                server.delete(key)

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        """Return a store on the keys."""
        return open_store(f"{self.url}?journal={journal}", namespace=NAMESPACE, clock=clock)

    def shop(self) -> Store:
        """Return a store on another namespace of the server."""
        return open_store(self.url, namespace=SHOP, clock=VirtualClock())

    def old_keys(self) -> list[Key]:
        """Return the keys of the old version."""
        return list(read_lines((self._fixture / FILE).read_bytes()))

    def keys(self) -> list[Key]:
        """Return the keys that the server has now."""
        with Redis.from_url(self.url) as server:
            return read_keys(server, OURS)

    async def write(self) -> Told:
        """Save the keys while the processes of the story have the store open, as if they were killed."""
        self.clear()
        async with Stage(self, journal=JOURNAL) as stage:
            told = await self.tell(stage)
            (self._fixture / FILE).write_bytes(written(self.keys()))
        return told

    async def tell(self, stage: Stage) -> Told:
        """Play the story, also in lists and topics, next to a message of another namespace."""
        async with self.shop() as shop:
            await shop.apply([stage.put("plain", FAR, payload=b"of the shop")])
        told = await tell(stage)
        await tell_ends(stage, self.url, NAMESPACE)
        return told

    async def ends(self, told: Told) -> Any:  # noqa: ANN401 - what JSON can hold
        """Return the content of the lists, topics and logs of a new copy."""
        async with self.opened(told) as stage:
            return plain(await read_ends(stage, self.url, NAMESPACE))


def of_the_store(keys: Sequence[Key]) -> dict[bytes, Key]:
    """Return the keys of a store, without random values, without the order in bodies, and without times to live."""
    found = [each for each in keys if each.key.startswith(_TAG)]
    kept = [each for each in found if not each.key.removeprefix(_TAG).startswith(_OF_THE_SERVER)]
    return {each.key: replace(each, ttl_ms=None, items=_compared(each)) for each in kept}


def _compared(key: Key) -> list[tuple[bytes, Any]]:
    if key.key.removeprefix(_TAG) in (b"msg", b"dead"):
        return [(name, _without_put_due(name, *_without_order(value))) for name, value in key.items]
    if key.key.removeprefix(_TAG) == b"journal":  # the old version used another word
        return [(number, _replaced(fields, b"in flight", b"in_flight")) for number, fields in key.items]
    return [(name, value) for name, value in key.items if name != b"uuid"]


def _without_put_due(name: bytes, values: bytes, body: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
    """Remove the due time of the put of an occurrence, which the old version did not keep."""
    is_occurrence = name.startswith(_OCCURRENCE)
    return values, {key: value for key, value in body.items() if not (is_occurrence and key == "d")}


def _replaced(fields: Sequence[bytes], old: bytes, new: bytes) -> list[bytes]:
    return [new if each == old else each for each in fields]


def _without_order(value: bytes) -> tuple[bytes, Mapping[str, Any]]:
    """Split off the body of a record, a map at the end of the value, because scripts write its keys in any order."""
    for at, byte in enumerate(value):
        if byte in _SMALL_MAPS:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                return value[:at], msgspec.msgpack.decode(value[at:], type=dict[str, Any])
    raise AssertionError(f"no body: {value!r}")
