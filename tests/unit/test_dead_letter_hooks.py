"""`@scheduler.on_dead_letter`: which hooks are called, when, and the effect of a failing hook."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest

from aiodelay import ClosedError, ConfigurationError, Every, Retry, Scheduler
from aiodelay.core.values import DeadLetter, Delivery, SendOutcome
from aiodelay.engine.delivery import dead_letter_hooks
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.sinks import RecordingSink

pytestmark = pytest.mark.asyncio

TO = "handler:work"


def failing(clock: VirtualClock) -> tuple[Scheduler, MemoryStore]:
    """Return a scheduler whose handler fails, and its store."""
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock, retry=Retry.never())

    @scheduler.handler(name="work")
    async def work(event: bytes) -> None:
        raise KeyError(event.decode())

    return scheduler, store


async def schedule(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        await scheduler.schedule(name.encode(), to=TO, delay="0s", id=name)


async def test_each_hook_is_told_of_each_dead_letter_once_it_is_stored(clock: VirtualClock) -> None:
    scheduler, store = failing(clock)
    told: list[DeadLetter] = []
    threads: list[threading.Thread] = []

    @scheduler.on_dead_letter
    async def first(letter: DeadLetter) -> None:
        assert letter in await store.dead_letters()
        told.append(letter)

    @scheduler.on_dead_letter
    def second(letter: DeadLetter) -> None:
        threads.append(threading.current_thread())

    async with scheduler:
        await schedule(scheduler, "a", "b")
        await scheduler.run_until_idle()
        assert told == await store.dead_letters(), "idle: all hooks have been called"
        assert [letter.record.last_error for letter in told] == ["KeyError: 'a'", "KeyError: 'b'"]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_it_is_told_of_an_occurrence_as_the_store_keeps_it(clock: VirtualClock) -> None:
    scheduler, store = failing(clock)
    told: list[DeadLetter] = []
    scheduler.on_dead_letter(told.append)
    async with scheduler:
        await scheduler.schedule(b"s", to=TO, every=Every("10s"), id="s")
        await asyncio.sleep(25)
    assert told == await store.dead_letters()
    assert len(told) == 2


async def test_it_is_told_of_what_a_sink_refuses(clock: VirtualClock) -> None:
    class Broken(RecordingSink):
        async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
            raise KeyError("total")

    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, sinks=[Broken("broken")], clock=clock, retry=Retry.never())
    told: list[DeadLetter] = []
    scheduler.on_dead_letter(told.append)
    async with scheduler:
        await scheduler.schedule(b"", to="broken:x", delay="0s")
        await scheduler.run_until_idle()
    assert told == await store.dead_letters()
    assert len(told) == 1


async def test_a_hook_that_fails_is_logged_and_harms_nobody(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, _ = failing(clock)
    told: list[str] = []

    @scheduler.on_dead_letter
    async def fail(letter: DeadLetter) -> None:
        raise OSError("no network")

    @scheduler.on_dead_letter
    async def note(letter: DeadLetter) -> None:
        told.append(letter.record.id)

    async with scheduler:
        await schedule(scheduler, "a", "b")
        await scheduler.run_until_idle()
    assert told == ["a", "b"]
    assert caplog.text.count("on_dead_letter failed for message") == 2
    assert "OSError: no network" in caplog.text


async def test_closing_waits_for_the_last_calls_but_not_for_ever(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, store = failing(clock)
    told: list[str] = []

    @scheduler.on_dead_letter
    async def tell(letter: DeadLetter) -> None:
        await asyncio.sleep(5 if letter.record.id == "a" else 3600)
        told.append(letter.record.id)

    began = clock.monotonic_ms()
    async with scheduler:
        await schedule(scheduler, "a", "b")
        await asyncio.sleep(1)
    assert told == ["a"]
    assert len(await store.dead_letters()) == 2
    assert clock.monotonic_ms() - began < 36_000, "the drain is 30 s"
    assert "closing cancels tasks that did not end in time: aiodelay on_dead_letter" in caplog.text


async def test_what_waits_for_a_slow_hook_is_bounded(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_hooks, "MOST_WAITING", 2)
    scheduler, _ = failing(clock)
    told: list[str] = []

    @scheduler.on_dead_letter
    async def tell(letter: DeadLetter) -> None:
        await asyncio.sleep(1)
        told.append(letter.record.id)

    caplog.set_level(logging.ERROR, "aiodelay")
    async with scheduler:
        await schedule(scheduler, "a", "b", "c")
        await scheduler.run_until_idle()
    assert told == ["a", "b"]
    assert "on_dead_letter is not called for message c: 2 dead letters already wait" in caplog.text


async def test_a_hook_is_added_before_opening_and_is_a_function(clock: VirtualClock) -> None:
    scheduler, _ = failing(clock)
    with pytest.raises(ConfigurationError, match="on_dead_letter"):
        scheduler.on_dead_letter("support")  # type: ignore[type-var]
    async with scheduler:
        with pytest.raises(ClosedError):
            scheduler.on_dead_letter(print)
