"""Limits through the HTTP API, the page, the command line and `why`, on real stores."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aiodelay import Limit, Message, Scheduler
from aiodelay.operations.diagnosis import story_of
from aiodelay.operations.json_shapes import time_shape
from tests.support.api import ALL, problem_of, serving_api
from tests.support.cli import Cli
from tests.support.waiting import until

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"


@dataclass
class Ask:
    customer: str


@asynccontextmanager
async def asking(*limits: Limit) -> AsyncIterator[tuple[httpx.AsyncClient, Scheduler, asyncio.Event]]:
    """An API over a scheduler whose runs wait for an event. Messages of the customers a and b are due."""
    goes_on = asyncio.Event()
    scheduler = Scheduler("memory://")

    @scheduler.handler(limit=limits)
    async def ask(event: Ask) -> None:
        await goes_on.wait()

    async with scheduler, serving_api(scheduler, **ALL) as client:
        for name in ("a1", "a2", "a3", "b1"):
            await scheduler.schedule(Ask(name[0]), delay="0s", id=name)
        yield client, scheduler, goes_on
        goes_on.set()
        await scheduler.run_until_idle()


@pytest.mark.asyncio
async def test_operators_read_and_change_limits_over_http() -> None:
    async with asking(Limit("customer", 1)) as (client, scheduler, _):
        limit = {"what": "Ask", "key": "customer", "concurrency": 1, "rate": None}
        assert (await client.get("/v1/limits")).json() == {"limits": [limit]}
        await until(lambda: waiting_of(client, 2), "two messages wait")
        waiting = await scheduler.get("a2")
        assert waiting is not None
        due_ms = waiting.record.due_ms
        a, b = (await client.get("/v1/limits/keys", params={"what": "Ask"})).json()["keys"]
        assert a.pop("since") == time_shape(due_ms)
        assert a == {"what": "Ask", "key": "a", "running": 1, "waiting": 2, "why": "concurrency", "until": None}
        assert b == {"what": "Ask", "key": "b", "running": 1, "waiting": 0, "why": "", "until": None, "since": None}
        changed = {"what": "Ask", "limits": [{"key": "customer", "concurrency": 2}, {"rate": "900/s"}]}
        assert (await client.post("/v1/limits", json=changed)).status_code == 200
        assert await scheduler.limits() == {"Ask": (Limit(rate="900/s"), Limit("customer", 2))}
        await until(lambda: waiting_of(client, 1), "one message waits")


async def waiting_of(client: httpx.AsyncClient, number: int) -> bool:
    found = (await client.get("/v1/limits/keys", params={"what": "Ask"})).json()["keys"]
    return bool(sum(each["running"] + each["waiting"] for each in found) == 4 and found[0]["waiting"] == number)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"what": "Ask", "limits": [{"key": "customer"}]}, "limit"),
        ({"what": "Ask", "limits": [{"rate": "much"}]}, "limit.rate"),
        ({"what": "Ask", "limits": [{"concurrency": 1}, {"rate": "1/s"}]}, "limit"),
        ({"what": "Ask", "limits": [{"key": "address", "concurrency": 1}]}, "limit.key"),
    ],
)
@pytest.mark.asyncio
async def test_a_wrong_limit_is_refused_over_http(body: object, field: str) -> None:
    async with asking() as (client, scheduler, _):
        problem = problem_of(await client.post("/v1/limits", json=body), 422, "ConfigurationError")
        assert problem["field"] == field
        assert await scheduler.limits() == {}


@pytest.mark.asyncio
async def test_the_page_and_why_say_which_limit_makes_a_message_wait() -> None:
    async with asking(Limit("customer", 1)) as (client, scheduler, _):
        await until(lambda: waiting_of(client, 2), "two messages wait")
        page = (await client.get("/sinks")).text
        assert "as many in flight as allowed" in page
        assert "For a handler, it is only a name for operators" in page
        page = re.sub(r"<[^>]*>", "", (await client.get("/messages/a3")).text)
        assert "its key &#39;a&#39; has as many messages in flight as its limit allows" in page
        story = await story_of(scheduler, "a3")
        assert (story.cause, story.advice) == ("limited", "aiodelay limit Ask")
        assert (
            "its key 'a' has as many messages in flight as its limit allows; 2 messages of its key wait" in story.text
        )


@pytest.mark.asyncio
async def test_why_says_when_a_rate_has_room_again() -> None:
    async with asking(Limit(rate="2/h")) as (_, scheduler, goes_on):
        goes_on.set()
        await until(lambda: settled(scheduler), "two messages have ended")
        ids = [each.record.id async for each in scheduler.pending()]
        story = await story_of(scheduler, ids[0])
        assert "its lane has used up its rate, which has room again" in story.text
        await scheduler.set_limits(Ask)


@pytest.mark.asyncio
async def test_why_finds_a_key_behind_thousands_of_fuller_keys() -> None:
    async with asking(Limit("customer", rate="1/h")) as (_, scheduler, goes_on):
        goes_on.set()
        names = [f"c{n}" for n in range(1_001) for _ in range(3)]
        await scheduler.schedule_many(Message(Ask(name), delay="0s") for name in names)
        await until(lambda: overdue(scheduler, 2 * 1_001 + 2), "every key has had its message of the hour")
        await scheduler.schedule(Ask("b"), delay="0s", id="b2")
        assert (await story_of(scheduler, "b2")).cause == "limited"
        await scheduler.set_limits(Ask)


async def overdue(scheduler: Scheduler, number: int) -> bool:
    counts = (await scheduler.counts())["Ask"]
    return (counts.overdue, counts.in_flight) == (number, 0)


async def settled(scheduler: Scheduler) -> bool:
    counts = (await scheduler.counts())["Ask"]
    return (counts.overdue, counts.in_flight) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"limited": "no name", "rate": "1/s"}, ["limited"]),
        ({"limited": "webhook:eu-1", "rate": "1/s"}, ["limited"]),
        ({"limited": "Ask", "key": "address", "rate": "1/s"}, ["key"]),
        ({"limited": "Ask", "key": "2 keys", "rate": "1/s"}, ["key"]),
        ({"limited": "Ask", "concurrency": "many", "rate": "1/s"}, ["concurrency"]),
        ({"limited": "Ask", "concurrency": "0"}, ["concurrency"]),
        ({"limited": "Ask", "concurrency": "9" * 5_000}, ["concurrency"]),
        ({"limited": "Ask", "concurrency": "1", "rate": "fast"}, ["rate"]),
        ({"limited": "Ask", "key": "customer"}, ["concurrency", "rate"]),
    ],
)
@pytest.mark.asyncio
async def test_the_page_shows_the_error_of_a_wrong_limit_at_its_field(fields: dict[str, str], wrong: list[str]) -> None:
    async with asking() as (client, scheduler, _):
        screen = await sent(client, "limit", fields)
        assert re.findall(r'<input id="(\w+)"[^>]*aria-invalid="true" aria-describedby="mistake"', screen) == wrong
        assert re.findall(r'<input id="(\w+)"[^>]* autofocus><small class="mistake">', screen) == wrong[:1]
        typed = dict(re.findall(r'<input id="(\w+)"[^>]* value="([^"]*)"', screen))
        assert {name: typed[name] for name in fields} == fields
        assert await scheduler.limits() == {}


@pytest.mark.asyncio
async def test_the_page_names_the_limit_that_a_change_ends_or_replaces() -> None:
    async with asking(Limit("customer", 1, "9/s")) as (client, _, _):
        screen = await sent(client, "limit", {"limited": "handler:Ask", "key": "tenant", "concurrency": "3"})
        assert "New limit: <strong>each tenant: at most 3 in flight</strong>" in screen
        assert "Limit until now: <strong>each customer: at most 1 in flight, at most 9/s begin</strong>" in screen
        assert "Nothing is called" not in screen
        screen = await sent(client, "limit", {"limited": "Asking", "rate": "2/min"})
        assert "New limit: <strong>all messages together: at most 2/min begin</strong>" in screen
        assert "Nothing is called Asking" in screen
        assert "A handler or sink that gets this name later has this limit" in screen
        screen = await sent(client, "end_limit", {"limited": "Ask"})
        assert "Ask has no such limit any more." in screen


async def sent(client: httpx.AsyncClient, action: str, fields: dict[str, str]) -> str:
    """Send the form of a limit, and return the screen that answers it."""
    csrf = re.findall(r'name="csrf" value="(\w+)"', (await client.get("/sinks")).text)[0]
    form = {"csrf": csrf, "back": "/sinks", "action": action, **fields}
    return (await client.post("/plan", data=form, follow_redirects=True)).text


def test_operators_change_limits_on_the_command_line(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    assert cli("schedule", "handler:mail", "p", "--delay", "1h").code == 0
    assert cli("limit").out == "no limits\n"
    ran = cli("limit", "mail", "--key", "customer", "--concurrency", "5", "--rate", "60/min", "--json")
    keyed = {"what": "mail", "key": "customer", "concurrency": 5, "rate": "60/min"}
    assert ran.objects == [keyed]
    whole = {"what": "mail", "key": None, "concurrency": None, "rate": "9/s"}
    assert cli("limit", "mail", "--rate", "9/s", "--json").objects == [whole, keyed]
    assert cli("limit", "mail", "--key", "customer", "--end", "--json").objects == [whole]
    assert "9/s" in cli("limit", "mail").out
    keyed["concurrency"] = 7
    again = ("--key", "customer", "--concurrency", "7", "--rate", "60/min")
    assert cli("limit", "handler:mail", *again, "--json").objects == [whole, keyed]
    assert cli("limit", "handler:mail", "--key", "customer", "--end", "--json").objects == [whole]
    for wrong in (("--rate", "1/s"), ("mail", "--key", "customer"), ("mail", "--end", "--rate", "1/s")):
        assert cli("limit", *wrong).code == 2
    by_address = {"what": "webhook", "key": "address", "concurrency": None, "rate": "10/s"}
    assert cli("limit", "webhook", "--key", "address", "--rate", "10/s", "--json").objects == [by_address]
    refused = cli("limit", "mail", "--rate", "fast", "--json")
    assert refused.code != 0
    assert json.loads(refused.err.splitlines()[-1])["field"] == "limit.rate"


def test_the_runbook_raises_the_limit_of_a_key(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    assert cli("schedule", "handler:mail", "p", "--delay", "1h").code == 0
    assert cli("limit", "mail", "--key", "customer", "--concurrency", "1").code == 0
    (row,) = re.findall(r"^\| `limited` .*", RUNBOOK.read_text(), re.MULTILINE)
    command = re.findall(r'"its key": `aiodelay ([^`]+)`', row)[0]
    words = {"NAME": "mail", "KEY": "customer", "N": "5"}
    raised = {"what": "mail", "key": "customer", "concurrency": 5, "rate": None}
    assert cli(*(words.get(each, each) for each in command.split()), "--json").objects == [raised]
