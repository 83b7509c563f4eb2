"""The subscription of a handler: the effect of its return value and errors, time limits, cancellation."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aiodelay import Context, Later, Reject, Retry, Scheduler
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import After, Claim, DeadLetter, Demand, Envelope, Put, SettleOutcome
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

LANE = "work"
TO = f"handler:{LANE}"
AT_ONCE = Retry(attempts=3, first="0s", cap="0s", jitter=0)


class Stage:
    """A scheduler with one handler of bytes, which does what its test says, and the store under it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.scheduler = Scheduler(self.store, clock=clock, drain="5s")
        self.began: list[tuple[int, str, int]] = []

    def serve(self, do: Callable[[Context], Awaitable[object]], **options: Any) -> None:  # noqa: ANN401 - of a handler
        async def work(payload: bytes, context: Context) -> Any:  # noqa: ANN401 - also what no handler may return
            self.note(context)
            return await do(context)

        self.scheduler.add_handler(work, name=LANE, **options)

    def serve_in_thread(self, do: Callable[[Context], object], **options: Any) -> None:  # noqa: ANN401 - of a handler
        def work(payload: bytes, context: Context) -> Any:  # noqa: ANN401 - also what no handler may return
            self.note(context)
            return do(context)

        self.scheduler.add_handler(work, name=LANE, **options)

    def note(self, context: Context) -> None:
        self.began.append((self.clock.monotonic_ms(), context.id, context.attempt))

    async def schedule(self, *ids: str, delay: str = "0s") -> None:
        for each in ids:
            await self.scheduler.schedule(b"", to=TO, delay=delay, id=each)

    async def letters(self) -> list[DeadLetter]:
        return list(await self.store.memory.dead_letters())

    async def in_flight(self) -> int:
        counts = await self.store.memory.counts()
        return counts[LANE].in_flight if LANE in counts else 0

    @property
    def settled(self) -> list[str]:
        return [each.id for call in self.store.made("settle") for each in call.asked]


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


# --- what it returns --------------------------------------------------------------------------------------

Serve = Callable[[Stage, Callable[[Context], object]], None]


def as_coroutine(stage: Stage, do: Callable[[Context], object], **options: object) -> None:
    async def work(context: Context) -> object:
        return do(context)

    stage.serve(work, **options)


def as_waiting_coroutine(stage: Stage, do: Callable[[Context], object], **options: object) -> None:
    async def work(context: Context) -> object:
        await asyncio.sleep(0)
        return do(context)

    stage.serve(work, **options)


def in_thread(stage: Stage, do: Callable[[Context], object], **options: object) -> None:
    stage.serve_in_thread(do, **options)


forms = pytest.mark.parametrize("serve", [as_coroutine, as_waiting_coroutine, in_thread])


@forms
async def test_later_delivers_it_again_after_that_time_and_costs_no_attempt(stage: Stage, serve: Any) -> None:  # noqa: ANN401
    serve(stage, lambda context: Later("20s") if len(stage.began) < 5 else None, retry=Retry(attempts=2))
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(200)
    assert stage.began == [(20_000 * n, "m", 1) for n in range(5)]
    assert await stage.letters() == []


@forms
async def test_later_that_counts_costs_an_attempt_and_the_last_one_gives_up(stage: Stage, serve: Any) -> None:  # noqa: ANN401
    last: list[bool] = []

    def wait(context: Context) -> Later:
        last.append(context.is_last_attempt)
        return Later("20s", counts=True)

    serve(stage, wait, retry=Retry(attempts=3))
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(200)
        (letter,) = await stage.letters()
    assert stage.began == [(20_000 * n, "m", n + 1) for n in range(3)]
    assert last == [False, False, True]
    error = "the handler returned Later('20s', counts=True) on the last of its 3 attempts"
    assert (letter.reason, letter.record.attempt, letter.errors) == ("attempts_exhausted", 3, (error,))


@forms
async def test_reject_is_a_dead_letter_with_its_reason_at_once(
    stage: Stage,
    serve: Any,  # noqa: ANN401
    caplog: pytest.LogCaptureFixture,
) -> None:
    serve(stage, lambda context: Reject("no such customer" if context.id == "m" else "x" * 10_000))
    async with stage.scheduler:
        await stage.schedule("m", "long")
        await asyncio.sleep(200)
        long, letter = await stage.letters()
    assert stage.began == [(0, "m", 1), (0, "long", 1)]
    assert long.record.last_error == "x" * 499 + "…"
    assert (letter.reason, letter.record.attempt, letter.record.last_error) == ("rejected", 1, "no such customer")
    assert "work: message m is rejected: no such customer" in caplog.messages


