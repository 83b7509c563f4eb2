"""docs/formats.md, "Redis logs": its keys, its examples for other programs, and the rights of the user."""

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
from aiodelay.redis import LogEntry, LogMessage, RedisLog, RedisStore
from tests.integration.test_redis_page import send
from tests.support.servers import RedisServer, redis_programs, start

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
PAGE = FORMATS.partition("\n## Redis logs\n")[2].partition("\n## ")[0]
PLAIN, EXAMPLE, RIGHTS = re.findall(r"```redis\n(.*?)```", PAGE, re.DOTALL)
STORE_USER = re.findall(r"```redis\n(ACL SETUSER.*?)```", FORMATS, re.DOTALL)[0].split("<password> ")[1].split()
SINCE_7 = "0-*"


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


def cli_of(by: str) -> str | None:
    return (shutil.which("redis-cli") or shutil.which("valkey-cli")) if by == "redis-cli" else None


@pytest.mark.parametrize("by", ["socket", "redis-cli"])
def test_another_program_appends_and_reads_by_single_commands(server: RedisServer, by: str) -> None:
    is_old = server.command("INFO", "server").find(b"redis_version:6.") >= 0

    async def play() -> list[LogEntry]:
        async with RedisLog(server.url) as log:
            await log.register("orders", "billing")
            lines = (PLAIN.replace(SINCE_7, "0-1") if is_old else PLAIN).splitlines()
            answers.extend([await asyncio.to_thread(send, server, line, cli_of(by)) for line in lines])
            await log.append("orders", [b"ours"])
            return [each async for each in log.read("orders")]

    answers: list[bytes] = []
    first, second = asyncio.run(play())
    assert (first.index, first.payload, first.key, first.headers) == (1, b"hello", b"k1", {"trace": b"abc"})
    assert (first.at_ms, second.index, second.payload) == (1924992000000, 2, b"ours")
    assert b"0-1" in answers[0]
    assert b"hello" in answers[1]
    assert b"hello" not in answers[2]
    assert answers[3].strip().endswith(b"0")


@pytest.mark.parametrize("by", ["socket", "redis-cli"])
def test_another_program_registers_appends_takes_settles_and_goes_back(server: RedisServer, by: str) -> None:
    answers: list[bytes] = []
    for line in EXAMPLE.splitlines():
        name = line.partition("<")[2].partition(">")[0]
        server.command("SCRIPT", "LOAD", script(name).text.decode())
        answers.append(send(server, line.replace(f"<{name}>", script(name).sha.decode()), cli_of(by)))
    registered, appended, taken, settled, back = answers
    assert b"new" in registered
    assert appended.strip().endswith(b"n")
    assert b"hello" in taken
    assert settled.strip().endswith(b"s")
    assert back.strip().endswith(b"1")


def test_the_page_names_every_key(server: RedisServer) -> None:
    seen: set[str] = set()

    async def play() -> None:
        async with RedisStore(server.url) as store:
            await use(server.url, lambda: note(store))

    async def note(store: RedisStore) -> None:
        for key in await store.command("KEYS", "*:log:*"):
            name = key.decode().partition(":00}:")[2].replace(":orders", ":<topic>").replace("@billing", "@<consumer>")
            seen.add(re.sub(r"taken:.*", "taken:<instance>", re.sub(r"seen:\d+", "seen:<k>", name)))

    asyncio.run(play())
    assert seen == set(re.findall(r"^\| `(\S+)`", PAGE, re.MULTILINE)) - {"log:<topic>@<consumer>:trials"}


async def nothing() -> None: ...


async def use(url: str, midway: Callable[[], Awaitable[None]] = nothing) -> None:
    """Use what logs can do; raises if anything of it does not work."""
    async with RedisStore(url, namespace="default") as store, RedisLog(url, max_messages=10) as log:
        envelope = Envelope("m", "redis-log", "orders", payload=b"p")
        assert await log.register("orders", "leaves")
        async with log.feed("orders?consumer=billing&from=oldest", "me", store.put_back, store.now_ms) as feed:
            for i in range(12):
                assert list(await log.send([Delivery(envelope, f"m/{i}", 1, 1, 1, 0)])) == [Sent()]
            assert await log.append("orders", [LogMessage(b"p")]) == [13]
            assert (await feed.claim({"lane": Demand(4)}, request="r", lease_ms=15_000)).claims
            await store.apply([Put(new_op(), envelope, After(0))])
            with store.transferring(log) as moves:
                assert (await moves.transfer(Demand(9))).moved == 1
            assert await log.unregister("orders", "leaves")
            claims = list((await feed.claim({"lane": Demand(3)}, request="r2", lease_ms=15_000)).claims)
            ends = [(each.record.id, each.record.revision, each.token) for each in claims]
            back = Again(*ends[2], claims[2].record.due_ms, 0)
            settled = await feed.settle([Done(*ends[0]), Again(*ends[1], 10**14, 1, "e"), back])
            assert set(settled) == {SettleOutcome.SETTLED}
            await midway()
            (billing,) = await log.consumers("orders")
            assert (billing.retrying, billing.memory > 0) == (1, True)
            assert [each.name for each in await log.topics()] == ["orders"]
            first = await anext(log.read("orders"))
            assert await log.trim("orders", max_messages=9, max_age="1h", drop_passed=True) >= 1
            assert await log.seek("orders", "billing", first.at or 1) == first.index + 1
            while (await feed.claim({"lane": Demand(9)}, request="r3", lease_ms=15_000)).claims:
                pass
            feed.clear()
            await feed.claim({"lane": Demand(3)}, request="r4", lease_ms=15_000)
            async with asyncio.TaskGroup() as tasks:
                waiter = tasks.create_task(feed.wait(until_ms=None))
                await asyncio.sleep(0.05)  # it must wait, and not come back at once
                assert not waiter.done()
                only = Envelope("x", "redis-log", "orders?consumer=billing", payload=b"p")
                assert list(await log.send([Delivery(only, "x", 1, 1, 1, 0)])) == [Sent()]
                async with asyncio.timeout(60):
                    await waiter


def test_the_user_that_logs_need_is_enough_and_no_more(server: RedisServer) -> None:
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
