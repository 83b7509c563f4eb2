"""`aiodelay why` on real stores: it reports each cause that the test makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import pytest
import redis as redis_py

from aiodelay import Reject, Retry, Scheduler
from aiodelay.handlers.registration import Handler
from tests.support.cli import Cli
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


@pytest.fixture(params=["sqlite", "redis"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    url = request.getfixturevalue("redis") if request.param == "redis" else f"sqlite:///{tmp_path}/delay.db"
    cli = Cli(f"{url}?journal=1000", tmp_path)
    cli.namespace = f"why-{uuid4().hex[:8]}"
    assert cli("schedule", "--lines").code == 0, "its file is there"
    return cli


def add(cli: Cli, name: str, *options: str, to: str = "handler:mail") -> None:
    assert cli("schedule", to, "x", "--id", name, *(options or ("--delay", "0s"))).code == 0


def serve(cli: Cli, handle: Handler, holds: Callable[[Scheduler], Awaitable[bool]]) -> None:
    """Dispatch `mail` until something holds."""

    async def play() -> None:
        scheduler = Scheduler(cli.url, namespace=cli.namespace, retry=Retry.intervals(["1h"]), drain="1s")
        scheduler.add_handler(handle, name="mail")
        async with scheduler:
            await until(lambda: holds(scheduler), "what is dispatched for")

    asyncio.run(play())


async def is_empty(scheduler: Scheduler) -> bool:
    return not [each async for each in scheduler.pending(limit=1)]


def told(cli: Cli, name: str, cause: str, *parts: str, advice: str = "", code: int = 0) -> None:
    ran = cli("why", name, "--json")
    assert (ran.code, ran.object["cause"]) == (code, cause), ran
    for part in parts:
        assert part in ran.object["text"]
    assert advice in ran.object["advice"]
    assert (not ran.object["advice"]) == (not advice)
    plain = cli("why", name)
    assert (plain.code, plain.lines[0].partition(":")[0]) == (code, cause.replace("_", " "))


def test_not_due_yet_and_nobody_reads_its_type(cli: Cli) -> None:
    add(cli, "a", "--delay", "2h")
    told(cli, "a", "not_due", "it is due on ", "no live instance serves mail", advice="start a process")
    cli("fire", "a")
    told(cli, "a", "read_by_nobody", "it was due on ", "no live instance serves mail", advice="handler or sink mail")
    told(cli, "a~1893456000000", "unknown", code=3, advice="check the id")


def test_paused(cli: Cli) -> None:
    add(cli, "a")
    add(cli, "b", "--delay", "1h")
    assert cli("pause", "mail").code == 0
    told(cli, "a", "paused", "mail is paused", advice="aiodelay resume mail")
    told(cli, "b", "paused", "mail is paused", advice="aiodelay resume mail")
    cli("resume", "mail")
    told(cli, "b", "not_due", advice="start a process")


def test_delivered_cancelled_and_dropped(cli: Cli) -> None:
    add(cli, "a")
    add(cli, "b", "--delay", "1h")
    assert cli("cancel", "b", "--yes").code == 0
    add(cli, "late", "--at", "2020-01-01T00:00:00Z", "--drop-after", "1s")

    async def work(event: bytes) -> None: ...

    serve(cli, work, is_empty)
    told(cli, "a", "delivered", "it was delivered on", "after it was due, attempt 1")
    told(cli, "b", "cancelled", "it was cancelled on")
    told(cli, "late", "dropped", "too late")
    story = cli("why", "a", "--json").object
    assert (story["journal"][0]["event"], story["journal"][-1]["event"]) == ("stored", "delivered")
    assert (story["message"], story["dead_letters"]) == (None, [])


def test_in_flight_and_retrying_with_the_last_error(cli: Cli) -> None:
    add(cli, "a")
    stories = []

    async def work(event: bytes) -> None:
        stories.append(await asyncio.to_thread(cli, "why", "a", "--json"))
        raise ValueError("no answer from the mail server")

    async def has_failed(scheduler: Scheduler) -> bool:
        snapshot = await scheduler.get("a")
        return snapshot is not None and snapshot.record.attempt == 1

    serve(cli, work, has_failed)
    assert stories[0].object["cause"] == "in_flight"
    assert stories[0].object["text"] == "attempt 1 is being delivered now"
    text = "attempt 1 failed: ValueError: no answer from the mail server; a retry is due on "
    told(cli, "a", "retrying", text, "no live instance", advice="start a process")
    cli("fire", "a")
    told(cli, "a", "read_by_nobody", advice="start")


def test_its_lane_is_busy(cli: Cli) -> None:
    ids = [(f"m{i:02}", f"2030-01-01T00:00:{i:02}Z") for i in range(40)]
    lines = [json.dumps({"to": "handler:mail", "payload": "x", "at": at, "id": name}) for name, at in ids]
    assert cli("schedule", "--lines", stdin="\n".join(lines).encode()).code == 0
    cli("fire", *(f"m{i:02}" for i in range(40)))
    begun, enough = 0, asyncio.Event()

    async def work(event: bytes) -> None:
        nonlocal begun
        begun += 1
        if begun == 16:
            await asyncio.to_thread(told, cli, "m39", "waiting", "mail is served", advice="aiodelay top")
            enough.set()
        await enough.wait()

    serve(cli, work, is_empty)


def test_dead_letter_redriven_and_purged(cli: Cli) -> None:
    add(cli, "a")

    async def work(event: bytes) -> Reject:
        return Reject("no such order")

    serve(cli, work, is_empty)
    told(cli, "a", "dead_letter", "rejected", "no such order", advice="aiodelay dead redrive a")
    assert cli("why", "a", "--json").object["dead_letters"][0]["reason"] == "rejected"
    assert cli("dead", "redrive", "a", "--yes").code == 0
    told(cli, "a", "read_by_nobody", advice="start")
    serve(cli, work, is_empty)
    assert cli("dead", "purge", "--all", "--yes").code == 0
    told(cli, "a", "gone", "its dead letter has been purged; it was given up on ")


def test_never_stored_or_no_journal(cli: Cli) -> None:
    told(cli, "a", "unknown", "the journal, which is empty, does not know it", code=3, advice="check the id")
    add(cli, "b")
    told(cli, "a", "unknown", "the journal, which begins on ", code=3, advice="check the id")
    cli.url = cli.url.partition("?")[0]
    told(cli, "a", "unknown", "no journal is kept", code=3, advice="?journal=100000")
    assert cli("why", "a", "--json").object["journal"] is None
    told(cli, "b", "read_by_nobody", advice="start")


def test_a_destination_that_takes_nothing(redis: str, tmp_path: Path) -> None:
    cli = Cli(f"{redis}?journal=100", tmp_path)
    cli.namespace = f"why-{uuid4().hex[:8]}"
    redis_py.Redis.from_url(redis).set("no-list", "x")
    add(cli, "a", to="redis-list:no-list")

    async def play() -> None:
        async with Scheduler(cli.url, namespace=cli.namespace) as scheduler:
            await until(scheduler.blocked, "its destination takes nothing")

    asyncio.run(play())
    told(cli, "a", "blocked", "redis-list:no-list takes nothing:", advice="repair redis-list:no-list")


def test_bad_ids(cli: Cli) -> None:
    assert json.loads(cli("why", "", "--json").err)["error"] == "MessageIdError"