@forms
async def test_what_is_no_exception_ends_the_block_and_its_message_comes_back(stage: Stage, serve: Any) -> None:  # noqa: ANN401
    class Stop(BaseException): ...

    def stop_once(context: Context) -> None:
        if len(stage.began) == 1:
            raise Stop

    serve(stage, stop_once)
    async with Scheduler(stage.store, clock=stage.clock, dispatch=False) as producer:
        await producer.schedule(b"", to=TO, delay="0s", id="m")
    with pytest.raises(BaseExceptionGroup) as caught:
        await stage.scheduler.run()
    assert caught.group_contains(Stop, depth=1)
    async with stage.scheduler:
        await asyncio.sleep(20)
    assert [each[1:] for each in stage.began] == [("m", 1), ("m", 1)]


async def forgotten() -> None: ...


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "bool": (lambda: True, "bool"),
    "number": (lambda: 0, "int"),
    "text": (lambda: "", "str"),
    "class of an answer": (lambda: Later, "type"),
    "exception": (lambda: ValueError("returned"), "ValueError"),
    "coroutine": (lambda: forgotten(), "coroutine"),  # noqa: PLW0108 - made anew each time
}


@forms
@pytest.mark.parametrize("kind", WRONG)
async def test_any_other_result_is_a_failed_attempt_that_names_its_type(stage: Stage, serve: Any, kind: str) -> None:  # noqa: ANN401
    make, name = WRONG[kind]
    serve(stage, lambda context: make(), retry=AT_ONCE)
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(1)
        (letter,) = await stage.letters()
    assert [attempt for _, _, attempt in stage.began] == [1, 2, 3]
    assert (letter.reason, letter.record.attempt) == ("attempts_exhausted", 3)
    allowed = "None, Later(delay), Reject(reason)"
    assert letter.record.last_error == f"HandlerResultError: handler work returned {name}; allowed: {allowed}"


# --- what it raises ---------------------------------------------------------------------------------------


@forms
async def test_retries_follow_their_own_list_of_intervals(stage: Stage, serve: Any) -> None:  # noqa: ANN401
    def fail(context: Context) -> None:
        raise ConnectionError(f"run {context.attempt}")

    serve(stage, fail, retry=Retry.intervals(["1s", "1m", "10s"], jitter=0))
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(300)
        (letter,) = await stage.letters()
    assert stage.began == [(0, "m", 1), (1_000, "m", 2), (61_000, "m", 3), (71_000, "m", 4)]
    assert (letter.record.first_error, letter.record.last_error) == ("ConnectionError: run 1", "ConnectionError: run 4")


async def test_retries_differ_by_type_of_error_and_runs_are_counted_whatever_they_raised(stage: Stage) -> None:
    async def fail(context: Context) -> None:
        if context.id == "never":
            raise KeyError("x")
        raise ConnectionResetError if context.attempt % 2 else TimeoutError

    own: dict[type[BaseException], Retry] = {
        KeyError: Retry.never(),
        ConnectionError: Retry.intervals(["1s"] * 9, jitter=0),
    }
    stage.serve(fail, retry=Retry.intervals(["1m"] * 4, jitter=0, by_type=own))
    async with stage.scheduler:
        await stage.schedule("mixed", "never")
        await asyncio.sleep(600)
        letters = {letter.record.id: letter for letter in await stage.letters()}
    times = [at for at, message_id, _ in stage.began if message_id == "mixed"]
    assert times == [0, 1_000, 61_000, 62_000, 122_000, 123_000]
    assert {each: (letter.reason, letter.record.attempt) for each, letter in letters.items()} == {
        "mixed": ("attempts_exhausted", 6),
        "never": ("not_retryable", 1),
    }


async def test_what_never_ran_to_its_end_here_counts_as_no_attempt(stage: Stage) -> None:
    """A lapse, a claim given back at closing, a run that closing ended: none is the handler's doing."""

    async def work(context: Context) -> None:
        await asyncio.sleep(3_600)

    stage.serve(work, concurrency=1, retry=Retry.never())
    async with stage.scheduler as scheduler:
        await stage.schedule("a", "b", delay="1s")
        async with stage.store.memory.work("dies", [LANE]) as other:
            await asyncio.sleep(0.5)
            await scheduler.pause(TO)
            await asyncio.sleep(1)
            await scheduler.resume(TO)
            assert len((await other.claim({LANE: Demand(1)}, request=new_id(), lease_ms=50)).claims) == 1
        await asyncio.sleep(60)
    assert {attempt for _, _, attempt in stage.began} == {1}
    async with stage.scheduler:
        await asyncio.sleep(1)
        found = [each async for each in stage.scheduler.pending()]
    assert {each.record.attempt for each in found} == {0}
    assert await stage.letters() == []


RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "nothing to say": (ValueError, "ValueError"),
    "a cancellation of its own": (asyncio.CancelledError, "CancelledError"),
    "a group": (lambda: ExceptionGroup("both", [ValueError("x")]), "ExceptionGroup: both (1 sub-exception)"),
    "a novel": (lambda: ValueError("x" * 10_000), "ValueError: " + "x" * 487 + "…"),
    "the end of an iteration": (StopIteration, "RuntimeError: "),
}


@forms
@pytest.mark.parametrize("what", RAISED)
async def test_l5_whatever_it_raises_is_a_failed_attempt(stage: Stage, serve: Any, what: str) -> None:  # noqa: ANN401
    make, text = RAISED[what]

    def fail(context: Context) -> None:
        if context.id == "bad":
            raise make()

    serve(stage, fail, retry=AT_ONCE)
    async with stage.scheduler:
        await stage.schedule("a", "bad", "b")
        await asyncio.sleep(1)
        (letter,) = await stage.letters()
        assert await stage.in_flight() == 0
    assert (letter.record.id, letter.reason, letter.record.attempt) == ("bad", "attempts_exhausted", 3)
    assert (letter.record.last_error or "").startswith(text)
    assert sorted(stage.settled) == ["a", "b", "bad", "bad", "bad"]


async def test_a_fault_of_our_own_costs_no_attempt_and_no_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(context: Context) -> None: ...

    stage.serve(work, concurrency=1, retry=Retry.never())
    faults = [ArithmeticError("ours")]

    def context_of(claim: Claim, lateness_ms: int, retry: Retry) -> Context:
        if faults:
            raise faults.pop()
        return Context(claim, lateness_ms, retry, stage.scheduler)

    monkeypatch.setattr(stage.scheduler, "_context", context_of)
    async with stage.scheduler:
        await stage.schedule("a", "b")
        await asyncio.sleep(60)
    assert stage.began == [(0, "b", 1), (5_000, "a", 1)]
    assert "delivering message a failed because of a bug in aiodelay" in caplog.text


# --- time limits ------------------------------------------------------------------------------------------


async def test_a_run_that_takes_too_long_is_cancelled_and_has_failed(stage: Stage) -> None:
    cancelled: list[int] = []

    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            cancelled.append(stage.clock.monotonic_ms())
            raise

    stage.serve(work, timeout="30s", retry=Retry.intervals(["5s"], jitter=0))
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(600)
        (letter,) = await stage.letters()
    assert stage.began == [(0, "m", 1), (35_000, "m", 2)]
    assert cancelled == [30_000, 65_000]
    assert (letter.reason, letter.record.attempt) == ("attempts_exhausted", 2)
    assert letter.record.last_error is not None
    assert letter.record.last_error.startswith("HandlerTimeoutError: ")


async def test_each_run_has_its_own_time_limit(stage: Stage) -> None:
    ended: dict[str, int] = {}

    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(5 if context.id == "short" else 3_600)
        finally:
            ended[context.id] = stage.clock.monotonic_ms()

    stage.serve(work, timeout="10s", retry=Retry.never())
    async with stage.scheduler:
        for message_id in ("first", "second", "short", "third"):
            await stage.schedule(message_id)
            await asyncio.sleep(3)
        await asyncio.sleep(60)
        assert {letter.record.id for letter in await stage.letters()} == {"first", "second", "third"}
    assert ended == {"first": 10_000, "second": 13_000, "short": 11_000, "third": 19_000}


async def test_what_it_does_about_its_cancellation_is_waited_for(stage: Stage) -> None:
    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(3_600)
        finally:
            await asyncio.sleep(7)

    stage.serve(work, concurrency=1, timeout="10s", retry=Retry.never())
    async with stage.scheduler:
        await stage.schedule("a", "b")
        await asyncio.sleep(60)
    assert [at for at, _, _ in stage.began] == [0, 17_000]


async def test_a_run_that_swallows_its_cancellation_goes_on_and_the_next_is_not_touched(stage: Stage) -> None:
    goes_on: list[tuple[str, int]] = []

    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            if context.id != "stubborn":
                raise
        await asyncio.sleep(20)
        async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(0.5))
        goes_on.append((context.id, stage.clock.monotonic_ms()))

    stage.serve(work, concurrency=1, timeout="10s", retry=Retry.never())
    async with stage.scheduler:
        await stage.schedule("stubborn", "a", "b")
        await asyncio.sleep(120)
        letters = await stage.letters()
    assert goes_on == [("stubborn", 30_500)], "cancelled once, and what it returns counts"
    assert stage.began == [(0, "stubborn", 1), (30_500, "a", 1), (40_500, "b", 1)]
    assert [(each.record.id, (each.record.last_error or "")[:19]) for each in letters] == [
        ("a", "HandlerTimeoutError"),
        ("b", "HandlerTimeoutError"),
    ]


