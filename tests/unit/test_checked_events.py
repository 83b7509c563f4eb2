"""`schedule()` refuses an event that its own type cannot read, instead of failing when the event is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from aiodelay import CodecError, Message, PartlyScheduledError, PayloadTypeError, Scheduler
from aiodelay.blocking import BlockingScheduler
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    number: int
    notes: list[str] = field(default_factory=list)


class Parcel(msgspec.Struct):
    weight: Decimal
    label: str = ""


class Invoice(pydantic.BaseModel):
    number: int = pydantic.Field(alias="invoiceNumber")


@dataclass
class Loose:
    value: Any


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (Order("s3cret"), "an Order that could not be read again (ValidationError: Expected `int`, got `str` - at"),  # type: ignore[arg-type]
        (Order(7, ["a", None]), "at `$.notes[1]`"),  # type: ignore[list-item]
        (Parcel("s3cret"), "a Parcel that could not be read again"),  # type: ignore[arg-type]
        (Invoice(invoiceNumber=7), "an Invoice that could not be read again (ValidationError"),
    ],
    ids=["field", "item", "struct", "pydantic-alias"],
)
async def test_it_is_refused_and_nothing_is_stored(
    clock: VirtualClock,
    event: object,
    problem: str,
    encoding: Any,  # noqa: ANN401 - one of two texts
) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock, encoding=encoding) as scheduler:
        with pytest.raises(PayloadTypeError) as caught:
            await scheduler.schedule(event, delay="1h", id="m")
        with pytest.raises(PartlyScheduledError, match="could not be read again"):
            await scheduler.schedule_many([Message(event, delay="1h")])
        assert problem in caught.value.value
        assert "check_events=False" in caught.value.allowed
        assert "s3cret" not in str(caught.value)
        assert caught.value.message_id == "m"
        assert await scheduler.counts() == {}


@pytest.mark.parametrize(
    "event",
    [Order(7), Parcel(Decimal("1.5")), Loose([1, {"a": None}]), Loose({1, 2})],
    ids=["dataclass", "struct", "any", "set-in-any"],
)
async def test_what_can_be_read_is_stored(clock: VirtualClock, event: object) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock) as scheduler:
        await scheduler.schedule(event, delay="1h", id="m")
        assert await scheduler.get("m") is not None


async def test_a_class_that_no_handler_can_have_may_still_be_sent(clock: VirtualClock) -> None:
    @dataclass
    class Odd:
        value: Order | Parcel | Loose  # no decoder can tell them apart

    async with Scheduler(MemoryStore(clock=clock), sinks=["stdout:"], clock=clock) as scheduler:
        await scheduler.schedule(Odd(Order(7)), delay="1h", to="stdout:x", id="m")
        assert await scheduler.get("m") is not None


async def test_it_can_be_turned_off(clock: VirtualClock) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock, check_events=False) as scheduler:
        await scheduler.schedule(Order("x"), delay="1h", id="m")  # type: ignore[arg-type]
        assert await scheduler.get("m") is not None


async def test_the_blocking_scheduler_refuses_it_too(tmp_path: Any) -> None:  # noqa: ANN401 - pytest's
    url = f"sqlite:///{tmp_path}/delay.db"
    for checks in (True, False):
        scheduler = BlockingScheduler(url, check_events=checks)
        if checks:
            with pytest.raises(PayloadTypeError):
                scheduler._shared._make()._composer.put(Message(Order("x"), delay="1h"), 0)  # type: ignore[arg-type]
        else:
            scheduler._shared._make()._composer.put(Message(Order("x"), delay="1h"), 0)  # type: ignore[arg-type]


async def test_an_event_that_cannot_be_written_names_the_field(clock: VirtualClock) -> None:
    async with Scheduler(MemoryStore(clock=clock), clock=clock) as scheduler:
        with pytest.raises(CodecError, match=r"a Loose that holds an object in field 'value'; allowed"):
            await scheduler.schedule(Loose(object()), delay="1h")
        with pytest.raises(CodecError, match=r"an Order that holds an object in field 'notes'; allowed"):
            await scheduler.schedule(Order(7, object()), delay="1h")  # type: ignore[arg-type]
