"""Test a program whose messages are due in hours, without waiting.

Run it: pytest examples/testing_with_virtual_time.py    (needs pytest and pytest-asyncio)

aiodelay brings the fixtures `scheduler`, `clock` and `faulty_store`; pytest finds them by itself. `scheduler` is the
program's own scheduler with its handlers, moved to an empty memory store and virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest

from aiodelay import Context, Reject, Retry, Scheduler
from aiodelay.testing import FaultyStore, VirtualClock, assert_delivered, assert_scheduled

# --- the program: usually a separate module -----------------------------------------------------------------

shop = Scheduler("sqlite:///shop.db")
mails: list[str] = []


@dataclass
class RemindOfPayment:
    order: int


@dataclass
class GiveUpOrder:
    order: int


@shop.handler(retry=Retry(attempts=3, first="10m", factor=2, jitter=0))
async def remind(event: RemindOfPayment, context: Context) -> Reject | None:
    if event.order < 0:
        return Reject("no such order")
    if event.order == 13 and context.attempt < 3:
        raise ConnectionError("the mail server is away")
    mails.append(f"please pay order {event.order}")
    await context.scheduler.schedule(GiveUpOrder(event.order), delay="12h", id=f"give-up-{event.order}")
    return None


@shop.handler
async def give_up(event: GiveUpOrder) -> None:
    mails.append(f"order {event.order} is given up")


async def order_placed(order: int) -> None:
    await shop.schedule(RemindOfPayment(order), delay="3h", id=f"remind-{order}")


async def order_paid(order: int) -> None:
    await shop.cancel(f"remind-{order}")
    await shop.cancel(f"give-up-{order}")


# --- the tests of the program -------------------------------------------------------------------------------


@pytest.fixture
def aiodelay_scheduler() -> Scheduler:
    """Choose the scheduler that the fixture `scheduler` uses. Usually this is in conftest.py."""
    mails.clear()
    return shop


@pytest.mark.asyncio
async def test_who_does_not_pay_is_reminded_and_then_given_up(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with scheduler:
        await order_placed(7)
        assert_scheduled(scheduler, RemindOfPayment(7), within="3h")

        await clock.advance("3h")  # returns when all due messages are settled
        assert_delivered(scheduler, RemindOfPayment(7), times=1)
        assert mails == ["please pay order 7"]

        await clock.advance("12h")
        assert mails == ["please pay order 7", "order 7 is given up"]


@pytest.mark.asyncio
async def test_who_pays_is_left_alone(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with scheduler:
        await order_placed(7)
        await clock.advance("2h")
        await order_paid(7)
        await clock.advance("1d")
    assert_scheduled(scheduler, RemindOfPayment, times=0)
    assert mails == []


@pytest.mark.asyncio
async def test_a_mail_server_that_is_away_is_tried_again(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with scheduler:
        await order_placed(13)
        await clock.advance("3h")
        assert_scheduled(scheduler, RemindOfPayment(13), within="10m")
        await clock.advance("30m")  # retries after 10 minutes, then after 20 more minutes
    assert [delivery.attempt for delivery in assert_delivered(scheduler, RemindOfPayment(13), times=3)] == [1, 2, 3]
    assert mails == ["please pay order 13"]


@pytest.mark.asyncio
async def test_what_cannot_work_becomes_a_dead_letter(scheduler: Scheduler, clock: VirtualClock) -> None:
    async with scheduler:
        await order_placed(-1)
        await clock.advance("3h")
        assert [letter.reason async for letter in scheduler.dead_letters(RemindOfPayment)] == ["rejected"]


@pytest.mark.asyncio
async def test_a_store_that_is_away_for_a_while_loses_nothing(
    scheduler: Scheduler, clock: VirtualClock, faulty_store: FaultyStore
) -> None:
    async with scheduler:
        await order_placed(7)
        faulty_store.inject("unavailable", "claim", "settle", times=5)
        await clock.advance(timedelta(hours=3, minutes=1))
    assert mails == ["please pay order 7"]
