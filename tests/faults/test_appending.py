"""F1: kill -9 while a message is in flight that gets more items. No item is lost, and the heir gets them in one run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import Conflict, Scheduler
from tests.support.servers import redis_servers, serving

pytestmark = pytest.mark.asyncio


@dataclass
class Added:
    number: int


@pytest.fixture(params=["sqlite", redis_servers()[0]], ids=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/delay.db"
    else:
        with serving(request.param) as found:
            yield found


async def run_forever(url: str) -> None:
    """Serve the handler. Its first run never ends, and says what it got."""
    scheduler = Scheduler(url)

    @scheduler.handler(gathered=True)
    async def take(items: list[Added]) -> None:
        print(*(item.number for item in items), flush=True)
        await asyncio.Event().wait()

    async with scheduler:
        await asyncio.Event().wait()


async def test_f1_a_kill_loses_no_item_that_came_while_the_message_was_in_flight(url: str) -> None:
    code = f"import asyncio, sys; from {__name__} import run_forever; asyncio.run(run_forever(sys.argv[1]))"
    runs: list[list[int]] = []
    async with Scheduler(url, dispatch=False) as producer:
        await producer.schedule(Added(0), delay="0s", id="m", conflict=Conflict.append())
        victim = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        assert victim.stdout is not None
        with victim, victim.stdout:
            assert victim.stdout.readline() == "0\n"
            for number in range(1, 5):
                added = await producer.schedule(Added(number), delay="1h", id="m", conflict=Conflict.append(4))
                assert added.is_older_in_flight
            victim.send_signal(signal.SIGKILL)
    scheduler = Scheduler(url)

    @scheduler.handler(gathered=True)
    async def take(items: list[Added]) -> None:
        runs.append([item.number for item in items])

    async with scheduler:
        await scheduler.run_until_idle()
    assert runs == [[0, 1, 2, 3, 4]]