async def test_a_run_past_its_limit_is_cancelled_once_however_many_come_after_it(stage: Stage) -> None:
    cancelled: list[str] = []

    async def work(context: Context) -> None:
        for _ in range(1 + (context.id == "stubborn")):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(context.id)

    stage.serve(work, timeout="10s")
    async with stage.scheduler:
        for message_id in ("stubborn", "b", "c"):
            await stage.schedule(message_id)
            await asyncio.sleep(3)
        await asyncio.sleep(200)
    assert cancelled == ["stubborn", "b", "c"]
    assert sorted(stage.settled) == ["b", "c", "stubborn"]


async def test_a_thread_that_takes_too_long_keeps_its_slot_and_its_lease_until_it_returns(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual time passes while the first run waits, and stands still while the second run works."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    store, began, go_on = MemoryStore(clock=clock, journal=100), list[str](), threading.Event()
    has_begun, returns = asyncio.Event(), asyncio.Event()
    scheduler = Scheduler(store, clock=clock)
    scheduler._options = structs.replace(scheduler._options, lease_ms=120)

    @scheduler.handler(name=LANE, concurrency=1, timeout="20ms", retry=Retry.never())
    def work(payload: bytes, context: Context) -> None:
        began.append(context.id)
        loop.call_soon_threadsafe(has_begun.set)
        go_on.wait(30)
        loop.call_soon_threadsafe(returns.set)

    async with scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(VirtualLoop, "_count_outside", lambda *_: None)
            await scheduler.schedule(b"", to=TO, delay="0s", id="a")
            with loop.outside_work():
                await has_begun.wait()
        await scheduler.schedule(b"", to=TO, delay="0s", id="b")
        await asyncio.sleep(300)  # so long that leases that have lapsed would be found
        assert began == ["a"]
        go_on.set()
        with loop.outside_work():
            await returns.wait()
        await scheduler.run_until_idle()
        assert await store.dead_letters() == []
    events = [(entry.id, entry.event) for entry in await store.journal() if entry.event in ("lapsed", "delivered")]
    assert events == [("a", "delivered"), ("b", "delivered")]
    assert began == ["a", "b"]
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    text = "work exceeded its timeout of 20 ms in a thread, which cannot be stopped: "
    assert [each.getMessage() for each in warnings] == [text + "message a stays in flight until the handler returns"]


# --- a lease that was lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("outlives", [False, True], ids=["ends", "goes on"])
async def test_s7_a_run_whose_lease_was_lost_is_cancelled_and_settles_nothing(stage: Stage, outlives: bool) -> None:
    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not outlives:
                raise
        ended.append(stage.clock.monotonic_ms())

    ended: list[int] = []
    stage.serve(work, concurrency=1)
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(1)
        stage.store.inject("unavailable", "renew", times=None)
        await asyncio.sleep(15)
        async with stage.store.memory.work("takes over", [LANE]) as other:
            (claim,) = (await other.claim({LANE: Demand(1)}, request=new_id(), lease_ms=60_000)).claims
            stage.store.heal()
            await asyncio.sleep(3)
            assert await stage.in_flight() == 1, "theirs"
            assert ended == ([18_000] if outlives else []) or ended[0] <= 18_000
            assert stage.store.made("settle") == []
            await stage.schedule("next")
            await asyncio.sleep(1)
            assert [message_id for _, message_id, _ in stage.began] == ["m", "next"], "its slot is free"
            renewed = await other.renew([])
            assert renewed == []
            assert claim.record.attempt == 0
    assert stage.settled == ["next"]
    assert [call.answer for call in stage.store.made("settle")] == [[SettleOutcome.SETTLED]]


async def test_s7_a_run_whose_message_this_process_claims_again_is_cancelled_and_costs_no_attempt(stage: Stage) -> None:
    cancelled: list[int] = []

    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(2)
        except asyncio.CancelledError:
            cancelled.append(stage.clock.monotonic_ms())
            raise

    stage.serve(work, concurrency=3)
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(1)
        stage.clock.step(timedelta(seconds=15))
        await stage.schedule("next")
        await asyncio.sleep(5)
        assert stage.began == [(0, "m", 1), (1_000, "m", 1), (1_000, "next", 1)]
        assert cancelled == [1_000]
        assert sorted(stage.settled) == ["m", "next"]
        assert await stage.in_flight() == 0


# --- one task for many runs -------------------------------------------------------------------------------

asked_for: contextvars.ContextVar[str] = contextvars.ContextVar("asked_for", default="nobody")


@pytest.mark.parametrize("waits", [False, True])
async def test_what_a_run_puts_into_context_variables_no_other_sees(stage: Stage, waits: bool) -> None:
    seen: list[tuple[str, str]] = []

    async def work(context: Context) -> None:
        before = asked_for.get()
        asked_for.set(context.id)
        if waits:
            await asyncio.sleep(1 + "abcde".index(context.id) / 10)
        seen.append((before, asked_for.get()))

    stage.serve(work, concurrency=2)
    async with stage.scheduler:
        await stage.schedule(*"abcde")
        await asyncio.sleep(10)
    assert seen == [("nobody", message_id) for message_id in "abcde"]
    assert asked_for.get() == "nobody"


async def test_what_a_thread_puts_into_context_variables_no_other_sees(stage: Stage) -> None:
    seen: list[tuple[str, str]] = []

    def work(context: Context) -> None:
        seen.append((asked_for.get(), context.id))
        asked_for.set(context.id)

    stage.serve_in_thread(work, concurrency=1)
    asked_for.set("the opener")
    async with stage.scheduler:
        await stage.schedule(*"abc")
        await asyncio.sleep(10)
    assert seen == [("the opener", message_id) for message_id in "abc"], "each run begins with those of the opening"


async def test_tools_that_cancel_their_task_work_in_a_handler_as_in_a_task_of_its_own(stage: Stage) -> None:
    noted: list[str] = []

    async def fails() -> None:
        raise KeyError("x")

    async def work(context: Context) -> None:
        with anyio.move_on_after(1) as scope:
            await asyncio.sleep(60)
        noted.append(f"moved on {scope.cancelled_caught}")
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(60)
        except TimeoutError:
            noted.append("timed out")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails())
                await asyncio.sleep(60)
        except* KeyError:
            noted.append("failed together")

    stage.serve(work, concurrency=1)
    async with stage.scheduler:
        await stage.schedule("a", "b")
        await asyncio.sleep(60)
    assert noted == ["moved on True", "timed out", "failed together"] * 2
    assert [at for at, _, _ in stage.began] == [0, 2_000]
    assert stage.settled == ["a", "b"]


