"""A series whose time zone one machine does not know waits for a machine that knows it."""

from __future__ import annotations

import struct
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from aiodelay import Late, Scheduler
from aiodelay.backends.kafka import records
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Conflict, Delivery, Demand, Envelope, Put, Record, SendOutcome, Sent
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock

ZONE = "Mars/Olympus"
RULE: Mapping[str, str | int] = {"c": "* * * * *", "z": ZONE}
ZONE_FILE = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lbB", 0, 0, 0) + b"MST\0"
"""A zone of UTC without clock changes (RFC 8536, version 1)."""
WAIT_S = 10


@pytest.fixture
def learn_zone(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A function that installs the zone on this machine."""
    path = tmp_path / ZONE
    zoneinfo.reset_tzpath([tmp_path, *zoneinfo.TZPATH])

    def install() -> None:
        path.parent.mkdir()
        path.write_bytes(ZONE_FILE)

    yield install
    zoneinfo.reset_tzpath()
    zoneinfo.ZoneInfo.clear_cache(only_keys=[ZONE])


def series(lane: str, *, address: str = "", rule: Mapping[str, str | int] = RULE, late: Late | None = None) -> Put:
    envelope = Envelope("series", lane, address, payload=b"", rule=rule)
    return Put(new_op(), envelope, After(0), Conflict.replace(), late or Late.deliver())


def never_run(clock: VirtualClock) -> tuple[MemoryStore, Scheduler]:
    """Return a store, and a scheduler on it whose handler must not run."""
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        raise AssertionError("it must not run")

    return store, scheduler


class OneSink:
    name, limits = "topic", Demand(10)

    def __init__(self) -> None:
        self.sent: list[str] = []

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self.sent += [each.envelope.id for each in deliveries]
        return [Sent()] * len(deliveries)


@pytest.mark.parametrize("late", [None, Late.drop("1s"), Late.dead_letter("1s")])
@pytest.mark.parametrize("kind", ["handler", "batch", "sink"])
@pytest.mark.asyncio
async def test_a_series_of_an_unknown_zone_waits_until_its_zone_is_known(
    clock: VirtualClock,
    learn_zone: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    late: Late | None,
) -> None:
    store, sink, runs = MemoryStore(clock=clock, journal=100), OneSink(), list[object]()
    scheduler = Scheduler(store, sinks=[sink], clock=clock)
    if kind == "batch":

        @scheduler.handler(name="work", batch=2, batch_wait="0s")
        async def many(payloads: list[bytes]) -> None:
            runs.extend(payloads)
    else:

        @scheduler.handler(name="work")
        async def one(payload: bytes) -> None:
            runs.append(payload)

    await clock.advance(seconds=30)
    async with scheduler:
        await store.apply([series("topic", address="a", late=late) if kind == "sink" else series("work", late=late)])
        await clock.advance(seconds=WAIT_S / 2)
        waiting = await scheduler.get("series")
        assert waiting is not None
        assert (waiting.record.attempt, waiting.record.envelope.rule) == (0, RULE)
        assert ZONE in (waiting.record.last_error or "")
        assert [each async for each in scheduler.dead_letters()] == []
        (line,) = [each for each in caplog.records if "series" in each.getMessage()]
        assert (line.levelname, ZONE in line.getMessage()) == ("ERROR", True)
        assert (runs, sink.sent) == ([], [])
        learn_zone()
        await clock.advance(seconds=WAIT_S / 2 + 1)
        is_late = late is not None
        assert len(runs) + len(sink.sent) == (not is_late)
        await clock.advance(seconds=60)
        assert len(runs) + len(sink.sent) == 1 + (not is_late)
        going_on = await scheduler.get("series")
        assert going_on is not None
        assert going_on.record.last_error is None


@pytest.mark.asyncio
async def test_a_cancelled_series_of_an_unknown_zone_ends(clock: VirtualClock) -> None:
    store, scheduler = never_run(clock)
    async with scheduler:
        await store.apply([series("work")])
        await clock.advance(seconds=1)
        assert await scheduler.cancel("series")
        await clock.advance(seconds=WAIT_S)
        assert await scheduler.get("series") is None
        assert [each async for each in scheduler.dead_letters()] == []


@pytest.mark.parametrize(
    "rule", [{"c": "six fields", "z": ZONE}, {"c": "* * * * *", "z": ZONE, "m": "never"}, {"z": ZONE}, {"e": 0}]
)
@pytest.mark.asyncio
async def test_a_series_with_another_mistake_is_a_dead_letter(
    clock: VirtualClock, rule: Mapping[str, str | int]
) -> None:
    store, scheduler = never_run(clock)
    async with scheduler:
        await store.apply([series("work", rule=rule)])
        await clock.advance(seconds=1)
        (letter,) = [each async for each in scheduler.dead_letters()]
    assert letter.reason == "undecodable"


def test_a_record_of_kafka_with_an_unknown_zone_can_be_read() -> None:
    record = Record(series("work").envelope, 1, 2, b"\x01" * 8)
    wire = records.encode_record(record, read_to=0)
    assert wire.key is not None
    assert wire.value is not None
    assert records.decode(wire.key, wire.value, wire.headers, written_ms=1).envelope.rule == RULE
