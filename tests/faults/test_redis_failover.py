"""F10: the primary dies and a replica takes its place: what each durability level may lose, and that it loses no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aiodelay.identifiers import new_op
from aiodelay.model import (
    After,
    Cancel,
    Command,
    Envelope,
    Outcome,
    Put,
    Query,
    Refused,
    SourcePosition,
    Stored,
    Unknown,
)
from aiodelay.redis import RedisStore
from tests.support.proxy import Proxy, proxied
from tests.support.servers import RedisServer, redis_programs, replicate, start

LANE = "work"


class Pair:
    """A primary and its replica, with a proxy between them."""

    def __init__(self, primary: RedisServer, replica: RedisServer, link: Proxy) -> None:
        self.primary, self.replica, self.link = primary, replica, link

    def store(self, durability: str) -> RedisStore:
        """A client of its own, as another process has it."""
        return RedisStore(f"{self.primary.url}?durability={durability}&timeout_ms=300", namespace="faults")


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[RedisServer, RedisServer]]:
    options = ("--repl-ping-replica-period", "1", "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
    primary, replica = (start(request.param.program, *options) for _ in range(2))
    yield primary, replica
    primary.stop()
    replica.stop()


@asynccontextmanager
async def paired(servers: tuple[RedisServer, RedisServer]) -> AsyncIterator[Pair]:
    primary, replica = servers
    async with proxied(primary.port) as link:
        await asyncio.to_thread(replicate, replica, link.port)
        yield Pair(primary, replica, link)


def put(message_id: str) -> Put:
    return Put(new_op(), Envelope(message_id, LANE, payload=b"p"), After(60_000))


async def do(store: RedisStore, command: Command, *, source: SourcePosition | None = None) -> Outcome:
    (outcome,) = await store.apply([command], source=source)
    return outcome


async def ids(store: RedisStore) -> set[str]:
    return {each.record.id for each in await store.search(Query(limit=1000))}


async def fail_over(pair: Pair) -> None:
    pair.primary.kill()
    pair.replica.command("REPLICAOF", "NO", "ONE")


def test_f10_what_was_called_replicated_outlives_the_primary(servers: tuple[RedisServer, RedisServer]) -> None:
    async def play() -> None:
        async with paired(servers) as pair:
            async with pair.store("replicated:1") as store, pair.store("memory") as careless:
                assert isinstance(await do(store, put("kept")), Stored)
                assert isinstance(await do(store, put("cancelled")), Stored)
                assert isinstance(await do(store, Cancel(new_op(), "cancelled")), Stored)
                pair.link.mode = "black hole"
                assert isinstance(await do(store, put("in doubt")), Unknown)
                assert isinstance(await do(careless, put("lost")), Stored), "as docs/guarantees.md says of `memory`"
            await fail_over(pair)
            async with RedisStore(pair.replica.url, namespace="faults") as store:
                assert await ids(store) == {"kept"}

    asyncio.run(play())


def test_f10_a_repeated_command_is_no_more_done_than_the_first(servers: tuple[RedisServer, RedisServer]) -> None:
    """It writes nothing of its own, and another connection sends it: its answer must wait for the replica all the same."""

    async def play() -> None:
        async with paired(servers) as pair, pair.store("replicated:1") as one, pair.store("replicated:1") as two:
            position = SourcePosition("intake", 1)
            earlier, kept = put("earlier"), put("kept")
            assert isinstance(await do(two, earlier), Stored)
            pair.link.mode = "black hole"
            commands: list[Command] = [put("m"), Cancel(new_op(), "earlier"), Cancel(new_op(), "nothing")]
            for command in commands:
                assert isinstance(await do(one, command), Unknown)
                assert isinstance(await do(two, command), Unknown), "the replica does not have it"
            assert isinstance(await do(one, kept, source=position), Unknown)
            assert isinstance(await do(two, kept, source=position), Unknown)
            pair.link.mode = "pass"
            assert [isinstance(await do(two, command), Stored | Refused) for command in commands] == [True] * 3
            assert await do(two, kept, source=position) == Refused("passed")
            await fail_over(pair)
            async with RedisStore(pair.replica.url, namespace="faults") as store:
                assert await ids(store) == {"m", "kept"}

    asyncio.run(play())


def test_a_full_server_answers_repeated_commands_all_the_same(servers: tuple[RedisServer, RedisServer]) -> None:
    """`full` means surely not written: it must not be said of what was."""

    async def play() -> None:
        async with RedisStore(servers[0].url, namespace="faults") as store:
            command = put("m")
            first = await do(store, command)
            servers[0].command("CONFIG", "SET", "maxmemory", "100kb")
            assert isinstance(await do(store, put("more")), Refused)
            assert await do(store, command) == first

    asyncio.run(play())
