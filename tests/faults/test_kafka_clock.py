"""F15, F16, F17: the clock of a broker, an owner or a client of a Kafka store is wrong, or steps."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aiodelay import CancelOutcome, Context, Scheduler
from tests.support.kafka import Broker, create_topic, new_name, read
from tests.support.server_clock import FileClock, SteppedClock, clock_shim
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

HOUR_S = 3_600
HOUR = timedelta(hours=1)


def new_url(kafka: str) -> str:
    return f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"


def step(clock: SteppedClock, seconds: float) -> None:
    clock.offset_ns += int(seconds * 1e9)


def time_of(clock: SteppedClock) -> datetime:
    return datetime.fromtimestamp(clock.now_ms() / 1_000, UTC)


class Runs:
    """An owner with a clock and one handler, and the runs of this handler."""

    def __init__(self, url: str, clock: SteppedClock, *, takes_s: float = 0) -> None:
        self.scheduler = Scheduler(url, clock=clock)
        self.started: list[str] = []
        self.ended: list[str] = []

        @self.scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            assert time_of(clock) >= context.due, "early (S1)"
            self.started.append(context.id)
            await asyncio.sleep(takes_s)  # a handler at work
            self.ended.append(context.id)

    async def until(self, *ids: str) -> None:
        """Wait until these messages are delivered. A step forwards may repeat a run that is not settled."""
        await until(lambda: {*ids} <= {*self.ended}, f"the runs of {ids} have ended")

        async def are_settled() -> bool:
            return not any([await self.scheduler.get(each) for each in ids])

        await until(are_settled, f"the runs of {ids} are settled")


async def given(scheduler: Scheduler, message_id: str, delay: str, payload: bytes = b"") -> None:
    await scheduler.schedule(payload, to="handler:work", delay=delay, id=message_id)


# --- the clock of an owner ----------------------------------------------------------------------------------


async def test_f17_after_a_step_of_an_owners_clock_due_messages_run_and_others_wait(kafka: str) -> None:
    clock = SteppedClock()
    runs = Runs(new_url(kafka), clock)
    async with runs.scheduler as scheduler:
        await given(scheduler, "in 30 min", "30m")
        await given(scheduler, "in 90 min", "90m")
        step(clock, HOUR_S)
        await runs.until("in 30 min")
        step(clock, -HOUR_S)
        await given(scheduler, "now", "1ms")
        await runs.until("now")
        assert runs.started == ["in 30 min", "now"]
        step(clock, 2 * HOUR_S)
        await runs.until("in 90 min")
        await scheduler.run_until_idle()
    assert sorted(runs.started) == ["in 30 min", "in 90 min", "now"]


@pytest.mark.parametrize(
    ("step_s", "takes_s", "most_runs"),
    [(HOUR_S, 2, 2), (-HOUR_S, 4, 1)],  # the second: longer than it takes to renew a lease
    ids=["forwards", "backwards"],
)
async def test_f17_a_step_forwards_costs_at_most_one_more_run_each_and_one_backwards_none(
    kafka: str, step_s: int, takes_s: int, most_runs: int
) -> None:
    clock, ids = SteppedClock(), [f"m{number}" for number in range(5)]
    runs = Runs(new_url(kafka), clock, takes_s=takes_s)
    async with runs.scheduler as scheduler:
        for each in ids:
            await given(scheduler, each, "0s")
        await until(lambda: len(runs.started) == 5, "all run")
        step(clock, step_s)
        await given(scheduler, "wakes it", "0s")
        await runs.until(*ids, "wakes it")
        await scheduler.run_until_idle()
        assert await scheduler.counts() == {}
    assert {*runs.ended} == {*ids, "wakes it"}
    assert max(runs.started.count(each) for each in runs.started) <= most_runs


@pytest.mark.parametrize("first_s", [HOUR_S, -HOUR_S], ids=["fast", "slow"])
async def test_f16_an_owner_whose_clock_is_right_takes_over_from_one_whose_clock_is_wrong(
    kafka: str, first_s: int
) -> None:
    """Nothing is lost, no delivered message comes back, and the owner of the moment decides what is due."""
    url, target = new_url(kafka), await create_topic(kafka, new_name())
    right, wrong = SteppedClock(), SteppedClock(first_s)
    ends = {name: time_of(right) + timedelta(minutes=minutes) for name, minutes in [("soon", 30), ("far", 90)]}
    ends["past"] = time_of(right) - 2 * HOUR
    async with Scheduler(url, clock=right, dispatch=False) as client:
        for name, due in ends.items():
            await client.schedule(name.encode(), to=f"kafka:{target}", at=due, id=name)
    by_wrong = {name for name, due in ends.items() if due <= time_of(wrong)}
    async with Scheduler(url, clock=wrong):
        assert await arrived(kafka, target, len(by_wrong)) == by_wrong
        await asyncio.sleep(2)  # nothing else may arrive
    async with Scheduler(url, clock=right) as owner:
        assert {each.record.id async for each in owner.pending()} == {*ends} - by_wrong
        assert await arrived(kafka, target, len(by_wrong)) == by_wrong
        step(right, 2 * HOUR_S)
        assert await arrived(kafka, target, len(ends)) == {*ends}
        assert [each async for each in owner.dead_letters()] == []


async def arrived(kafka: str, target: str, least: int) -> set[str]:
    """Return the payloads in a topic, each of which is there once."""
    found = [(each.value or b"").decode() for each in await read(kafka, target, least)]
    assert len(found) == len({*found}), found
    return {*found}


# --- the clock of a client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_s", [HOUR_S, -HOUR_S], ids=["fast", "slow"])
async def test_f16_the_clock_of_a_client_decides_what_a_delay_counts_from_and_nothing_else(
    kafka: str, wrong_s: int
) -> None:
    url, clock = new_url(kafka), SteppedClock()
    runs, client = Runs(url, clock), Scheduler(url, clock=SteppedClock(wrong_s), dispatch=False)
    async with runs.scheduler as owner, client:
        await given(owner, "replaced", "2h", b"old")
        await client.schedule(b"", to="handler:work", at=time_of(clock) + HOUR, id="replaced")
        await given(owner, "cancelled", "1h")
        assert await client.cancel("cancelled") is CancelOutcome.RECORDED
        await client.schedule(b"", to="handler:work", at=time_of(clock) + timedelta(seconds=1), id="at")
        await given(client, "delay", "90m")
        await runs.until("at")
        step(clock, 1.25 * HOUR_S)
        await runs.until("replaced")
        if wrong_s < 0:
            await runs.until("delay")
        step(clock, HOUR_S)
        assert runs.started.count("delay") == (wrong_s < 0)
        step(clock, HOUR_S)
        await runs.until("delay")
        await owner.run_until_idle()
    assert sorted(runs.started) == ["at", "delay", "replaced"]


# --- the clock of a broker ----------------------------------------------------------------------------------


@pytest.fixture
def stepped_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Broker, FileClock | None]]:
    """A broker and its clock; None without a C compiler: then the clocks of the processes step the other way."""
    clock, environment = clock_shim(tmp_path)
    broker = Broker()
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        broker.launch()
    broker.wait_until_ready()
    yield broker, clock if environment else None
    broker.stop()


async def appended_s(kafka: str) -> float:
    """Return the time of a record that the broker has just appended to a topic that keeps the broker's time."""
    name = await create_topic(kafka, new_name(), message_timestamp_type="LogAppendTime")
    async with Scheduler(new_url(kafka)) as scheduler:
        await scheduler.schedule(b"", to=f"kafka:{name}", delay="0s")
        (record,) = await read(kafka, name, 1)
    return int(record.timestamp) / 1_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forwards", "backwards"])
