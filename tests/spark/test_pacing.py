"""A rate shared by all tasks: the waits of one task, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.redis import RedisStore
from aiodelay.spark.pacing import Pacer, rows_at_once
from aiodelay.sqlite import SqliteStore


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


@pytest.mark.parametrize(
    ("rate", "most", "rows"),
    [(0, 500, 500), (10_000, 500, 100), (10_000, 7, 7), (400, 500, 40), (5, 500, 1), (0.1, 500, 1)],
)
def test_under_a_cap_a_call_has_few_rows_and_no_more_than_a_tenth_of_a_second_s(
    rate: float, most: int, rows: int
) -> None:
    assert rows_at_once(rate, most, RedisStore.traits) == rows


def test_a_store_whose_calls_cost_more_than_their_rows_is_sent_as_many_as_it_takes() -> None:
    assert rows_at_once(10_000, 500, SqliteStore.traits) == 500
