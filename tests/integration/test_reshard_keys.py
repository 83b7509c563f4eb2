"""`aiodelay reshard` forgets no key: it moves or deletes each key of a namespace, or the key may stay."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from uuid import uuid4

import pytest
from redis import Redis

from aiodelay.backends.redis.connection.key_types import KEY_TYPES
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put
from aiodelay.redis import ShardedStore
from tests.support.servers import RedisServer, redis_programs, start

NOT_MOVED: Mapping[str, str] = {
    "src": "all new shards get positions made from those of all former shards",
    "limits": "a namespace with limits has one shard",
    **dict.fromkeys(("queues:<lane>", "turns:<lane>", "inflight:<lane>", "running:<lane>", "marks:<lane>"), "limits"),
    "superseded:keys": "limits",
    "journal": "each shard has its own entries",
    "wake": "its entries are hints",
    **dict.fromkeys(("pulses", "held:<incarnation>", "req:<worker>"), "a process records its claims again"),
    "workers": "the mover writes those of the first shard into all new shards",
    "logs": "logs are in the first shard",
}
"""Why the entries of a key do not move to another shard."""
NOT_DELETED: Mapping[str, str] = {
    "logs": "logs are in the first shard, which stays",
    "meta": "its layout and the number of the mover keep out processes that slept through the move",
    "pulses": "its fields are deleted one by one",
    "parked:<lane>:<address>": "all its entries have moved",
    "req:<worker>": "it expires",
}
"""Why a key of a shard that ends is not deleted."""


@pytest.fixture(params=redis_programs()[:1], ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


def kind_of(name: str) -> str:
    """Return the entry of `KEY_TYPES` for a key without its tag, or the name itself."""
    patterns = {kind: re.sub(r"<[^>]+>", "[^:]+", kind) for kind in KEY_TYPES}
    return next((kind for kind, pattern in patterns.items() if re.fullmatch(pattern, name)), name)


async def fill(url: str, namespace: str) -> None:
    """Store messages in both shards, so that both have a lane."""
    async with ShardedStore(f"{url}?shards=2", namespace=namespace) as store:
        await store.apply([Put(new_op(), Envelope(f"m-{i}", "orders"), After(3_600_000)) for i in range(20)])


def test_a_shard_that_ends_leaves_no_key_behind(server: RedisServer) -> None:
    namespace = uuid4().hex
    tag = f"{{{namespace}:01}}:"
    asyncio.run(fill(server.url, namespace))
    client = Redis(port=server.port)
    client.sadd(f"{tag}parked", "1:somewhere")
    client.hset(f"{tag}pulses", "incarnation", 1)
    read: set[str] = set()
    deleted: set[str] = set()
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        asyncio.run(reshard(server.url, namespace, 1, lambda seen, of: None))
        client.echo("the end")
        for each in monitor.listen():
            command = each["command"]
            if command == "ECHO the end":
                break
            name, _, rest = command.partition(" ")
            key = rest.split(" ")[0]
            if key.startswith(tag):
                found = deleted if name == "UNLINK" else read
                found.add(kind_of(key.removeprefix(tag)))
    assert KEY_TYPES.keys() - read <= NOT_MOVED.keys() <= KEY_TYPES.keys()
    assert KEY_TYPES.keys() - deleted == NOT_DELETED.keys()
    assert client.keys(f"{tag}*") == [f"{tag}meta".encode()]
    assert client.hkeys(f"{tag}meta") == [b"schema", b"mover"]
