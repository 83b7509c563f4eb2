"""Save the keys of a Redis server as lines of JSON, and load them into any Redis or Valkey.

Older servers and other products refuse the format of `DUMP`, so a line has the type and the content of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from redis import Redis

__all__ = ["Key", "load", "read_keys", "read_lines", "written"]


class Key(Struct, frozen=True, omit_defaults=True):
    """A key of a server.

    Attributes:
        key: The name of the key.
        type: `string`, `list`, `hash`, `set`, `zset` or `stream`.
        items: The content, in pairs: for a hash, names and values; for a sorted set, members and scores; for a stream,
            ids and fields. For other types, the second part of each pair is null.
        ttl_ms: The time to live; None = until it is deleted.
        last_id: The last id that a stream has assigned.
    """

    key: bytes
    type: str
    items: list[tuple[bytes, Any]]
    ttl_ms: int | None = None
    last_id: bytes | None = None


def read_keys(server: Redis, pattern: str) -> list[Key]:
    """Return the keys whose names match, by name."""
    names: Any = server.keys(pattern)
    return [_read(server, key) for key in sorted(names)]


def _read(server: Any, key: bytes) -> Key:  # noqa: ANN401 - redis-py types replies as bytes or text
    kind = server.type(key).decode()
    ttl_ms = server.pttl(key)
    last_id = server.xinfo_stream(key)["last-generated-id"] if kind == "stream" else None
    return Key(key, kind, _READ[kind](server, key), ttl_ms if ttl_ms > 0 else None, last_id)


def _read_zset(server: Any, key: bytes) -> list[tuple[bytes, Any]]:  # noqa: ANN401 - as above
    return [(member, _number(score)) for member, score in server.zrange(key, 0, -1, withscores=True)]


def _number(score: float) -> int | float:
    return int(score) if score.is_integer() else score


def _read_stream(server: Any, key: bytes) -> list[tuple[bytes, Any]]:  # noqa: ANN401 - as above
    entries = server.execute_command("XRANGE", key, "-", "+")
    return [(entry_id, _flat(fields)) for entry_id, fields in entries]


def _flat(fields: Mapping[bytes, bytes] | Iterable[bytes]) -> list[bytes]:
    return [part for pair in fields.items() for part in pair] if isinstance(fields, Mapping) else list(fields)


_READ: Mapping[str, Callable[[Any, bytes], list[tuple[bytes, Any]]]] = {
    "string": lambda server, key: [(server.get(key), None)],
    "list": lambda server, key: [(each, None) for each in server.lrange(key, 0, -1)],
    "hash": lambda server, key: sorted(server.hgetall(key).items()),
    "set": lambda server, key: [(each, None) for each in sorted(server.smembers(key))],
    "zset": _read_zset,
    "stream": _read_stream,
}


def written(keys: Iterable[Key]) -> bytes:
    """Return keys as lines."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in keys)


def read_lines(lines: bytes) -> Iterator[Key]:
    """Yield the keys that are saved in lines."""
    for line in lines.splitlines():
        yield _decoded(msgspec.json.decode(line, type=Key))


def _decoded(key: Key) -> Key:
    """Return a key with its untyped values decoded to bytes."""
    read = _VALUES.get(key.type, lambda value: value)
    return msgspec.structs.replace(key, items=[(item, read(value)) for item, value in key.items])


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "hash": lambda value: msgspec.convert(value, bytes),
    "stream": lambda value: msgspec.convert(value, list[bytes]),
}


def load(server: Redis, keys: Iterable[Key]) -> None:
    """Write keys into a server that does not have them."""
    send: Any = server.execute_command
    for each in keys:
        for command in _commands(each):
            send(*command)


def _commands(key: Key) -> Iterator[list[Any]]:
    name = key.key
    if key.type == "stream":
        for entry_id, fields in key.items:
            yield ["XADD", name, entry_id, *fields]
        if not key.items:  # on Redis 6.2, this is the only way to make an empty stream
            yield ["XADD", name, key.last_id, "a", "b"]
            yield ["XDEL", name, key.last_id]
        yield ["XSETID", name, key.last_id]
    elif key.type == "zset":
        yield ["ZADD", name, *(part for member, score in key.items for part in (score, member))]
    elif key.type == "hash":
        yield ["HSET", name, *(part for pair in key.items for part in pair)]
    else:
        command = {"string": "SET", "list": "RPUSH", "set": "SADD"}[key.type]
        yield [command, name, *(item for item, _ in key.items)]
    if key.ttl_ms is not None:
        yield ["PEXPIRE", name, key.ttl_ms]
