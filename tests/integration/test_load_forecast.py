"""The load forecast on real stores: a measured rate, and what the API, the page and the command line say about it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Conflict, Message, Scheduler
from tests.support.api import serving_api
from tests.support.cli import Cli
from tests.support.kafka import new_name
from tests.support.servers import redis_servers
from tests.support.stores import empty_store

BACKLOG, COMING = 30, 3_000
RUN_S = 0.05


@dataclass
class Mail:
    number: int


@pytest.fixture(params=["sqlite", "redis", "kafka"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "kafka":
        options = f"create_topic=true&partitions=1&history={new_name('history')}"
        yield f"kafka://{request.getfixturevalue('kafka')}/{new_name('schedules')}?{options}"
        return
    with empty_store("sqlite" if request.param == "sqlite" else redis_servers()[0], tmp_path, "?journal=10000") as url:
        yield url


def test_a_backlog_gives_the_rate_and_the_rate_tells_how_late_a_burst_will_be(url: str, tmp_path: Path) -> None:
    scheduler = Scheduler(url)

    @scheduler.handler(concurrency=1)
    async def send(event: Mail) -> None:
        await asyncio.sleep(RUN_S)  # the real rate of dispatch is what the forecast measures

    async def play() -> tuple[dict[str, Any], str]:
        now = datetime.now(UTC)
        async with scheduler, serving_api(scheduler) as client:
            await scheduler.schedule(Mail(0), id="first", at=now + timedelta(minutes=20))
            (unknown,) = (await client.get("/v1/forecast", params={"span": "1h"})).json()["forecasts"]
            assert (unknown["per_s"], unknown["late_ms"]) == (None, None)
            assert unknown["text"] == "how late messages will be is not known: no backlog was measured"
            await scheduler.cancel("first")
            past = now - timedelta(minutes=1)
            await scheduler.schedule_many([Message(Mail(n), at=past) for n in range(BACKLOG)])
            await scheduler.run_until_idle()
            at = now + timedelta(minutes=20)
            await scheduler.schedule_many([Message(Mail(n), at=at) for n in range(COMING)])
            (found,) = (await client.get("/v1/forecast", params={"span": "1h"})).json()["forecasts"]
            page = re.sub(r"<[^>]*>", "", (await client.get("/")).text)
            return found, page

    found, page = asyncio.run(play())
    assert found["lane"] == "Mail"
    assert 0 < found["per_s"] <= 1 / RUN_S
    assert found["measured"]["starts"] >= BACKLOG // 2
    assert found["late_ms"] >= found["least_late_ms"] > 60_000
    assert found["spread_late_ms"] <= 10_000
    assert f"with spread={found['spread']} messages will be" in found["text"]
    assert re.search(r"Mail: at [\d :Z-]+ messages will be up to \w+ late, at [\d.,]+ a second", page)
    lines = Cli(url, tmp_path)("load", "--bucket", "1h", "--buckets", "1", "--own").lines
    assert lines[-1].startswith("Mail: at ")
    assert "with spread=" in lines[-1]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)


def test_a_given_rate_needs_no_journal(cli: Cli) -> None:
    for n in range(3):
        assert cli("schedule", "handler:mail", "x", "--delay", f"{n + 30}m").code == 0
    unknown = cli("load", "--bucket", "1h", "--buckets", "1").lines[-1]
    assert unknown.startswith("mail: how late messages will be is not known: the store keeps no journal (")
    told = cli("load", "--bucket", "1h", "--buckets", "1", "--rate", "500/s").lines[-1]
    assert told == "Messages will be less than 1s late, at 500 a second"
    given = ("--rate", "1/10m", "--of", "mail", "--spread", "1h", "--json")
    *_, last = cli("load", "--bucket", "1h", "--buckets", "1", *given).objects
    assert last["forecast"]["lane"] == "mail"
    assert (last["forecast"]["spread"], last["forecast"]["measured"]) == ("1h", None)


@pytest.mark.parametrize(
    ("option", "value"), [("--rate", "fast"), ("--rate", "0/s"), ("--spread", "10ms"), ("--within", "soon")]
)
def test_a_wrong_option_is_refused_by_its_name(cli: Cli, option: str, value: str) -> None:
    refused = cli("load", option, value, "--json")
    assert refused.code == 1
    assert refused.error["error"] == "ConfigurationError"
    assert refused.error["field"] == option.removeprefix("--")


def test_the_page_says_since_when_a_burst_runs(tmp_path: Path) -> None:
    async def page() -> str:
        async with Scheduler(f"sqlite:///{tmp_path}/delay.db", dispatch=False) as scheduler:
            for n in range(2):
                rule = Conflict.debounce("1h", max_wait="2h")
                await scheduler.schedule(Mail(n), id="reindex", conflict=rule)
            await scheduler.schedule(Mail(0), id="plain", delay="1h")
            async with serving_api(scheduler) as client:
                assert "Debounced since" not in (await client.get("/messages/plain")).text
                return re.sub(r"<[^>]*>", " ", (await client.get("/messages/reindex")).text)

    text = asyncio.run(page())
    assert re.search(r"Debounced since\s+\d{4}-\d\d-\d\d", text)
    assert "max_wait" in text
