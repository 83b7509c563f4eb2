"""The subscription of a sink: batches by demand, the effect of each outcome, and a failing sink."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import pytest

from aiodelay import Context, Every, Late, Retry, Scheduler, SinkUnavailableError
from aiodelay.core.ids import new_id
from aiodelay.core.values import DeadLetter, Delivery, Demand, Failed, SendOutcome, Sent
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

LANE = "topic"
TO = f"{LANE}:a"
DRAIN_S = 5
LONGEST_PAUSE_MS = 30_000


class ScriptedSink:
    """Does what its test says; `sends` are its calls, by ms since the clock began, the failed ones included."""

    name = LANE

    def __init__(self, clock: VirtualClock, limits: Demand) -> None:
        self.limits, self._clock = limits, clock
        self.sends: list[tuple[int, list[Delivery]]] = []
        self.taken: list[Delivery] = []
        self.in_flight: list[Delivery] = []
        self.most_messages = self.most_bytes = 0
        self.do: Callable[[Sequence[Delivery]], Awaitable[Sequence[SendOutcome]]] = self.take

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self.sends.append((self._clock.monotonic_ms(), list(deliveries)))
        self.in_flight += deliveries
        self.most_messages = max(self.most_messages, len(self.in_flight))
        self.most_bytes = max(self.most_bytes, sum(each.envelope.size for each in self.in_flight))
        try:
            return await self.do(deliveries)
        finally:
            for each in deliveries:
                self.in_flight.remove(each)

    async def take(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self.taken += deliveries
        return [Sent()] * len(deliveries)

    @property
    def batches(self) -> list[list[str]]:
        return [[each.envelope.id for each in deliveries] for _, deliveries in self.sends]

    @property
    def times(self) -> list[int]:
        return [at for at, _ in self.sends]

    @property
    def taken_ids(self) -> list[str]:
        return [each.envelope.id for each in self.taken]


class Stage:
    """A scheduler with one sink and one handler, and the store under it."""

    def __init__(self, clock: VirtualClock, limits: Demand | None = None) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.sink = ScriptedSink(clock, limits or Demand(100))
        retry = Retry.intervals(["1s", "1s"], jitter=0)
        self.scheduler = Scheduler(self.store, sinks=[self.sink], clock=clock, retry=retry, drain=f"{DRAIN_S}s")
        self.handled: list[str] = []

        @self.scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            self.handled.append(context.id)

    async def schedule(self, *ids: str, payload: bytes = b"", delay: str = "1s") -> None:
        for each in ids:
            await self.scheduler.schedule(payload, to=TO, delay=delay, id=each)

    async def letters(self) -> dict[str, DeadLetter]:
        return {letter.record.id: letter for letter in await self.store.memory.dead_letters()}

    async def left(self) -> list[tuple[str, str, int]]:
        """What is in the store: id, state, attempts."""
        found = [each async for each in self.scheduler.pending()]
        return [(each.record.id, each.state.value, each.record.attempt) for each in found]

    async def is_free(self) -> bool:
        """Whether nothing is in flight."""
        return all(counts.in_flight == 0 for counts in (await self.store.memory.counts()).values())


def names(count: int) -> list[str]:
    return [f"m{n:02}" for n in range(count)]


# --- batches ----------------------------------------------------------------------------------------------


async def test_what_is_due_together_goes_as_one_batch_as_large_as_its_demand(clock: VirtualClock) -> None:
    stage = Stage(clock, Demand(10))

    async def slowly(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(1)
        return await stage.sink.take(deliveries)

    stage.sink.do = slowly
    async with stage.scheduler:
        await stage.schedule(*names(25))
        await asyncio.sleep(10)
    assert stage.sink.batches == [names(25)[:10], names(25)[10:20], names(25)[20:]]
    assert stage.sink.times == [1_000, 2_000, 3_000]


async def test_a_batch_on_its_way_leaves_room_for_others(clock: VirtualClock) -> None:
    stage = Stage(clock, Demand(10))

    async def as_long_as_their_number(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(len(deliveries))
        return await stage.sink.take(deliveries)

    stage.sink.do = as_long_as_their_number
    async with stage.scheduler:
        await stage.schedule(*names(7))
        await stage.schedule("x", "y", "z", "waits", delay="2s")
        await asyncio.sleep(20)
    assert stage.sink.batches == [names(7), ["x", "y", "z"], ["waits"]]
    assert stage.sink.times == [1_000, 2_000, 5_000]
    assert stage.sink.most_messages == 10


@pytest.mark.parametrize("size", [100, 300, 999, 1_000])
async def test_bytes_are_demand_too(clock: VirtualClock, size: int) -> None:
    stage = Stage(clock, Demand(100, max_bytes=1_000))

    async def slowly(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(1)
        return await stage.sink.take(deliveries)

    stage.sink.do = slowly
    async with stage.scheduler:
        for n in range(30):
            await stage.schedule(f"m{n:02}", payload=bytes(size), delay=f"{1_000 + 30 * n}ms")
        await asyncio.sleep(60)
    assert stage.sink.taken_ids == names(30)
    assert stage.sink.most_bytes < 1_000 + size, "nothing more once it has its fill"


async def test_a_message_larger_than_its_demand_goes_alone(clock: VirtualClock) -> None:
    stage = Stage(clock, Demand(100, max_bytes=1_000))
    async with stage.scheduler:
        await stage.schedule("a", "b", payload=bytes(5_000))
        await stage.schedule("c", "d", payload=bytes(400))
        await asyncio.sleep(10)
    assert stage.sink.batches == [["a"], ["b"], ["c", "d"]]


async def test_s8_a_delivery_tells_what_was_scheduled_and_which_attempt_it_is(clock: VirtualClock) -> None:
    stage = Stage(clock)

    async def refuse_once(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        if len(stage.sink.sends) == 1:
            return [Failed("not now")]
        return await stage.sink.take(deliveries)

    stage.sink.do = refuse_once
    async with stage.scheduler as scheduler:
        made = await scheduler.schedule(
            b"\x00\xff", to="topic:a:b", delay="5s", id="m", key=b"k\x00", headers={"h": b"\xfe", "empty": b""}
        )
        await asyncio.sleep(10)
    first, second = (delivery for _, (delivery,) in stage.sink.sends)
    envelope = first.envelope
    assert (envelope.id, envelope.lane, envelope.address) == ("m", "topic", "a:b")
    assert (envelope.payload, envelope.key) == (b"\x00\xff", b"k\x00")
    assert dict(envelope.headers) == {"h": b"\xfe", "empty": b""}
    assert first.delivery_id == second.delivery_id == f"m/{made.revision}/{made.due_ms}"
    assert (
        (first.due_ms, first.scheduled_at_ms) == (second.due_ms, second.scheduled_at_ms) == (made.due_ms, made.revision)
    )
    assert (first.attempt, first.lateness_ms) == (1, 0)
    assert (second.attempt, second.lateness_ms) == (2, 1_000)


# --- outcomes ---------------------------------------------------------------------------------------------


async def test_each_message_of_a_batch_has_an_outcome_of_its_own(clock: VirtualClock) -> None:
    stage = Stage(clock)

    async def by_name(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        answers: list[SendOutcome] = []
        for each in deliveries:
            kind = each.envelope.id.split("-")[0]
            if kind == "never":
                answers.append(Failed("no such topic", retryable=False))
            elif kind == "always" or (kind == "once" and each.attempt == 1):
                answers.append(Failed(f"full, attempt {each.attempt}"))
            else:
                answers += await stage.sink.take([each])
        return answers

    stage.sink.do = by_name
    async with stage.scheduler:
        await stage.schedule("good-1", "once", "never", "good-2", "always", "good-3")
        await asyncio.sleep(60)
        assert await stage.left() == []
        letters = await stage.letters()
    assert stage.sink.batches == [
        ["good-1", "once", "never", "good-2", "always", "good-3"],
        ["once", "always"],
        ["always"],
    ]
    assert stage.sink.times == [1_000, 2_000, 3_000]
    assert stage.sink.taken_ids == ["good-1", "good-2", "good-3", "once"]
    assert {each: (letter.reason, letter.record.attempt) for each, letter in letters.items()} == {
        "never": ("not_retryable", 1),
        "always": ("attempts_exhausted", 3),
    }
    assert letters["never"].record.last_error == "no such topic"
    assert (letters["always"].record.first_error, letters["always"].record.last_error) == (
        "full, attempt 1",
        "full, attempt 3",
    )


@pytest.mark.parametrize("error", ["x" * 10_000, OSError("x" * 10_000)], ids=["text", "exception"])
@pytest.mark.parametrize("retryable", [True, False])
async def test_what_is_kept_of_a_refusal_is_a_short_text(clock: VirtualClock, error: Any, retryable: bool) -> None:  # noqa: ANN401
    stage = Stage(clock)

    async def refuse(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        return [Failed(error, retryable=retryable)]

    stage.sink.do = refuse
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(60)
        letter = (await stage.letters())["m"]
    assert letter.record.first_error == letter.record.last_error == "x" * 499 + "…"


async def test_b1_what_may_have_been_taken_is_sent_again_under_the_same_delivery_id(clock: VirtualClock) -> None:
    """An answer that was lost: nobody knows which were taken. At least once, each as a batch of its own."""
    stage = Stage(clock)

    async def take_but_lose_the_answer(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        outcomes = await stage.sink.take(deliveries)
        if len(stage.sink.sends) == 1:
            raise ConnectionResetError
        return outcomes

    stage.sink.do = take_but_lose_the_answer
    async with stage.scheduler:
        await stage.schedule("a", "b", "c")
        await asyncio.sleep(60)
        assert await stage.letters() == {}
    assert stage.sink.batches == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert set(Counter(each.delivery_id for each in stage.sink.taken).values()) == {2}


# --- a sink that is away ----------------------------------------------------------------------------------


async def away(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
    raise SinkUnavailableError(LANE, "connection refused")


async def test_l4_an_unavailable_sink_is_tried_less_and_less_often_and_costs_no_attempt(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        for _ in range(2):  # the second time its patience is as great as the first time
            stage.sink.do, begin = away, len(stage.sink.sends)
            await stage.schedule(*names(5))
            await asyncio.sleep(600)
            pauses = [b - a for a, b in pairwise(stage.sink.times[begin:])]
            assert 50 <= pauses[0] <= 100
            assert 100 <= pauses[1] <= 200
            assert max(pauses) <= LONGEST_PAUSE_MS
            assert all(pause >= LONGEST_PAUSE_MS // 2 for pause in pauses[10:])
            assert await stage.left() == [(each, "overdue", 0) for each in names(5)]
            stage.sink.do = stage.sink.take
            await asyncio.sleep(LONGEST_PAUSE_MS / 1000)
    assert stage.sink.taken_ids == names(5) * 2
    assert {each.attempt for each in stage.sink.taken} == {1}


async def test_batches_that_fail_together_count_as_one_failure(clock: VirtualClock) -> None:
    stage = Stage(clock)

    async def away_after_a_while(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(max(0, 10 - clock.monotonic_ms() / 1000))
        return await away(deliveries)

    stage.sink.do = away_after_a_while
    async with stage.scheduler:
        for n, name in enumerate(names(20)):
            await stage.schedule(name, delay=f"{1_000 + 10 * n}ms")
        await asyncio.sleep(120)
        assert stage.sink.batches[:20] == [[name] for name in names(20)]
        again = [at for at in stage.sink.times if at >= 10_000]
        pauses = [b - a for a, b in pairwise(again)]
        assert pauses[2] <= 800, "0.1 s before these, then 0.2 s, 0.4 s, 0.8 s at most"
        assert all(pause >= LONGEST_PAUSE_MS // 2 for pause in pauses[9:])
        stage.sink.do = stage.sink.take
        await asyncio.sleep(LONGEST_PAUSE_MS / 1000)
        assert sorted(stage.sink.taken_ids) == names(20)


def timers() -> int:
    """Return how many timers are set on this loop."""
    scheduled = cast("Any", asyncio.get_running_loop())._scheduled
    return sum(not timer.cancelled() for timer in scheduled)


async def test_r1_closed_while_it_waits_for_a_sink_it_leaves_no_timer(clock: VirtualClock) -> None:
    stage = Stage(clock)
    stage.sink.do = away
    before = timers()
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(60)
    assert timers() == before


# --- a sink that does what it may not ---------------------------------------------------------------------

Answer = Callable[[Sequence[Delivery]], Any]


def raising(error: Callable[[], BaseException]) -> Answer:
    def answer(deliveries: Sequence[Delivery]) -> Any:  # noqa: ANN401
        raise error()

    return answer


WRONG: dict[str, Answer] = {
    "TimeoutError": raising(TimeoutError),
    "a bug": raising(lambda: KeyError("x")),
    "several": raising(lambda: ExceptionGroup("both", [OSError(), ValueError()])),
    "a cancellation of its own": raising(CancelledError),
    "no answer": lambda deliveries: None,
    "too few": lambda deliveries: [Sent()] * (len(deliveries) - 1),
    "too many": lambda deliveries: [Sent()] * (len(deliveries) + 1),
    "no outcomes": lambda deliveries: [True] * len(deliveries),
    "classes": lambda deliveries: [Sent] * len(deliveries),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_l5_whatever_a_sink_raises_or_answers_for_one_message_costs_that_one_its_attempts(
    clock: VirtualClock, kind: str
) -> None:
    stage = Stage(clock)

    async def wrong_for_one(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        if any(each.envelope.id == "bad" for each in deliveries):
            return cast("Sequence[SendOutcome]", WRONG[kind](deliveries))
        return await stage.sink.take(deliveries)

    stage.sink.do = wrong_for_one
    async with stage.scheduler as scheduler:
        await stage.schedule("a", "bad", "b")
        await asyncio.sleep(60)
        assert await stage.is_free()
        (letter,) = (await stage.letters()).values()
        await stage.schedule("afterwards")
        await scheduler.schedule(b"", to="handler:work", delay="1s", id="elsewhere")
        await asyncio.sleep(2)
    assert (letter.record.id, letter.reason, letter.record.attempt) == ("bad", "attempts_exhausted", 3)
    assert isinstance(letter.record.last_error, str)
    assert stage.sink.taken_ids == ["a", "b", "afterwards"]
    assert stage.handled == ["elsewhere"]
    assert len(stage.sink.sends) == 1 + 3 + 2 + 1


# --- leases, and the end ----------------------------------------------------------------------------------


async def test_s7_a_send_whose_lease_was_lost_ends_and_settles_nothing(clock: VirtualClock) -> None:
    stage = Stage(clock, Demand(1))

    async def slowly(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(30 if len(stage.sink.sends) == 1 else 0)
        return await stage.sink.take(deliveries)

    stage.sink.do = slowly
    async with stage.scheduler:
        await stage.schedule("m")
        await asyncio.sleep(2)
        stage.store.inject("unavailable", "renew", times=None)
        await asyncio.sleep(15)
        async with stage.store.memory.work("takes over", [LANE]) as other:
            (claim,) = (await other.claim({LANE: Demand(1)}, request=new_id(), lease_ms=60_000)).claims
        stage.store.heal()
        await asyncio.sleep(3)
        await stage.schedule("next")
        await asyncio.sleep(5)
        assert stage.sink.taken == [], "what was sent cannot be taken back, and its place is not free"
        await asyncio.sleep(10)
        assert stage.sink.taken_ids == ["m", "next"]
        assert [each.id for call in stage.store.made("settle") for each in call.asked] == ["next"]
        assert await stage.left() == [("m", "in_flight", 0)]
        assert claim.record.attempt == 0


async def test_f4_what_is_claimed_too_late_is_not_sent(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        await stage.schedule("m", delay="5s")
        await asyncio.sleep(1)
        stage.store.inject("late_reply", "claim", lasting="16s")
        await asyncio.sleep(4 + 15 + 0.5)
        async with stage.store.memory.work("takes over", [LANE]) as other:
            claimed = await other.claim({LANE: Demand(1)}, request=new_id(), lease_ms=60_000)
        await asyncio.sleep(30)
    assert [claim.record.id for claim in claimed.claims] == ["m"]
    assert stage.sink.sends == []


async def test_an_occurrence_that_came_too_late_is_not_sent_and_the_next_is(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler as scheduler:
        await scheduler.schedule(b"", to=TO, every=Every("10m"), late=Late.drop("1m"), id="series")
    await asyncio.sleep(15 * 60)
    async with stage.scheduler:
        await asyncio.sleep(60)
        assert stage.sink.sends == []
        await asyncio.sleep(5 * 60)
    assert stage.sink.times == [20 * 60_000]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("coalesce", [10, 45, 50]), ("skip", [10, 50, 60]), ("all", [10, 45, 45, 45, 50])],
)
@pytest.mark.parametrize("end", ["sent", "refused", "raised"])
async def test_the_next_claim_decides_about_occurrences_that_came_due_during_a_send(
    clock: VirtualClock, missed: str, expected: list[int], end: str
) -> None:
    """The first send takes 35 s."""
    stage = Stage(clock)

    async def first_slowly(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        if len(stage.sink.sends) == 1:
            await asyncio.sleep(35)
            if end == "raised":
                raise ValueError("a bug in the sink")
            if end == "refused":
                return [Failed("bad", retryable=False)]
        return await stage.sink.take(deliveries)

    stage.sink.do = first_slowly
    async with stage.scheduler as scheduler:
        await scheduler.schedule(b"", to=TO, every=Every("10s", missed=missed), id="series")  # type: ignore[arg-type]
        await asyncio.sleep(65)
    first_sends = {each.due_ms: at for at, batch in reversed(stage.sink.sends) for each in batch}
    assert sorted(at // 1000 for at in first_sends.values())[: len(expected)] == expected


async def test_what_is_sent_when_closing_begins_may_end_and_what_comes_later_is_given_back(clock: VirtualClock) -> None:
    stage = Stage(clock, Demand(2))

    async def slowly(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(3)
        return await stage.sink.take(deliveries)

    stage.sink.do = slowly
    async with stage.scheduler:
        await stage.schedule("a")
        await asyncio.sleep(1.5)
        stage.store.inject("late_reply", "claim", lasting="1s")
        await stage.schedule("b", delay="0s")
        await asyncio.sleep(0.5)
    assert clock.monotonic_ms() == 4_000
    assert stage.sink.batches == [["a"]]
    async with Scheduler(stage.store, clock=clock, dispatch=False) as stage.scheduler:
        assert await stage.left() == [("b", "overdue", 0)]


async def ends() -> None:
    raise CancelledError


async def breaks() -> None:
    raise ConnectionError("closed while sending")


async def says_that_it_is_away() -> None:
    raise SinkUnavailableError(LANE, "closed while sending")


@pytest.mark.parametrize("then", [ends, breaks, says_that_it_is_away])
async def test_a_send_that_does_not_end_within_the_drain_time_is_cancelled_and_given_back(
    clock: VirtualClock, then: Callable[[], Awaitable[None]]
) -> None:
    stage = Stage(clock)
    cancelled: list[int] = []

    async def hang(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        try:
            await asyncio.sleep(3_600)
        except CancelledError:
            cancelled.append(clock.monotonic_ms())
            await then()
        return []

    stage.sink.do, before = hang, timers()
    async with stage.scheduler:
        await stage.schedule("a", "b")
        await asyncio.sleep(2)
    assert timers() == before
    assert cancelled == [2_000 + DRAIN_S * 1000]
    assert clock.monotonic_ms() == 2_000 + DRAIN_S * 1000
    assert stage.sink.batches == [["a", "b"]]
    async with Scheduler(stage.store, clock=clock, dispatch=False) as stage.scheduler:
        assert await stage.left() == [("a", "overdue", 0), ("b", "overdue", 0)]


async def test_a_send_that_ends_well_although_it_was_cancelled_is_done(clock: VirtualClock) -> None:
    stage = Stage(clock)

    async def finish(deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        try:
            await asyncio.sleep(3_600)
        except CancelledError:
            await asyncio.sleep(1)
        return await stage.sink.take(deliveries)

    stage.sink.do = finish
    async with stage.scheduler:
        await stage.schedule("a")
        await asyncio.sleep(2)
    assert stage.sink.taken_ids == ["a"]
    async with Scheduler(stage.store, clock=clock, dispatch=False) as stage.scheduler:
        assert await stage.left() == []
