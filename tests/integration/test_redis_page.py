"""The Redis section of docs/formats.md: its keys, its example for other programs, and the rights of the user."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from aiodelay.backends.redis.connection.scripts import script
from aiodelay.backends.redis.records.keys import DERIVED, FIXED, Keys
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Again,
    Cancel,
    Claim,
    Command,
    Dead,
    Demand,
    Done,
    Envelope,
    Late,
    Put,
    PutBack,
    Query,
    Renewal,
    Reschedule,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import StoreMismatchError, StoreUnavailableError
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from tests.support.servers import RedisServer, redis_programs, start

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"
PAGE = FORMATS.read_text().partition("\n## Redis\n")[2].partition("\n## ")[0]
BLOCKS: list[str] = re.findall(r"```redis\n(.*?)```", PAGE, re.DOTALL)
LANE = "orders"
NOT_USED_HERE = {"ping", "hello", "auth", "select", "wait", "waitaof", "client|setname", "unlink"}
WITHOUT_IT_TOO = {"info", "script|load", "script|exists", "config|get", "xread", "xrevrange"}


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


def test_the_page_names_every_key() -> None:
    named = set(re.findall(r"^\| `([a-z:]+)", PAGE, re.MULTILINE))
    assert named == {*FIXED, *DERIVED}


def example() -> list[str]:
    keys = " ".join(Keys("default").fixed)
    return BLOCKS[0].replace("<sha>", script("apply").sha.decode()).replace("<keys>", keys).splitlines()


def send(server: RedisServer, line: str, cli: str | None) -> bytes:
    """Send a line by redis-cli, or as a person would at the server's port: both know the same quotes and escapes."""
    if cli is not None:
        command = [cli, "-p", str(server.port)]
        return subprocess.run(command, input=line.encode(), capture_output=True, check=True).stdout
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(line.encode() + b"\r\n")
        return connection.recv(65536)


@pytest.mark.parametrize("by", ["socket", "redis-cli"])
def test_another_program_schedules_and_cancels(server: RedisServer, by: str) -> None:
    cli = (shutil.which("redis-cli") or shutil.which("valkey-cli")) if by == "redis-cli" else None

    async def play() -> None:
        schedule, cancel = example()
        async with RedisStore(server.url, namespace="default") as store:
            assert b"s" in send(server, schedule, cli)
            snapshot = await store.get("m1")
            assert snapshot is not None
            assert (snapshot.record.envelope, snapshot.record.op) == (
                Envelope("m1", LANE, payload=b"hello"),
                b"op-00001",
            )
            assert 0 < snapshot.record.due_ms - store.now_ms() <= 601_000  # its estimate of the server's clock may lag
            first = send(server, cancel, cli)
            assert await store.get("m1") is None
            assert first[-12:] == send(server, cancel, cli)[-12:]
            async with store.work("w", [LANE]) as work:
                send(server, schedule.replace("+600000", "+0").replace("op-00001", "op-00003"), cli)
                (claim,) = (await work.claim({LANE: Demand(1)}, request="r", lease_ms=1000)).claims
                assert claim.record.envelope.payload == b"hello"

    asyncio.run(play())


# --- the user ---------------------------------------------------------------------------------------------


def put(message_id: str, due_ms: int = 0, address: str = "", rule: Mapping[str, str | int] | None = None) -> Put:
    envelope = Envelope(message_id, LANE, address, payload=b"p", version=1, rule=rule)
    return Put(new_op(), envelope, After(due_ms), late=Late.drop("1h"))


async def do(store: RedisStore, *commands: Command) -> None:
    for outcome in await store.apply(commands):
        assert isinstance(outcome, Stored), outcome