@pytest.mark.parametrize("others", [1, 10])
@pytest.mark.parametrize("by", ["itself", "another", "itself, unseen"])
async def test_l1_a_run_whose_task_somebody_cancels_has_failed_and_no_slot_is_lost(
    stage: Stage, by: str, others: int
) -> None:
    async def work(context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        if context.id == "bad":
            if by == "another":
                asyncio.get_running_loop().call_later(0.5, task.cancel)
            else:
                task.cancel()
            if by == "itself, unseen":
                return
        await asyncio.sleep(1)

    stage.serve(work, concurrency=2, timeout="30s", retry=Retry.intervals(["1s"], jitter=0))
    async with stage.scheduler:
        await stage.schedule("bad", *(f"m{n}" for n in range(others)), delay="1s")
        await asyncio.sleep(60)
        assert await stage.in_flight() == 0
        letters = await stage.letters()
    assert set(stage.settled) == {"bad", *(f"m{n}" for n in range(others))}
    assert [(each.record.id, each.record.attempt) for each in letters] == [("bad", 2)] * (by != "itself, unseen")
    assert {attempt for _, message_id, attempt in stage.began if message_id != "bad"} == {1}, "no other is harmed"


# --- handlers that never wait -----------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [16, 500])
async def test_a_handler_that_never_waits_leaves_the_loop_to_others(stage: Stage, concurrency: int) -> None:
    """Each run computes for a millisecond, in virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    async def work(context: Context) -> None:
        loop._now_us += 1_000

    async def look_at_the_clock() -> None:
        before = loop.time()
        while len(stage.began) < 1_500:
            await asyncio.sleep(0)
            gaps.append(loop.time() - before)
            before = loop.time()

    gaps: list[float] = []
    stage.serve(work, concurrency=concurrency)
    envelopes = [Envelope(f"m{n}", LANE) for n in range(1_500)]
    await stage.store.memory.apply([Put(new_op(), each, After(0)) for each in envelopes])
    async with stage.scheduler:
        await look_at_the_clock()
    assert max(gaps) <= 0.007
