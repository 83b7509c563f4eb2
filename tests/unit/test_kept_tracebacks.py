"""The traceback of a failed attempt is kept and logged, bounded and without the values of variables."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aiodelay import Context, Later, Reject, Retry, Scheduler
from aiodelay.core.values import TRACEBACK_BYTES, DeadLetter, Delivery, Demand, SendOutcome
from aiodelay.engine.delivery.settling import traceback_text
from aiodelay.memory import MemoryStore
from aiodelay.testing import assert_delivered, assert_scheduled
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.sinks import RecordingSink

TWICE = Retry(attempts=2, first="0s", cap="0s", jitter=0)


def fail() -> None:
    secret = "s3cret"  # noqa: F841 - a local variable, which no traceback may show
    raise KeyError("total")


async def given_up(
    clock: VirtualClock,
    handler: Callable[..., Any],
    *,
    through_middleware: bool = False,
    timeout: str | None = None,
) -> DeadLetter:
    """Return the dead letter that a handler's failure leads to."""
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock)
    scheduler.add_handler(handler, name="work", retry=TWICE, timeout=timeout)
    if through_middleware:

        @scheduler.middleware("handle")
        async def pass_on(context, call_next):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            return await call_next(context)

    async with scheduler:
        await scheduler.schedule(b"", to="handler:work", delay="0s", id="m")
        await scheduler.run_until_idle()
    (letter,) = await store.dead_letters()
    return letter


@pytest.mark.parametrize("through_middleware", [False, True], ids=["plain", "middleware"])
@pytest.mark.parametrize("kind", ["coroutine", "waiting", "thread"])
@pytest.mark.asyncio
async def test_a_dead_letter_keeps_the_traceback_of_its_last_attempt(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, kind: str, *, through_middleware: bool
) -> None:
    async def coroutine(event: bytes) -> None:
        if kind == "waiting":
            await asyncio.sleep(1)
        fail()

    def thread(event: bytes) -> None:
        fail()

    caplog.set_level(logging.DEBUG, "aiodelay.handlers")
    handler = thread if kind == "thread" else coroutine
    letter = await given_up(clock, handler, through_middleware=through_middleware)
    assert letter.errors == ("KeyError: 'total'",)
    assert letter.traceback is not None
    first, *_, last = letter.traceback.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'total'")
    assert f"in {handler.__name__}" in letter.traceback
    assert "in fail" in letter.traceback
    if not through_middleware:
        assert "aiodelay/engine" not in letter.traceback, "our own calls that lead to the handler are left out"
    logged = [
        (each.levelname, each.exc_info is not None) for each in caplog.records if each.name == "aiodelay.handlers"
    ]
    assert logged == [("WARNING", False), ("DEBUG", True), ("ERROR", True)]
    assert "work: attempt 1 at m failed: KeyError: 'total'" in caplog.text
    assert "work: message m is given up after attempt 2: KeyError: 'total'" in caplog.text


@pytest.mark.asyncio
async def test_a_handler_that_is_too_slow_tells_where_it_waited(clock: VirtualClock) -> None:
    async def wait_for_the_bank(event: bytes) -> None:
        await asyncio.sleep(3600)

    letter = await given_up(clock, wait_for_the_bank, timeout="1s")
    assert letter.traceback is not None
    assert "in wait_for_the_bank" in letter.traceback
    assert letter.traceback.endswith("HandlerTimeoutError: handler work did not finish within 1000 ms\n")


@pytest.mark.asyncio
async def test_where_nothing_was_raised_there_is_no_traceback(clock: VirtualClock) -> None:
    async def refuse(event: bytes) -> Reject:
        return Reject("no such order")

    letter = await given_up(clock, refuse)
    assert (letter.errors, letter.traceback) == (("no such order",), None)


@pytest.mark.asyncio
async def test_a_payload_that_cannot_be_read_leaves_no_traceback(clock: VirtualClock) -> None:
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler
    async def work(event: Demand) -> None: ...

    async with scheduler:
        await scheduler.schedule(b'{"messages": "s3cret"}', to="handler:Demand", delay="0s")
        await scheduler.run_until_idle()
    (letter,) = await store.dead_letters()
    assert (letter.reason, letter.traceback) == ("undecodable", None)