async def work_through(store: RedisStore, work: Work) -> None:
    claims = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=15_000)).claims
    key = {each.record.id: (each.record.id, each.record.revision, each.token) for each in claims}
    await work.renew([Renewal(*each, each[2] + 4096) for each in key.values()])
    key = {name: (name, each[1], each[2] + 4096) for name, each in key.items()}
    outcomes = await work.settle(
        [
            Done(*key["a"]),
            Dead(*key["b"], "rejected", 1, "e"),
            Again(*key["c"], 0, 1, "e"),
            Again(*key["s"], 0, 1, "e", store.now_ms() + 3_600_000),
            Done(*key["plain"]),
        ]
    )
    assert set(outcomes) == {SettleOutcome.SETTLED}
    (letter,) = await store.dead_letters()
    assert [each.answer for each in await store.put_back([PutBack(letter.record, 0, letter.reason)])] == ["kept"]
    (outcome,) = await store.redrive([letter.key])
    assert isinstance(outcome, Stored)
    repeated: list[Claim] = list((await work.claim({LANE: Demand(9)}, request="r2", lease_ms=15_000)).claims)
    assert len(repeated) == 3
    again = (await work.claim({LANE: Demand(9)}, request="r2", lease_ms=15_000)).claims
    assert [each.record.id for each in again] == [each.record.id for each in repeated]


async def use(url: str) -> None:
    """Use what a store can do; raises if anything of it does not work."""
    journal = f"{url}{'&' if '?' in url else '?'}journal=10"
    async with RedisStore(journal, namespace="default") as store, store.work("w", [LANE]) as work:
        await store.pause(LANE, "held")
        await do(store, put("a"), put("b"), put("c"), put("d", 1000), put("h", 0, "held"), put("s", 0, "", {"e": 1000}))
        await do(store, Put(new_op(), Envelope("plain", LANE), After(0)))
        await do(store, put("d"), Reschedule(new_op(), "d", After(5000)), Cancel(new_op(), "d"))
        await work_through(store, work)
        await store.resume(LANE, "held")
        tidied = await work.tidy([LANE], limit=100)
        assert [each.lane for each in tidied.lanes] == [LANE]
        assert (await store.counts())[LANE].in_flight == 3
        await store.load(bucket_ms=1000, buckets=2)
        assert len(await store.journal()) == 10
        assert await store.get("s") is not None
        assert await store.position("nowhere") is None
        assert await store.paused() == []
        assert (await store.vanished(), await store.vanished_elsewhere()) == ("", "")
    async with RedisStore(url, namespace="default") as store, store.work("w", ["other"]) as work:
        await do(
            store, Put(new_op(), Envelope("x", "other"), After(0)), Put(new_op(), Envelope("y", "other"), After(0))
        )
        claims = (await work.claim({"other": Demand(9)}, request="r", lease_ms=15_000)).claims
        done = [Done(each.record.id, each.record.revision, each.token) for each in claims[:1]]
        assert await work.settle(done) == [SettleOutcome.SETTLED]
        assert len((await work.tidy(["other"], limit=100)).lanes) == 2
        assert len(await store.search(Query())) == 6


def test_the_user_of_the_page_is_enough_and_no_more(server: RedisServer) -> None:
    rights = BLOCKS[1].split("<password> ")[1].split()
    granted = [right for right in rights if right.startswith("+")]
    if b"unknown command" in server.command("WAITAOF", "0", "0", "1"):
        granted.remove("+waitaof")

    def grant(*commands: str) -> str:
        rest = [right for right in rights if not right.startswith("+")]
        answer = server.command("ACL", "SETUSER", "aiodelay", "reset", "on", ">secret", *rest, *commands)
        assert answer == b"+OK\r\n", answer
        return f"redis://aiodelay:secret@127.0.0.1:{server.port}"

    asyncio.run(use(grant(*granted)))
    unneeded = set()
    for right in granted:
        server.command("FLUSHALL")
        server.command("SCRIPT", "FLUSH")
        try:
            asyncio.run(use(grant(*(each for each in granted if each != right))))
        except (StoreUnavailableError, StoreMismatchError, AssertionError, KeyError, ValueError):
            continue
        unneeded.add(right.removeprefix("+"))
    assert unneeded <= NOT_USED_HERE | WITHOUT_IT_TOO, unneeded - NOT_USED_HERE - WITHOUT_IT_TOO
