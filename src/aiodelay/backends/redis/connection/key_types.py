"""The Redis types of a namespace's keys, and a search for a key that another program has overwritten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from aiodelay.backends.redis.records.keys import Keys

from .client import Client
from .faults import Fault
from .scripts import Arg

__all__ = ["KEY_TYPES", "KeyType", "overwritten_key"]

KeyType: TypeAlias = Literal["hash", "set", "stream", "string", "zset"]

KEY_TYPES: Final[Mapping[str, KeyType]] = {
    "lanes": "hash",
    "msg": "hash",
    "dead": "hash",
    "graves": "zset",
    "graves:ids": "zset",
    "done": "zset",
    "series": "zset",
    "src": "hash",
    "holds": "set",
    "late": "zset",
    "late:held": "zset",
    "parked": "set",
    "workers": "hash",
    "wake": "stream",
    "journal": "stream",
    "meta": "hash",
    "trials": "hash",
    "appended": "set",
    "superseded": "zset",
    "superseded:ids": "hash",
    "retries": "hash",
    "pulses": "hash",
    "logs": "set",
    "limits": "hash",
    "superseded:keys": "hash",
    "due:<lane>": "zset",
    "leased:<lane>": "zset",
    "blocked:<lane>": "zset",
    "why:<lane>": "hash",
    "queues:<lane>": "zset",
    "turns:<lane>": "zset",
    "inflight:<lane>": "hash",
    "running:<lane>": "zset",
    "marks:<lane>": "hash",
    "parked:<lane>:<address>": "zset",
    "req:<worker>": "string",
    "held:<incarnation>": "zset",
}
"""The type of each key. The names leave out the namespace. `<lane>` stands for the number of a lane."""
_READS: Final[Mapping[KeyType, tuple[str, tuple[Arg, ...]]]] = {
    "hash": ("HLEN", ()),
    "set": ("SCARD", ()),
    "stream": ("XRANGE", ("-", "+", "COUNT", 1)),
    "string": ("GET", ()),
    "zset": ("ZCARD", ()),
}
"""For each type, a read command that fails on every other type. The Redis user needs these commands anyway."""


async def overwritten_key(client: Client, keys: Keys) -> str | None:
    """Find a key of a namespace that has the wrong type. Describe the problem and its remedy.

    Returns:
        The text for the error message, or None if all keys have the right type.

    Raises:
        Fault: The server did not answer.
    """
    async for name, kind in _names(client, keys):
        command, rest = _READS[kind]
        if await _is_refused(client, command, keys.key(name), *rest):
            return (
                f"key {keys.key(name)!r} holds no {kind}, so another program has written it; "
                "restore, rename or delete the key, or use another namespace"
            )
    return None


async def _names(client: Client, keys: Keys) -> AsyncIterator[tuple[str, KeyType]]:
    """Yield the names and types of all keys that may exist.

    The names without `<` come first. Four of these keys, `lanes`, `workers`, `pulses` and `parked`, list the lanes,
    workers, incarnations and addresses in the other names.
    """
    for name, kind in KEY_TYPES.items():
        if "<" not in name:
            yield name, kind
    lanes = await client.command("HGETALL", keys.key("lanes"))
    known = {
        "<lane>": list(lanes.values()) if isinstance(lanes, dict) else lanes[1::2],
        "<worker>": await client.command("HKEYS", keys.key("workers")),
        "<incarnation>": await client.command("HKEYS", keys.key("pulses")),
        "<lane>:<address>": await client.command("SMEMBERS", keys.key("parked")),
    }
    for name, kind in KEY_TYPES.items():
        prefix, mark, _ = name.partition("<")
        for each in known[name.removeprefix(prefix)] if mark else ():
            yield f"{prefix}{_text(each)}", kind


def _text(name: Any) -> str:  # noqa: ANN401 - redis-py's
    return bytes(name).decode("utf-8", "surrogateescape")


async def _is_refused(client: Client, *command: Arg) -> bool:
    try:
        await client.command(*command)
    except Fault as fault:
        if not fault.is_damage:
            raise
        return True
    return False