async def test_f15_a_step_of_a_brokers_clock_changes_no_due_time_and_the_latest_version_wins(
    stepped_broker: tuple[Broker, FileClock | None], step_s: int
) -> None:
    broker, clock = stepped_broker
    url, right = new_url(broker.bootstrap), SteppedClock()
    runs, client = Runs(url, right), Scheduler(url, clock=right, dispatch=False)
    async with runs.scheduler as owner, client:
        for message_id in ("replaced", "cancelled", "waits"):
            await given(client, message_id, "3h")
        if clock is None:
            step(right, -step_s)
        else:
            step(clock, step_s)
            assert abs(await appended_s(broker.bootstrap) - clock.now_ms() / 1_000) < HOUR_S / 2, "the step has worked"
        await given(client, "replaced", "1ms")
        assert await client.cancel("cancelled") is CancelOutcome.RECORDED
        await runs.until("replaced")
        assert runs.started == ["replaced"]
        step(right, 4 * HOUR_S)
        await runs.until("waits")
        await owner.run_until_idle()
    assert sorted(runs.started) == ["replaced", "waits"]


# --- the warning --------------------------------------------------------------------------------------------


@contextmanager
def warned(caplog: pytest.LogCaptureFixture, url: str, side: str) -> Iterator[None]:
    """Check that the log gets one warning: the broker's clock is an hour on this side; with "", it gets none.

    The warning names less than an hour by the time that a request took, which may be long on a busy machine.
    """
    caplog.clear()
    began_s = time.monotonic()
    yield
    took_ms = (time.monotonic() - began_s) * 1_000
    told = [each.message for each in caplog.records if "'s clock is" in each.message]
    if not side:
        assert told == []
        return
    (text,) = told
    found = re.fullmatch(rf"{re.escape(url)}: the broker's clock is (\d+) ms {side} the local clock", text)
    assert found is not None, text
    assert HOUR_S * 1_000 - took_ms - 10 <= int(found[1]) <= HOUR_S * 1_000 + 10, text


@pytest.mark.parametrize(("wrong_s", "side"), [(HOUR_S, "behind"), (-HOUR_S, "ahead of"), (0, "")])
@pytest.mark.parametrize("dispatch", [True, False], ids=["owner", "client"])
async def test_f16_a_process_whose_clock_is_wrong_is_told_once(
    kafka: str, caplog: pytest.LogCaptureFixture, *, dispatch: bool, wrong_s: int, side: str
) -> None:
    url = new_url(kafka)
    with warned(caplog, url, side):
        async with Scheduler(url, clock=SteppedClock(wrong_s), dispatch=dispatch) as scheduler:
            for number in range(3):
                await given(scheduler, f"m{number}", "2h")


async def test_f17_a_process_whose_clock_steps_is_told(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    url, clock = new_url(kafka), SteppedClock()
    async with Scheduler(url, clock=clock) as scheduler:
        with warned(caplog, url, ""):
            await given(scheduler, "m", "2h")
        with warned(caplog, url, "behind"):
            step(clock, HOUR_S)
            await given(scheduler, "n", "2h")
