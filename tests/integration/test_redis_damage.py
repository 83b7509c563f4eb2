"""A key of the namespace that another program has overwritten: errors and log name the key and the problem."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from aiodelay import OutcomeUnknownError, Scheduler, StoreDamagedError, StoreMismatchError
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.key_types import KEY_TYPES, overwritten_key
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.records.keys import DERIVED, FIXED, Keys, keys_of
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
EXAMPLES = {"<lane>:<address>": "1:a", "<lane>": "1", "<worker>": "w", "<incarnation>": "i"}


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@pytest.fixture
def keys() -> Keys:
    return keys_of(f"damage-{uuid4().hex[:8]}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = Client(read_url(url))
    try:
        yield client
    finally:
        await client.aclose()


@pytest.mark.parametrize("name", KEY_TYPES)
async def test_the_key_that_holds_another_type_is_found(url: str, keys: Keys, name: str) -> None:
    shown = name
    for place, example in EXAMPLES.items():
        shown = shown.replace(place, example)
    async with connected(url) as client:
        await client.command("HSET", keys.key("lanes"), "work", 1)
        await client.command("HSET", keys.key("workers"), "w", b"")
        await client.command("HSET", keys.key("pulses"), "i", 1)
        await client.command("SADD", keys.key("parked"), "1:a")
        assert await overwritten_key(client, keys) is None
        await client.command("DEL", keys.key(shown))
        await client.command("RPUSH", keys.key(shown), "of another program")
        found = await overwritten_key(client, keys)
    assert found is not None
    assert found.startswith(f"key {keys.key(shown)!r} holds no {KEY_TYPES[name]}, so another program has ")


@pytest.mark.parametrize("name", ["msg", "due:1", "lanes"])
async def test_what_a_program_is_told_names_the_key(
    url: str, keys: Keys, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[bytes] = []
    scheduler = Scheduler(url, namespace=keys.namespace, store_timeout="8s")

    @scheduler.handler(name="Work")
    async def work(payload: bytes) -> None:
        handled.append(payload)

    key, told = keys.key(name), re.escape(f"key {keys.key(name)!r} holds no ")
    async with scheduler, connected(url) as client:
        await scheduler.schedule(b"first", to="handler:Work", delay="0s")
        await until(lambda: handled, "the first message is handled")
        await client.command("RENAME", key, keys.key("aside")) if await client.command("EXISTS", key) else None
        await client.command("SET", key, "of another program")

        async def is_told() -> bool:
            with pytest.raises(OutcomeUnknownError) as raised:
                await scheduler.schedule(b"second", to="handler:Work", delay="1h", id="second")
            return re.search(told, str(raised.value)) is not None

        await until(is_told, "the error names the key")  # not if a call is under way when its time is over
        with pytest.raises(StoreDamagedError, match=f"cannot be used: {told}"):
            await (scheduler.get("second") if name == "msg" else scheduler.counts())
        if name != "msg":  # which a claim reads only where something is due
            await until(
                lambda: re.search(f"claiming failed: .* cannot be used: {told}", caplog.text), "the log names it"
            )
        await client.command("DEL", key)


async def test_a_store_whose_first_key_is_not_ours_is_refused_at_once(url: str, keys: Keys) -> None:
    async with connected(url) as client:
        await client.command("SET", keys.key("meta"), "of another program")
    with pytest.raises(StoreMismatchError, match=f"key {re.escape(repr(keys.key('meta')))} of .* another program"):
        await Scheduler(url, namespace=keys.namespace).__aenter__()


async def test_the_types_are_those_of_the_page_on_formats() -> None:
    rows = re.findall(r"^\| `([^`|]+)` \| (hash|zset|set|stream|string) \|", PAGE.read_text(), re.MULTILINE)
    of_the_page = {name: kind for name, kind in rows if name.partition("<")[0] in {*FIXED, *DERIVED}}
    not_looked_at = re.compile("<k>$|<topic>|^cut:")  # there may be many, or any type may be there
    assert {name: kind for name, kind in of_the_page.items() if not not_looked_at.search(name)} == KEY_TYPES
