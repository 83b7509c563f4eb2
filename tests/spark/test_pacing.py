"""A rate over all tasks: what one task waits, on a clock of the test's."""

from __future__ import annotations

import asyncio

from aiodelay.spark.pacing import Pacer


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def seconds(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_rows_are_waited_for_before_they_are_sent_and_lost_time_is_not_made_up_for() -> None:
    clock = Clock()
    pacer = Pacer(100, now_s=clock.seconds, sleep=clock.sleep)

    async def play() -> None:
        await pacer.take(50)
        assert clock.now_s == 0.5
        clock.now_s += 0.25  # composing and sending take their time
        await pacer.take(50)
        assert clock.now_s == 1.25
        clock.now_s += 60
        await pacer.take(100)
        assert clock.now_s == 62.25

    asyncio.run(play())


def test_without_a_cap_nobody_waits() -> None:
    clock = Clock()
    asyncio.run(Pacer(0, now_s=clock.seconds, sleep=clock.sleep).take(10**9))
    assert clock.now_s == 0
