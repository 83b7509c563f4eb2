"""Which writes of a process end the waits of its own loops, and which do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from aiodelay.backends.redis.store.waiting import Waiter, Waiters, first_dues
from aiodelay.core.values import After, Cancel, Command, Envelope, Fire, Outcome, Put, Refused, Stored, Unknown

pytestmark = pytest.mark.asyncio

OP = bytes(8)
MOVED, CLAIMED = "list", "handler"
UNTIL_MS = 1_000


def put(lane: str) -> Put:
    return Put(OP, Envelope("m", lane), After(0))


def stored(due_ms: int) -> Stored:
    return Stored("stored", 1, due_ms)


class Stage:
    """A loop that moves a lane, and one that claims the others."""

    def __init__(self) -> None:
        self.waiters, self.moving, self.claiming = Waiters(), Waiter(), Waiter()
        self.waiters.add(self.moving, MOVED)
        self.waiters.add(self.claiming)

    async def woken_by(self, action: Callable[[], object], until_ms: int | None = UNTIL_MS) -> set[str]:
        """Return which of them, waiting, are woken."""
        self.moving.clear()
        self.claiming.clear()
        async with asyncio.TaskGroup() as tasks:
            waits = {
                MOVED: tasks.create_task(self.moving.wait(0.02, until_ms)),
                CLAIMED: tasks.create_task(self.claiming.wait(0.02, until_ms)),
            }
            await asyncio.sleep(0)
            action()
        return {name for name, wait in waits.items() if wait.result()}


@pytest.mark.parametrize(
    ("lane", "due_ms", "until_ms", "woken"),
    [
        (MOVED, UNTIL_MS - 1, UNTIL_MS, {MOVED}),
        (CLAIMED, UNTIL_MS - 1, UNTIL_MS, {CLAIMED}),
        ("of nobody that is known", UNTIL_MS - 1, UNTIL_MS, {CLAIMED}),
        ("", UNTIL_MS - 1, UNTIL_MS, {MOVED, CLAIMED}),
        ("", UNTIL_MS, UNTIL_MS, set()),
        ("", 10 * UNTIL_MS, None, {MOVED, CLAIMED}),
    ],
)
async def test_l2_what_comes_due_sooner_wakes_whom_it_concerns(
    lane: str, due_ms: int, until_ms: int | None, woken: set[str]
) -> None:
    stage = Stage()
    assert await stage.woken_by(lambda: stage.waiters.come_due({lane: due_ms}), until_ms) == woken


async def test_l2_what_comes_due_in_a_lane_that_is_moved_and_claimed_wakes_both() -> None:
    stage = Stage()
    stage.waiters.add(stage.moving, MOVED, is_shared=True)
    assert await stage.woken_by(lambda: stage.waiters.come_due({MOVED: 0})) == {MOVED, CLAIMED}
    stage.waiters.discard(stage.moving)
    stage.waiters.add(stage.moving, MOVED)
    assert await stage.woken_by(lambda: stage.waiters.come_due({MOVED: 0})) == {MOVED}


async def test_l2_once_nobody_moves_a_lane_what_comes_due_in_it_is_claimed() -> None:
    stage = Stage()
    stage.waiters.discard(stage.moving)
    assert await stage.woken_by(lambda: stage.waiters.come_due({MOVED: 0})) == {CLAIMED}


@pytest.mark.parametrize(
    ("dues_ms", "until_ms", "ends"),
    [
        ([UNTIL_MS - 1], UNTIL_MS, True),
        ([UNTIL_MS - 1, 100 * UNTIL_MS], UNTIL_MS, True),
        ([UNTIL_MS], UNTIL_MS, False),
        ([100 * UNTIL_MS], None, True),
    ],
)
async def test_l2_a_message_between_two_waits_ends_the_second_if_it_is_due_before_its_end(
    dues_ms: list[int], until_ms: int | None, ends: bool
) -> None:
    stage = Stage()
    await stage.woken_by(lambda: None)
    stage.claiming.clear()
    for due_ms in dues_ms:
        stage.waiters.come_due({CLAIMED: due_ms})
    assert await stage.claiming.wait(0.02, until_ms) is ends


async def test_l2_a_message_from_before_the_claim_does_not_end_the_wait_after_it() -> None:
    stage = Stage()
    stage.waiters.come_due({CLAIMED: 0})
    stage.claiming.clear()
    assert not await stage.claiming.wait(0.02, UNTIL_MS)


async def test_first_dues_are_those_of_the_lane_put_to_and_of_any_where_the_lane_is_not_known() -> None:
    commands: list[Command] = [put("a"), put("a"), put("b"), Fire(OP, "m"), put("c"), Cancel(OP, "n")]
    outcomes: list[Outcome] = [stored(5), stored(3), stored(7), stored(4), Refused("exists"), Refused("not_found")]
    assert first_dues(commands, outcomes) == {"a": 3, "b": 7, "": 4}
    assert first_dues(commands, [*outcomes[:-1], Unknown("no answer")]) is None, "it may have been stored"
