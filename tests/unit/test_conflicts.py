"""`Conflict` as callers write it: constructors, texts, and what a scheduler makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest

from aiodelay import Conflict, Every, Message, Scheduler
from aiodelay.core.conflict_text import read_conflict
from aiodelay.core.conflicts import timed
from aiodelay.core.transitions import record_of
from aiodelay.core.values import CONFLICT_MODES, OPERANDS, At, Envelope, Put
from aiodelay.errors import ConfigurationError, ScheduleTimeError
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock, VirtualLoop

TEXTS = {
    "replace": Conflict.replace(),
    "keep": Conflict.keep(),
    "error": Conflict.error(),
    "earlier": Conflict.earlier(),
    "later": Conflict.later(),
    "newer:7": Conflict.newer(7),
    "if_revision:0": Conflict.if_revision(0),
    "debounce:5s": Conflict.debounce(timedelta(seconds=5)),
    "debounce:5s:1m": Conflict.debounce("5s", "60s"),
    "throttle:1h": Conflict.throttle("60m"),
    "throttle:PT1H:last": Conflict.throttle("1h", last=True),
    "append": Conflict.append(),
    "append:50": Conflict.append(50),
}


@dataclass
class Refresh:
    n: int


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_names_a_rule(text: str) -> None:
    assert read_conflict(text) == TEXTS[text]


def test_the_texts_name_every_mode() -> None:
    assert {each.mode for each in TEXTS.values()} == CONFLICT_MODES
    assert OPERANDS.keys() < CONFLICT_MODES


@pytest.mark.parametrize(
    "text",
    [
        *("", "keeps", "replace:", "keep:1", "newer", "newer:", "newer:x", "newer:-1", "newer:1:2", "newer:\u0661"),
        *("if_revision:x", "debounce", "debounce:1s:2s:3s", "throttle", "throttle:1h:first", "throttle_last"),
        "newer:" + "9" * 5000,
    ],
)
def test_a_text_that_names_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match='"debounce:5s" ') as caught:
        read_conflict(text)
    assert caught.value.setting == "conflict"


@pytest.mark.parametrize(
    ("make", "setting", "allowed"),
    [
        pytest.param(lambda: Conflict.debounce("5"), "conflict.quiet", "text such as", id="no unit"),
        pytest.param(lambda: Conflict.debounce("0s"), "conflict.quiet", "at least 1", id="no quiet"),
        pytest.param(lambda: Conflict.debounce(timedelta(-1)), "conflict.quiet", "at least 1", id="negative"),
        pytest.param(lambda: Conflict.debounce("5s", "4s"), "conflict.max_wait", "at least as long", id="short wait"),
        pytest.param(lambda: Conflict.throttle("0s"), "conflict.window", "at least 1", id="no window"),
        pytest.param(lambda: Conflict.throttle("25h"), "conflict.window", "at most 24 h", id="long window"),
        pytest.param(lambda: read_conflict("throttle:25h"), "conflict.window", "at most 24 h", id="in a text"),
    ],
)
def test_a_wrong_duration_is_refused(make: Callable[[], Conflict], setting: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.setting == setting
    assert allowed in caught.value.allowed


@pytest.mark.asyncio
async def test_debounce_gives_the_due_time() -> None:
    clock = VirtualClock()
    async with Scheduler(MemoryStore(clock=clock), clock=clock, dispatch=False) as scheduler:
        rule = Conflict.debounce("5s", "12s")
        begun = clock.now_ms()
        for n in range(100):
            scheduled = await scheduler.schedule(Refresh(n), id="page", conflict=rule)
            assert scheduled.due_ms == min(clock.now_ms() + 5000, begun + 12_000)
            clock.move(100)
        with pytest.raises(ScheduleTimeError, match=r"at, delay, every.*Conflict\.debounce.*quiet is the delay"):
            await scheduler.schedule(Refresh(0), id="page", delay="5s", conflict=rule)


@pytest.mark.slow
def test_of_100_000_calls_in_one_minute_no_run_is_later_than_the_longest_wait() -> None:
    runs: list[tuple[int, int]] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = VirtualClock(loop)
        scheduler, begun = Scheduler(MemoryStore(clock=clock), clock=clock), clock.now_ms()

        @scheduler.handler
        async def refresh(event: Refresh) -> None:
            runs.append((event.n, clock.now_ms() - begun))

        rule = Conflict.debounce("1s", max_wait="25s")
        async with scheduler:
            for first in range(0, 100_000, 100):
                calls = range(first, first + 100)
                await scheduler.schedule_many(Message(Refresh(n), id="page", conflict=rule) for n in calls)
                await asyncio.sleep(0.06)
            await scheduler.run_until_idle()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    # A burst begins with the first call after a run: at 0 ms, 25,020 ms and 50,040 ms. The last call: 59,940 ms.
    assert runs == [(41_699, 25_000), (83_399, 50_020), (99_999, 60_940)]


@pytest.mark.parametrize("text", ["earlier", "later", "debounce:5s", "throttle:1h", "throttle:1h:last"])
@pytest.mark.asyncio
async def test_a_recurring_message_has_none_of_the_timed_rules(text: str) -> None:
    async with Scheduler(MemoryStore(), dispatch=False) as scheduler:
        with pytest.raises(ConfigurationError, match="for a message that recurs: replace, keep"):
            await scheduler.schedule(Refresh(0), every=Every("1h"), id="page", conflict=read_conflict(text))


@pytest.mark.parametrize(
    "conflict",
    [
        Conflict("debounce"),
        Conflict("debounce", quiet_ms=5, window_ms=5),
        Conflict("debounce", max_wait_ms=5),
        Conflict("throttle"),
        Conflict("throttle", window_ms="5"),  # type: ignore[arg-type]
        Conflict("earlier", quiet_ms=5),
    ],
    ids=repr,
)
@pytest.mark.asyncio
async def test_a_rule_made_by_hand_must_be_whole(conflict: Conflict) -> None:
    async with Scheduler(MemoryStore(), dispatch=False) as scheduler:
        with pytest.raises(ConfigurationError, match=r"\.debounce\(\.\.\.\)"):
            await scheduler.schedule(Refresh(0), id="page", conflict=conflict)


@pytest.mark.parametrize("text", ["replace", "keep", "earlier", "later", "newer:1"])
def test_other_rules_set_no_times(text: str) -> None:
    conflict = read_conflict(text)
    record = record_of(Put(b"12345678", Envelope("m", "lane"), At(5), conflict), 5, 1)
    assert timed(conflict, record, None, in_flight=False, ended_version=None, now_ms=9) is record