@pytest.mark.asyncio
async def test_a_sink_that_raises_leaves_its_traceback(clock: VirtualClock) -> None:
    class Broken(RecordingSink):
        async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
            raise KeyError("total")

    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, sinks=[Broken("broken")], clock=clock, retry=TWICE)
    async with scheduler:
        await scheduler.schedule(b"", to="broken:x", delay="0s")
        await scheduler.run_until_idle()
    (letter,) = await store.dead_letters()
    assert letter.traceback is not None
    assert letter.traceback.splitlines()[-1] == "KeyError: 'total'"
    assert "in send" in letter.traceback


# --- the text ---------------------------------------------------------------------------------------------


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_it_holds_no_local_variables() -> None:
    with pytest.raises(KeyError) as caught:
        fail()
    text = traceback_text(caught.value)
    assert text is not None
    assert "s3cret" not in text


@pytest.mark.parametrize("character", ["x", "é", "€", "😀", "\udc80"])
def test_of_a_long_one_the_middle_is_left_out(character: str) -> None:
    text = traceback_text(raised(ValueError(f"begins {character * 50_000} ends")))
    assert text is not None
    assert TRACEBACK_BYTES - 8 <= len(text.encode()) <= TRACEBACK_BYTES
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith(" ends\n")
    assert "bytes in all; the middle is left out" in text


def test_an_exception_that_cannot_be_shown_does_no_harm() -> None:
    class Unshowable(Exception):  # noqa: N818 - its name does not matter
        def __str__(self) -> str:
            raise RuntimeError

    text = traceback_text(raised(Unshowable()))
    assert text is not None
    assert "Unshowable: <exception str() failed>" in text


def test_an_exception_that_was_never_raised_has_none() -> None:
    assert traceback_text(ValueError("never raised")) is None


# --- the test kit -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_assertion_tells_which_attempts_failed_and_why(clock: VirtualClock, scheduler: Scheduler) -> None:
    errors = iter([KeyError("total"), None])

    @scheduler.handler(name="work", retry=TWICE)
    async def work(event: bytes) -> None:
        if (error := next(errors)) is not None:
            raise error

    async with scheduler:
        await scheduler.schedule(b"p", to="handler:work", delay="1s", id="m")
        await clock.advance("1m")
    with pytest.raises(AssertionError) as caught:
        assert_delivered(scheduler, b"p", times=1)
    first, second, third = str(caught.value).splitlines()
    assert first == "b'p' was delivered 2 times, 1 failed: KeyError: 'total', expected 1 time:"
    assert second.endswith("Z, failed: KeyError: 'total'")
    assert third.endswith("Z")


@pytest.mark.asyncio
async def test_an_assertion_tells_no_attempt_as_failed_that_was_put_off(
    clock: VirtualClock, scheduler: Scheduler
) -> None:
    @scheduler.handler(name="work", retry=Retry(attempts=3))
    async def work(event: bytes, context: Context) -> Later | None:
        return Later("5s", counts=True) if context.attempt < 3 else None

    async with scheduler:
        await scheduler.schedule(b"p", to="handler:work", delay="1s", id="m")
        await clock.advance("1m")
    with pytest.raises(AssertionError) as caught:
        assert_delivered(scheduler, b"p", times=1)
    text = str(caught.value)
    assert text.startswith("b'p' was delivered 3 times, expected 1 time:")
    assert "failed" not in text


@pytest.mark.asyncio
async def test_an_assertion_shows_the_traceback_of_a_dead_letter(clock: VirtualClock, scheduler: Scheduler) -> None:
    @scheduler.handler(name="work", retry=TWICE)
    async def work(event: bytes) -> None:
        fail()

    async with scheduler:
        await scheduler.schedule(b"p", to="handler:work", delay="1s", id="m")
        await clock.advance("1m")
    for expect in (
        lambda: assert_delivered(scheduler, b"p", times=1),
        lambda: assert_scheduled(scheduler, b"p"),
    ):
        with pytest.raises(AssertionError) as caught:
            expect()
        text = str(caught.value)
        assert (
            "It is a dead letter, attempts_exhausted: KeyError: 'total'\n  Traceback (most recent call last):" in text
        )
        assert text.endswith("\n  KeyError: 'total'")
