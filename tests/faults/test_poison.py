"""L5: one message among 500 kills its process each time; all others are delivered, it ends as a dead letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiodelay import Reject, Retry, Scheduler
from tests.faults.programs.worker import Burst
from tests.faults.scene import Scene
from tests.support.checker import Limits

DEATHS = 5
"""Two among others, three alone (transitions.SUSPECT_LAPSES, KILLS_TO_DEATH)."""


def test_l5_a_message_that_kills_its_process_stops_nobody(any_scene: Scene) -> None:
    burst = Burst(messages=500, spread_ms=0, special={250: b"die"})
    any_scene.start("producer", burst=burst, until="produced").ended_well()
    deaths = 0
    while (code := any_scene.start(f"w{deaths}", serve=("work",)).wait()) == -9:
        deaths += 1
        assert deaths <= DEATHS
    assert (code, deaths) == (0, DEATHS)
    any_scene.judge(Limits(poison={"m-250": "killed_worker"}))


class UnspeakableError(Exception):
    """Raises when it is shown."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("what", "last_error"),
    [
        (UnspeakableError(), "UnspeakableError: its text cannot be read"),
        (FileNotFoundError("r\udce9sum\udce9"), "FileNotFoundError: r\\udce9sum\\udce9"),
        (Reject("r\udce9sum\udce9"), "r\\udce9sum\\udce9"),
    ],
    ids=["no text", "no UTF-8", "rejected, no UTF-8"],
)
@pytest.mark.asyncio
async def test_l5_an_error_that_cannot_be_written_down_stops_nobody(
    tmp_path: Path, what: Exception | Reject, last_error: str
) -> None:
    scheduler = Scheduler(f"sqlite:///{tmp_path}/delay.db")
    delivered: list[bytes] = []

    @scheduler.handler(name="work", retry=Retry(attempts=2, first="1ms"))
    async def work(event: bytes) -> Reject | None:
        if event == b"poison":
            if isinstance(what, Reject):
                return what
            raise what
        delivered.append(event)
        return None

    async with scheduler:
        for each in (b"a", b"poison", b"b"):
            await scheduler.schedule(each, to="handler:work", delay="1ms")
        await scheduler.run_until_idle()
        letters = [letter async for letter in scheduler.dead_letters()]
    assert [letter.record.last_error for letter in letters] == [last_error]
    assert sorted(delivered) == [b"a", b"b"]
