from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.errors import ConfigurationError, InputError, WrongLoopError
from aiodelay.ports.clock import Clock, SystemClock
from aiodelay.testing.clock import START, VirtualClock
from aiodelay.testing.loop import VirtualLoop

DAY_MS = 86_400_000
YEAR_MS = 365 * DAY_MS


def test_system_clock_tells_whole_milliseconds_rounded_down() -> None:
    clock: Clock = SystemClock()
    before, told, after = time.time_ns(), clock.now_ms(), time.time_ns()
    assert before // 1_000_000 <= told <= after // 1_000_000
    before, told, after = time.monotonic_ns(), clock.monotonic_ms(), time.monotonic_ns()
    assert before // 1_000_000 <= told <= after // 1_000_000


def test_a_hand_moved_clock_starts_at_the_documented_instant() -> None:
    told: Clock = VirtualClock()
    assert told.now_ms() == 1_893_456_000_000
    assert told.monotonic_ms() == 0
    assert VirtualClock().now() == START == datetime(2030, 1, 1, tzinfo=UTC)


def test_move_moves_both_clocks() -> None:
    clock = VirtualClock()
    clock.move(1500)
    assert clock.now() == START + timedelta(seconds=1.5)
    assert clock.monotonic_ms() == 1500


def test_time_does_not_pass_backwards() -> None:
    clock = VirtualClock()
    with pytest.raises(InputError, match=r"ms is -1; allowed: 0 or more; clock\.step\(\)"):
        clock.move(-1)
    assert clock.monotonic_ms() == 0


@pytest.mark.parametrize("delta", [timedelta(hours=-1), timedelta(days=3), timedelta(microseconds=-1)])
def test_step_moves_the_wall_clock_alone(delta: timedelta) -> None:
    clock = VirtualClock()
    clock.move(10_000)
    clock.step(delta)
    assert clock.now() == START + timedelta(seconds=10) + delta
    assert clock.monotonic_ms() == 10_000


def test_now_ms_rounds_down() -> None:
    clock = VirtualClock(start=datetime(1970, 1, 1, 0, 0, 0, 1999, tzinfo=UTC))
    assert clock.now_ms() == 1
    clock.step(timedelta(microseconds=-2000))
    assert clock.now_ms() == -1


def test_start_must_be_aware() -> None:
    with pytest.raises(InputError, match="allowed: an aware datetime"):
        VirtualClock(start=datetime(2030, 1, 1))  # noqa: DTZ001


def test_a_clock_follows_its_loop_from_the_moment_it_is_made() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(asyncio.sleep(5))
        clock = VirtualClock(loop)
        assert clock.now() == START
        runner.run(asyncio.sleep(3600))
        assert clock.now() == START + timedelta(hours=1)
        assert clock.monotonic_ms() == 3_600_000
        with pytest.raises(ConfigurationError, match=r"await clock\.advance\(\)"):
            clock.move(1)


def test_a_clock_of_the_next_loop_is_moved_by_hand_until_one_runs() -> None:
    async def told_and_slept(clock: VirtualClock) -> datetime:
        at_first = clock.now()
        await asyncio.sleep(5)
        return at_first

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.sleep(7))
        clock = VirtualClock.of_next_loop()
        clock.move(1000)
        assert clock.now() == START + timedelta(seconds=1)
        assert runner.run(told_and_slept(clock)) == START + timedelta(seconds=1)
        assert clock.now() == START + timedelta(seconds=6)


def test_a_clock_of_the_next_loop_follows_the_one_that_is_running() -> None:
    async def measured() -> int:
        await asyncio.sleep(7)
        clock = VirtualClock.of_next_loop()
        await asyncio.sleep(5)
        return clock.monotonic_ms()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(measured()) == 5000


def test_a_clock_may_change_its_loop() -> None:
    clock = VirtualClock()
    clock.move(1000)
    with asyncio.Runner(loop_factory=VirtualLoop) as first, asyncio.Runner(loop_factory=VirtualLoop) as second:
        for runner in (first, second):
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            runner.run(asyncio.sleep(7))
            clock.follow(loop)
            runner.run(asyncio.sleep(5))
        assert clock.monotonic_ms() == 11_000


def test_a_clock_of_the_next_loop_refuses_a_real_loop() -> None:
    clock = VirtualClock.of_next_loop()

    async def read() -> None:
        clock.now_ms()

    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(read())
    with pytest.raises(ConfigurationError, match="not a loop of asyncio"):
        clock.advance("1s").send(None)
    assert clock.monotonic_ms() == 0
    text = str(caught.value)
    assert "the event loop under the clock is" in text
    assert "loop_scope='function'" in text
    assert "('asyncio', {'loop_factory': VirtualLoop})" in text
    assert "asyncio.Runner(loop_factory=VirtualLoop)" in text


