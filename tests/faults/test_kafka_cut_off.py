"""F31: a broker comes back without the last records of a partition, as after a power loss, while an owner runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from aiodelay import Alarm, Scheduler, StoreUnavailableError
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.engine import housekeeping
from aiodelay.errors import OutcomeUnknownError, StoreBusyError, StoreError
from tests.support.kafka import Broker, create_topic, ids_in, new_name, read
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

CUT, WHOLE = ids_in(0, 2, 8), ids_in(1, 2, 3)
"""The ids of messages in the partition that is cut off, and in the other partition."""


class Stage:
    """An owner of two partitions on a broker whose disk loses records."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self._topic, self._target = broker, new_name("schedules"), new_name()
        self.url = f"kafka://{broker.bootstrap}/{self._topic}?create_topic=true&partitions=2"

    async def schedule(self, scheduler: Scheduler, *ids: str, delay: str = "1h") -> None:
        for each in ids:
            await scheduler.schedule(each.encode(), to=f"kafka:{self._target}", delay=delay, id=each)

    async def surely_schedule(self, scheduler: Scheduler, *ids: str, delay: str = "1h") -> None:
        """Schedule messages. Repeat it while the broker stands still for longer than the time limit."""
        async with asyncio.timeout(120):
            for each in ids:
                while True:
                    with suppress(StoreUnavailableError, StoreBusyError, OutcomeUnknownError):
                        await self.schedule(scheduler, each, delay=delay)
                        break
                    await asyncio.sleep(0.05)

    async def delivered(self, least: int) -> set[bytes | None]:
        return {each.value for each in await read(self.broker.bootstrap, self._target, least)}

    @asynccontextmanager
    async def owner(self, alarms: list[Alarm]) -> AsyncIterator[Scheduler]:
        """Yield an owner. The broker is down, and its disk has lost five of eight messages in the first partition."""
        await create_topic(self.broker.bootstrap, self._target)
        url = f"{self.url}&timeout_ms=3000"
        async with Scheduler(url, store_timeout="3s", on_alarm=alarms.append) as scheduler:
            await self.surely_schedule(scheduler, *CUT[:3], WHOLE[0])
            size = self.broker.log_bytes(self._topic, 0)
            await self.surely_schedule(scheduler, *CUT[3:])
            assert self.broker.log_bytes(self._topic, 0) > size
            self.broker.kill()
            self.broker.cut_log(self._topic, 0, size)
            yield scheduler


@pytest.fixture
def stage(own_broker: Broker) -> Stage:
    return Stage(own_broker)


async def test_f31_a_partition_that_was_cut_off_ends_loudly_and_holds_up_no_other_partition(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "STEP_S", 0.2)
    alarms: list[Alarm] = []
    async with stage.owner(alarms) as scheduler:
        await asyncio.to_thread(stage.broker.start)
        await until(lambda: scheduler.status().phase == "ended", "the owner has noticed", 60)
        why = scheduler.status().why
        assert "is deleted, or cut off: partition 0 ends at " in why
        with pytest.raises(StoreUnavailableError, match="cut off: partition 0 ends at"):
            await stage.schedule(scheduler, CUT[0])
        await stage.surely_schedule(scheduler, *WHOLE[1:], delay="1ms")
        assert await stage.delivered(2) == {each.encode() for each in WHOLE[1:]}
        await until(lambda: alarms, "the alarm")
    assert alarms == [Alarm("ended", "", 0, reason=why)]
    told = [each for each in caplog.records if each.name == "aiodelay.kafka" and why in each.message]
    assert [each.levelname for each in told] == ["ERROR"]
    async with Scheduler(stage.url) as restarted:
        pending = [each.record.id async for each in restarted.pending()]
        assert sorted(pending) == sorted([*CUT[:3], WHOLE[0]])
        await restarted.fire(CUT[0])
        assert CUT[0].encode() in await stage.delivered(3)


async def test_f31_the_next_session_notices_a_partition_that_was_cut_off(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Partition, "is_cut_off", lambda partition, end: None)  # the reader alone does not notice
    async with stage.owner([]) as scheduler:
        with pytest.raises(StoreError):
            await stage.schedule(scheduler, CUT[0])  # this ends the session
        await asyncio.to_thread(stage.broker.start)
        await until(lambda: scheduler.status().phase == "ended", "the owner has noticed", 60)
        assert "is deleted, or cut off: partition 0 ends at " in scheduler.status().why
