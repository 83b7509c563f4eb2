"""docs/formats.md, "Redis topics": its keys, its example for other programs, and the rights of the user."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from aiodelay.backends.redis.connection.scripts import script
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Again, Delivery, Demand, Done, Envelope, Put, Sent, SettleOutcome
from aiodelay.errors import SinkUnavailableError, StoreMismatchError, StoreUnavailableError
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisFanoutSource, RedisStore
from tests.integration.test_redis_page import send
from tests.support.servers import RedisServer, redis_programs, start

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
PAGE = FORMATS.partition("\n## Redis topics\n")[2].partition("\n## ")[0]
EXAMPLE, RIGHTS = re.findall(r"```redis\n(.*?)```", PAGE, re.DOTALL)
STORE_USER = re.findall(r"```redis\n(ACL SETUSER.*?)```", FORMATS, re.DOTALL)[0].split("<password> ")[1].split()


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


@pytest.mark.parametrize("by", ["socket", "redis-cli"])
def test_another_program_registers_publishes_takes_and_settles(server: RedisServer, by: str) -> None:
    cli = (shutil.which("redis-cli") or shutil.which("valkey-cli")) if by == "redis-cli" else None
    answers: list[bytes] = []
    for line in EXAMPLE.splitlines():
        name = line.partition("<")[2].partition(">")[0]
        server.command("SCRIPT", "LOAD", script(name).text.decode())
        answers.append(send(server, line.replace(f"<{name}>", script(name).sha.decode()), cli))
    registered, published, taken, settled = answers
    assert b"new" in registered
    assert published.strip().endswith(b"1")
    assert b"hello" in taken
    assert settled.strip().endswith(b"s")
    assert server.command("EXISTS", "{default:00}:fanout:orders:content") == b":0\r\n"


def test_the_page_names_every_key(server: RedisServer) -> None:
    seen: set[str] = set()

    async def play() -> None:
        async with RedisStore(server.url) as store:
            await use(server.url, lambda: note(store))

    async def note(store: RedisStore) -> None:
        for key in await store.command("KEYS", "*:fanout:*"):
            name = key.decode().partition(":00}:")[2].replace(":orders", ":<topic>").replace("@billing", "@<consumer>")
            seen.add(re.sub(r"taken:.*", "taken:<instance>", re.sub(r"seen:\d+", "seen:<k>", name)))

    asyncio.run(play())
    named = set(re.findall(r"^\| `(\S+)`", PAGE, re.MULTILINE))
    assert seen == named - {"fanout:<topic>:leaving", "fanout:<topic>@<consumer>:trials"}


async def nothing() -> None: ...


async def use(url: str, midway: Callable[[], Awaitable[None]] = nothing) -> None:
    """Use what topics can do; raises if anything of it does not work."""
    async with (
        RedisStore(url, namespace="default") as store,
        RedisFanoutSink(url, max_messages=8) as sink,
        RedisFanoutSource(url) as source,
        RedisFanout(url) as fanout,
    ):
        envelope = Envelope("m", "redis-fanout", "orders", payload=b"p")
        assert await fanout.register("orders", "leaves")
        async with source.feed("orders?consumer=billing&from=oldest", "me", store.put_back, store.now_ms) as feed:
            for i in range(12):
                assert list(await sink.send([Delivery(envelope, f"m/{i}", 1, 1, 1, 0)])) == [Sent()]
            assert (await feed.claim({"lane": Demand(3)}, request="r", lease_ms=15_000)).claims
            await store.apply([Put(new_op(), envelope, After(0))])
            with store.transferring(sink) as moves:
                assert (await moves.transfer(Demand(9))).moved == 1
            assert await fanout.unregister("orders", "leaves")
            claims = list((await feed.claim({"lane": Demand(2)}, request="r2", lease_ms=15_000)).claims)
            ends = [(each.record.id, each.record.revision, each.token) for each in claims]
            settled = await feed.settle([Done(*ends[0]), Again(*ends[1], 10**14, 1, "e")])
            assert set(settled) == {SettleOutcome.SETTLED}
            await midway()
            (billing,) = await fanout.consumers("orders")
            assert (billing.retrying, billing.memory > 0) == (1, True)
            assert [each.name for each in await fanout.topics()] == ["orders"]
            while (await feed.claim({"lane": Demand(9)}, request="r3", lease_ms=15_000)).claims:
                pass
            feed.clear()
            await feed.claim({"lane": Demand(3)}, request="r4", lease_ms=15_000)
            async with asyncio.TaskGroup() as tasks:
                waiter = tasks.create_task(feed.wait(until_ms=None))
                await asyncio.sleep(0.05)  # it must wait, and not come back at once
                assert not waiter.done()
                assert list(await sink.send([Delivery(envelope, "x", 1, 1, 1, 0)])) == [Sent()]
                async with asyncio.timeout(60):
                    await waiter


def test_the_user_that_topics_need_is_enough_and_no_more(server: RedisServer) -> None:
    rights, store_rights = RIGHTS.split(), [each for each in STORE_USER if each != "+waitaof"]

    def grant(more: list[str]) -> str:
        server.command("FLUSHALL")
        answer = server.command("ACL", "SETUSER", "aiodelay", "reset", "on", ">secret", *store_rights, *more)
        assert answer == b"+OK\r\n", answer
        return f"redis://aiodelay:secret@127.0.0.1:{server.port}"

    asyncio.run(use(grant(rights)))
    for right in rights:
        failures = (StoreUnavailableError, SinkUnavailableError, StoreMismatchError, AssertionError, ExceptionGroup)
        with pytest.raises((*failures, ValueError, TimeoutError)):
            asyncio.run(use(grant([each for each in rights if each != right])))