def test_advance_refuses_another_loop_than_its_own() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, asyncio.Runner(loop_factory=VirtualLoop) as other:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        clock = VirtualClock(loop)
        with pytest.raises(WrongLoopError, match="another event loop"):
            other.run(clock.advance("1s"))
        assert clock.monotonic_ms() == 0


def test_advance_takes_text_timedelta_and_keywords() -> None:
    async def advance() -> int:
        clock = VirtualClock.of_next_loop()
        await clock.advance("1h")
        await clock.advance(timedelta(minutes=1))
        await clock.advance(hours=1, minutes=1, seconds=1.5)
        await clock.advance("1s", minutes=1)
        await clock.advance()
        return clock.monotonic_ms()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(advance()) == 3_600_000 + 60_000 + 3_661_500 + 61_000


@pytest.mark.parametrize("delta", ["soon", timedelta(seconds=-1)])
def test_advance_refuses_what_is_no_duration(delta: str | timedelta) -> None:
    clock = VirtualClock()
    with pytest.raises(InputError, match="delta is"):
        asyncio.run(clock.advance(delta))
    with pytest.raises(InputError, match="hours, minutes, seconds is"):
        asyncio.run(clock.advance(hours=-1))
    assert clock.monotonic_ms() == 0


def test_advance_lets_everything_happen_at_its_own_time_and_in_order() -> None:
    async def advance() -> list[tuple[str, int]]:
        clock = VirtualClock.of_next_loop()
        clock.now_ms()
        seen: list[tuple[str, int]] = []

        async def every(name: str, seconds: float) -> None:
            while True:
                await asyncio.sleep(seconds)
                seen.append((name, clock.monotonic_ms()))
                await asyncio.sleep(0)
                await asyncio.to_thread(int)
                seen.append((f"{name} done", clock.monotonic_ms()))

        async with asyncio.TaskGroup() as tasks:
            beats = [tasks.create_task(every("a", 10)), tasks.create_task(every("b", 15))]
            await clock.advance("20s")
            seen.append(("advanced", clock.monotonic_ms()))
            for beat in beats:
                beat.cancel()
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(advance()) == [
            ("a", 10_000),
            ("a done", 10_000),
            ("b", 15_000),
            ("b done", 15_000),
            ("a", 20_000),
            ("a done", 20_000),
            ("advanced", 20_000),
        ]


@pytest.mark.parametrize("follows_loop", [True, False])
def test_advance_asks_its_hooks_until_all_are_idle(follows_loop: bool) -> None:
    asked: list[tuple[str, int]] = []

    async def advance() -> int:
        clock = VirtualClock.of_next_loop() if follows_loop else VirtualClock()
        work = {"first": 1, "second": 2}

        def hook(name: str) -> None:
            async def idle() -> bool:
                asked.append((name, clock.monotonic_ms()))
                await asyncio.sleep(1)
                work[name] -= 1
                return work[name] >= 0

            clock.add_idle_hook(idle)

        hook("first")
        hook("second")
        await clock.advance("5s")
        return clock.monotonic_ms()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        ended_ms = runner.run(advance())
    step_ms = 1000 if follows_loop else 0
    assert [name for name, _ in asked] == ["first", "second"] * 3
    assert [at_ms for _, at_ms in asked] == [5000 + step_ms * i for i in range(6)]
    assert ended_ms == 5000 + step_ms * 6


@given(
    start_us=st.integers(0, 10**15),
    elapsed_us=st.integers(0, 33 * YEAR_MS * 1000),
    delays_ms=st.lists(st.integers(0, 10 * DAY_MS) | st.integers(0, 2000), min_size=1, max_size=8),
)
def test_a_timer_is_never_early_and_never_late(start_us: int, elapsed_us: int, delays_ms: list[int]) -> None:
    async def measure(loop: VirtualLoop) -> None:
        clock = VirtualClock(loop, start=datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=start_us))
        for delay_ms in delays_ms:
            then_ms, woken = clock.now_ms(), asyncio.Event()
            loop.call_at(loop.time() + delay_ms / 1000, woken.set)
            await woken.wait()
            assert clock.now_ms() == then_ms + delay_ms
            loop.call_later(clock.seconds_until(then_ms + 2 * delay_ms + 1), woken.set)
            woken.clear()
            await woken.wait()
            assert clock.now_ms() == then_ms + 2 * delay_ms + 1
            assert clock.seconds_until(clock.now_ms()) == 0

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop._now_us = elapsed_us
        runner.run(measure(loop))
