"""The telemetry of a scheduler in memory, with OpenTelemetry's SDK, and none without a provider."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as contexts
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from aiodelay import ConfigurationError, Every, InputError, Message, Received, Reject, Retry, Scheduler, Telemetry
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    CONTINUED,
    After,
    Alarm,
    Envelope,
    Failed,
    LaneCounts,
    LaneState,
    Put,
    RenewOutcome,
    Tidied,
)
from aiodelay.errors import StoreUnavailableError
from aiodelay.memory import MemoryStore
from aiodelay.operations.queries import DEAD_REASONS
from aiodelay.ports import Work
from aiodelay.telemetry.instruments import MOST_DESTINATIONS, Cap
from aiodelay.telemetry.names import DURATION_BUCKETS, METRICS, OTHER
from aiodelay.telemetry.observer import observer_of
from aiodelay.testing import RecordingSink, VirtualClock, VirtualLoop
from tests.support.telemetry import Emitted, id_of, linked


@dataclass
class Check:
    number: int


@pytest.fixture
def emitted() -> Emitted:
    return Emitted()


def carried_in(kept: Mapping[str, str]) -> tuple[int, int]:
    found = trace.get_current_span(propagate.extract(kept)).get_span_context()
    return found.trace_id, found.span_id


# --- traces -----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_delayed_message_begins_a_trace_that_is_linked_to_what_scheduled_it(emitted: Emitted) -> None:
    scheduler, seen = Scheduler("memory://", telemetry=emitted.telemetry()), []

    @scheduler.handler
    async def check(event: Check) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    async with scheduler:
        with emitted.tracers.get_tracer("caller").start_as_current_span("caller"):
            scheduled = await scheduler.schedule(Check(1), delay="10ms")
        await scheduler.run_until_idle()
    caller, schedule, process = emitted.one("caller"), emitted.one("schedule Check"), emitted.one("process Check")
    assert schedule.parent is not None
    assert schedule.parent.span_id == caller.context.span_id
    assert (schedule.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert process.parent is None
    assert process.context.trace_id != schedule.context.trace_id
    assert linked(process) == [id_of(schedule)]
    assert dict(process.links[0].attributes or {}) == {"messaging.message.id": scheduled.id}
    assert seen == [process.context.span_id]
    attributes = dict(process.attributes or {})
    assert attributes.pop("aiodelay.message.lateness") >= 0  # type: ignore[operator]
    assert attributes == {
        "messaging.system": "aiodelay",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "Check",
        "messaging.message.id": scheduled.id,
        "aiodelay.message.delivery_timestamp": scheduled.due_ms,
        "aiodelay.message.attempt": 1,
    }
    assert (schedule.attributes or {})["aiodelay.message.delivery_timestamp"] == scheduled.due_ms
    scope = process.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.schema_url) == ("aiodelay", "https://opentelemetry.io/schemas/1.44.0")


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [
        ({}, False),
        ({"delayed": "new_trace", "continue_below": "1h"}, False),
        ({"delayed": "continue"}, True),
        ({"delayed": "continue", "continue_below": "5ms"}, False),
    ],
)
@pytest.mark.asyncio
async def test_short_delays_go_on_in_their_trace_if_told_so(
    emitted: Emitted, options: dict[str, Any], goes_on: bool
) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(**options))

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        await scheduler.schedule(Check(1), delay="10ms")
        await scheduler.run_until_idle()
    schedule, process = emitted.one("schedule Check"), emitted.one("process Check")
    assert (process.context.trace_id == schedule.context.trace_id) == goes_on
    assert (process.parent is not None) == goes_on
    assert linked(process) == ([] if goes_on else [id_of(schedule)])


@pytest.mark.asyncio
async def test_what_recurs_never_goes_on_in_its_trace(emitted: Emitted) -> None:
    scheduler, twice = Scheduler("memory://", telemetry=emitted.telemetry(delayed="continue")), asyncio.Event()
    runs: list[int] = []

    @scheduler.handler
    async def check(event: Check) -> None:
        runs.append(event.number)
        if len(runs) == 2:
            twice.set()

    async with scheduler:
        await scheduler.schedule(Check(1), every=Every("100ms"), id="series")
        await twice.wait()
        await scheduler.cancel("series")
    schedule = emitted.one("schedule Check")
    assert {span.parent for span in emitted.named("process Check")} == {None}
    assert {*map(tuple, map(linked, emitted.named("process Check")))} == {(id_of(schedule),)}


@pytest.mark.asyncio
async def test_each_attempt_is_a_trace_of_its_own_and_its_end_a_child(emitted: Emitted) -> None:
    retry = Retry(attempts=2, first="5ms")
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(), retry=retry)

    @scheduler.handler
    async def check(event: Check) -> None:
        raise ValueError("secret")

    async with scheduler:
        await scheduler.schedule(Check(1), delay="5ms")
        await scheduler.run_until_idle()
    schedule, (first, second) = emitted.one("schedule Check"), emitted.named("process Check")
    assert first.context.trace_id != second.context.trace_id
    assert (linked(first), linked(second)) == ([id_of(schedule)], [id_of(schedule), id_of(first)])
    assert dict(second.links[1].attributes or {}) == {
        "messaging.message.id": (second.attributes or {})["messaging.message.id"],
        "aiodelay.message.attempt": 1,
    }
    assert [(span.attributes or {})["aiodelay.message.attempt"] for span in (first, second)] == [1, 2]
    for span in (first, second):
        assert (span.status.status_code, (span.attributes or {})["error.type"]) == (StatusCode.ERROR, "ValueError")
        assert [event.name for event in span.events] == ["exception"]
    release, dead = emitted.one("release Check"), emitted.one("dead_letter Check")
    for span, parent, reason in ((release, first, "retry"), (dead, second, "attempts_exhausted")):
        assert span.parent is not None
        assert span.parent.span_id == parent.context.span_id
        assert (span.attributes or {})["aiodelay.reason"] == reason
        assert span.kind is SpanKind.CLIENT


@pytest.mark.asyncio
async def test_a_rejection_and_a_timeout_are_errors_of_the_run(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(), retry=Retry(attempts=1))

    @scheduler.handler(timeout="20ms")
    async def check(event: Check) -> Reject | None:
        if event.number == 1:
            return Reject("no")
        await asyncio.sleep(10)
        return None

    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        await scheduler.schedule(Check(2), delay="2ms")
        await scheduler.run_until_idle()
    kinds = {(span.attributes or {})["error.type"] for span in emitted.named("process Check")}
    assert kinds == {"rejected", "HandlerTimeoutError"}


class UnshowableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.asyncio
async def test_an_exception_that_cannot_be_shown_is_an_attempt_like_any_other(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(), retry=Retry(attempts=1))

    @scheduler.handler
    async def check(event: Check) -> None:
        raise UnshowableError

    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        await scheduler.run_until_idle()
        letters = [letter.reason async for letter in scheduler.dead_letters()]
    assert letters == ["not_retryable"]
    assert (emitted.one("process Check").attributes or {})["error.type"] == "UnshowableError"


@pytest.mark.asyncio
async def test_a_plain_handler_runs_in_its_span(emitted: Emitted) -> None:
    scheduler, seen = Scheduler("memory://", telemetry=emitted.telemetry()), []

    @scheduler.handler
    def check(event: Check) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        await scheduler.run_until_idle()
    assert seen == [emitted.one("process Check").context.span_id]


@pytest.mark.asyncio
async def test_what_a_subscriber_takes_is_observed_too(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry())
    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        async for message in scheduler.messages(Check):
            assert isinstance(message, Received)
            message.settle()
            break
    assert linked(emitted.one("process Check")) == [id_of(emitted.one("schedule Check"))]


@pytest.mark.asyncio
async def test_a_batch_has_one_span_whose_context_goes_with_each_message(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry())

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        await scheduler.schedule_many(Message(Check(i), delay="5ms") for i in range(3))
        await scheduler.run_until_idle()
    schedule = emitted.one("schedule Check")
    assert (schedule.kind, (schedule.attributes or {})["messaging.batch.message_count"]) == (SpanKind.PRODUCER, 3)
    assert [linked(span) for span in emitted.named("process Check")] == 3 * [[id_of(schedule)]]


@pytest.mark.asyncio
async def test_create_spans_of_a_batch(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(create_spans=True), dispatch=False)
    async with scheduler:
        await scheduler.schedule_many(Message(Check(i), delay="1h", id=str(i)) for i in range(3))
        kept = [snapshot.record.envelope.trace async for snapshot in scheduler.pending()]
    schedule, created = emitted.one("schedule Check"), emitted.named("create Check")
    assert (schedule.kind, {span.kind for span in created}) == (SpanKind.CLIENT, {SpanKind.PRODUCER})
    assert linked(schedule) == [id_of(span) for span in created]
    assert sorted(map(carried_in, kept)) == sorted(map(id_of, created))


@pytest.mark.asyncio
async def test_what_a_create_span_is_linked_to_and_what_to_it(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry(create_spans=True))
    given = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        own = Message(Check(0), delay="5ms", id="own", headers={"traceparent": given})
        await scheduler.schedule_many([own, Message(Check(1), delay="5ms", id="plain")])
        await scheduler.run_until_idle()

    def by_message(spans: Sequence[ReadableSpan]) -> dict[object, ReadableSpan]:
        return {(span.attributes or {})["messaging.message.id"]: span for span in spans}

    schedule, created = emitted.one("schedule Check"), by_message(emitted.named("create Check"))
    assert {(link.attributes or {})["messaging.message.id"]: link.context for link in schedule.links} == {
        name: span.context for name, span in created.items()
    }
    assert linked(created["own"]) == [(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)]
    assert linked(created["plain"]) == []
    handled = by_message(emitted.named("process Check"))
    assert {name: linked(span) for name, span in handled.items()} == {
        name: [id_of(span)] for name, span in created.items()
    }


@pytest.mark.asyncio
async def test_commands_have_spans_and_an_outcome(emitted: Emitted) -> None:
    async with Scheduler("memory://", telemetry=emitted.telemetry(), dispatch=False) as scheduler:
        await scheduler.schedule(Check(1), delay="1h", id="a")
        await scheduler.reschedule("a", delay="2h")
        await scheduler.fire("a")
        await scheduler.cancel("a")
        await scheduler.cancel("a")
    assert [span.name for span in emitted.spans][1:] == ["reschedule", "fire", "cancel_scheduled", "cancel_scheduled"]
    outcomes = [(span.attributes or {})["aiodelay.cancel.outcome"] for span in emitted.named("cancel_scheduled")]
    assert outcomes == ["cancelled", "not_found"]
    assert {span.status.status_code for span in emitted.spans} == {StatusCode.UNSET}
    assert emitted.total("aiodelay.cancellations") == 2


@pytest.mark.asyncio
async def test_what_is_refused_is_an_error_of_the_call(emitted: Emitted) -> None:
    from aiodelay import Conflict, DuplicateIdError  # noqa: PLC0415

    async with Scheduler("memory://", telemetry=emitted.telemetry(), dispatch=False) as scheduler:
        await scheduler.schedule(Check(1), delay="1h", id="a")
        with pytest.raises(DuplicateIdError):
            await scheduler.schedule(Check(1), delay="1h", id="a", conflict=Conflict.error())
        with pytest.raises(InputError):
            await scheduler.schedule(Check(1), delay="1h", id="")
    _, refused = emitted.named("schedule Check")
    assert (refused.status.status_code, (refused.attributes or {})["error.type"]) == (
        StatusCode.ERROR,
        "DuplicateIdError",
    )


# --- what goes with a message -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_sink_is_given_the_delivery_s_context_and_no_header_is_touched(emitted: Emitted) -> None:
    line = RecordingSink("line")
    async with Scheduler("memory://", sinks=[line], telemetry=emitted.telemetry(delayed="continue")) as scheduler:
        await scheduler.schedule(b"x", to="line:a", delay="5ms", headers={"h": b"1"})
        await scheduler.run_until_idle()
    schedule, deliver, (sent,) = emitted.one("schedule line:a"), emitted.one("deliver line:a"), line.deliveries
    assert deliver.kind is SpanKind.CLIENT
    assert deliver.parent is not None
    assert deliver.parent.span_id == schedule.context.span_id
    assert carried_in(sent.envelope.trace) == id_of(deliver)
    assert CONTINUED not in sent.envelope.trace
    assert sent.envelope.headers == {"h": b"1"}


@pytest.mark.asyncio
async def test_a_batch_that_is_delivered_has_a_link_for_each_message(emitted: Emitted) -> None:
    line = RecordingSink("line")
    line.inject(Failed("no", retryable=False), concerns=lambda delivery: delivery.envelope.id == "bad")
    async with Scheduler("memory://", sinks=[line], telemetry=emitted.telemetry()) as scheduler:
        await scheduler.pause("line")
        for i, message_id in enumerate(("a", "b", "bad")):
            await scheduler.schedule(b"x", to=f"line:{i % 2}", delay="0s", id=message_id)
        scheduled = sorted(map(id_of, emitted.spans))
        await scheduler.resume("line")
        await scheduler.run_until_idle()
    deliver, dead = emitted.one("deliver line"), emitted.one("dead_letter line:0")
    assert line.batches == [3]
    assert sorted(linked(deliver)) == scheduled
    assert (deliver.attributes or {})["messaging.batch.message_count"] == 3
    assert (deliver.attributes or {})["error.type"] == "refused"
    assert dead.parent is not None
    assert dead.parent.span_id == deliver.context.span_id
    assert emitted.total("messaging.client.sent.messages", messaging_operation_name="deliver") == 3


@pytest.mark.asyncio
async def test_a_context_in_the_caller_s_headers_is_linked_and_left(emitted: Emitted) -> None:
    given = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with Scheduler("memory://", telemetry=emitted.telemetry(), dispatch=False) as scheduler:
        await scheduler.schedule(Check(1), delay="1h", id="a", headers={"Traceparent": given})
        snapshot = await scheduler.get("a")
    assert snapshot is not None
    assert snapshot.record.envelope.headers == {"Traceparent": given}
    assert linked(emitted.one("schedule Check")) == [(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)]


@pytest.mark.parametrize("with_baggage", [False, True])
@pytest.mark.asyncio
async def test_baggage_is_kept_only_if_asked_for(emitted: Emitted, with_baggage: bool) -> None:
    scheduler, seen = Scheduler("memory://", telemetry=emitted.telemetry(propagate_baggage=with_baggage)), []

    @scheduler.handler
    async def check(event: Check) -> None:
        seen.append(dict(baggage.get_all()))

    async with scheduler:
        token = contexts.attach(baggage.set_baggage("who", "me"))
        await scheduler.schedule(Check(1), delay="5ms")
        contexts.detach(token)
        await scheduler.run_until_idle()
    assert seen == [{"who": "me"} if with_baggage else {}]


@pytest.mark.parametrize(("delayed", "goes_on"), [("continue", True), ("new_trace", False)])
@pytest.mark.asyncio
async def test_a_process_without_tracing_hands_a_continued_trace_on(
    emitted: Emitted, delayed: str, goes_on: bool
) -> None:
    store, seen = MemoryStore(), list[int]()
    worker = Scheduler(store, telemetry=emitted.telemetry(tracing=False))

    @worker.handler
    async def check(event: Check) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    async with Scheduler(store, telemetry=emitted.telemetry(delayed=delayed), dispatch=False) as producer:
        await producer.schedule(Check(1), delay="5ms", to="handler:Check")
        async with worker:
            await worker.run_until_idle()
    assert seen == [emitted.one("schedule Check").context.trace_id if goes_on else 0]


@pytest.mark.asyncio
async def test_a_handler_is_not_within_the_span_that_opened_its_scheduler(emitted: Emitted) -> None:
    scheduler, parents = Scheduler("memory://", telemetry=emitted.telemetry()), []

    @scheduler.handler
    async def check(event: Check) -> None:
        with emitted.tracers.get_tracer("t").start_as_current_span("inner") as span:
            parents.append(span.parent.span_id)  # type: ignore[attr-defined]

    with emitted.tracers.get_tracer("t").start_as_current_span("opening"):
        await scheduler.__aenter__()
    await scheduler.schedule(Check(1), delay="5ms")
    await scheduler.run_until_idle()
    await scheduler.__aexit__(None, None, None)
    process = emitted.one("process Check")
    assert process.parent is None
    assert parents == [process.context.span_id]


# --- metrics ----------------------------------------------------------------------------------------------


def test_metrics_of_a_run(emitted: Emitted) -> None:
    clock = VirtualClock.of_next_loop()
    retry = Retry(attempts=2, first="5ms")

    async def main() -> dict[str, list[tuple[Mapping[str, Any], Any]]]:
        scheduler = Scheduler(
            MemoryStore(clock=clock), telemetry=emitted.telemetry(), retry=retry, namespace="shop", clock=clock
        )

        @scheduler.handler(concurrency=7)
        async def check(event: Check) -> None:
            if event.number:
                raise ValueError

        async with scheduler:
            await scheduler.schedule(Check(0), delay="5ms")
            await scheduler.schedule(Check(1), delay="5ms")
            await scheduler.schedule_many([Message(Check(0), delay="1h"), Message(Check(0), delay="2h")])
            await asyncio.sleep(15)
            return emitted.points()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        points = runner.run(main())
    labels, lateness = points["aiodelay.delivery.lateness"][0]
    assert labels == {
        "aiodelay.store": "memory://",
        "aiodelay.namespace": "shop",
        "messaging.destination.name": "Check",
    }
    assert (lateness[0], lateness[2][:2], lateness[2][-1]) == (2, (0.001, 0.0025), 3600), "a retry is not late"
    assert [count for _, (count, _, _) in points["aiodelay.schedule.delay"]] == [4]
    assert sum(value for _, value in points["messaging.client.sent.messages"]) == 4
    assert sum(value for _, value in points["messaging.client.consumed.messages"]) == 3
    durations = {labels.get("error.type"): value for labels, value in points["messaging.process.duration"]}
    assert {kind: value[0] for kind, value in durations.items()} == {None: 1, "ValueError": 2}
    assert durations[None][2] == DURATION_BUCKETS
    operations = {labels["messaging.operation.name"] for labels, _ in points["messaging.client.operation.duration"]}
    assert operations == {"schedule", "claim", "settle"}
    assert [(labels["aiodelay.reason"], n) for labels, n in points["aiodelay.messages.released"]] == [("retry", 1)]
    dead = {labels["aiodelay.reason"]: n for labels, n in points["aiodelay.messages.dead_lettered"]}
    assert dead == dict.fromkeys(DEAD_REASONS, 0) | {"attempts_exhausted": 1}, (
        "zeros, so that a rate sees the first one"
    )
    assert [n for _, n in points["aiodelay.destination.served"]] == [1]
    assert [n for _, n in points["aiodelay.handler.demand"]] == [7]
    assert [n for _, n in points["aiodelay.handler.in_flight"]] == [0]
    assert {labels["aiodelay.message.state"] for labels, _ in points["aiodelay.messages"]} == {
        *("scheduled", "overdue", "claimed", "held", "dead")
    }
    assert {labels["aiodelay.reason"] for labels, _ in points["aiodelay.dispatcher.wakeups"]} >= {"due"}
    assert [age for _, age in points["aiodelay.overdue.age"]] == [0]


@pytest.mark.asyncio
async def test_a_destination_that_nobody_serves_is_told_by_whoever_serves_others(
    emitted: Emitted, clock: VirtualClock
) -> None:
    scheduler = Scheduler(MemoryStore(clock=clock), clock=clock, telemetry=emitted.telemetry())

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        await scheduler.schedule(b"x", to="handler:nobody", delay="1h")
        await asyncio.sleep(12)  # until housekeeping has looked
        points = emitted.points()["aiodelay.destination.served"]
    assert {labels["messaging.destination.name"]: served for labels, served in points} == {"Check": 1, "nobody": 0}


@pytest.mark.asyncio
async def test_messages_are_told_once_they_are_counted(emitted: Emitted, clock: VirtualClock) -> None:
    store = UncountableStore(clock=clock)
    scheduler = Scheduler(store, clock=clock, telemetry=emitted.telemetry())

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        await asyncio.sleep(12)  # until housekeeping has tried to count
        assert "aiodelay.messages" not in emitted.points(), "a false 0 would look as if dead letters came since"
        store.is_countable = True
        await asyncio.sleep(12)
        assert {n for _, n in emitted.points()["aiodelay.messages"]} == {0}


@pytest.mark.asyncio
async def test_counting_that_was_cut_off_leaves_the_next_steps_of_housekeeping_alone(
    emitted: Emitted, clock: VirtualClock
) -> None:
    store, alarms = HangingStore(clock=clock), list[Alarm]()
    scheduler = Scheduler(
        store, clock=clock, telemetry=emitted.telemetry(), overdue_alarm="20s", on_alarm=alarms.append
    )
    async with scheduler:
        await asyncio.sleep(200)
    assert store.asked == 1
    assert [(alarm.kind, alarm.is_over) for alarm in alarms] == [("store", False), ("store", True)]


class HangingStore(MemoryStore):
    """A memory store that never answers how much is in it."""

    asked = 0

    async def counts(self) -> Mapping[str, LaneCounts]:
        self.asked += 1
        await asyncio.sleep(3600)
        return {}


class UncountableStore(MemoryStore):
    """A memory store that does not answer how much is in it, until it may."""

    is_countable = False

    async def counts(self) -> Mapping[str, LaneCounts]:
        if not self.is_countable:
            raise StoreUnavailableError(self.name, "it does not answer")
        return await super().counts()


@pytest.mark.asyncio
async def test_nothing_is_asked_of_a_scheduler_that_is_closed(emitted: Emitted) -> None:
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry())

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        assert "aiodelay.handler.demand" in emitted.points()
    assert "aiodelay.handler.demand" not in emitted.points()


@pytest.mark.asyncio
async def test_a_reader_in_a_thread_of_its_own_gets_all_observed_metrics(emitted: Emitted) -> None:
    """The readers for Prometheus and for OTLP collect in threads."""
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry())

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        points = await asyncio.to_thread(emitted.points)
    assert points.keys() >= {"aiodelay.handler.demand", "aiodelay.handler.in_flight", "aiodelay.destination.served"}


@pytest.mark.asyncio
async def test_two_schedulers_share_the_instruments_of_a_provider(emitted: Emitted) -> None:
    def opened(namespace: str) -> Scheduler:
        scheduler = Scheduler("memory://", telemetry=emitted.telemetry(), namespace=namespace)

        @scheduler.handler
        async def check(event: Check) -> None: ...

        return scheduler

    async with opened("a"), opened("b"):
        demand = emitted.points()["aiodelay.handler.demand"]
    assert sorted((labels["aiodelay.namespace"], n) for labels, n in demand) == [("a", 16), ("b", 16)]


def test_too_many_destinations_are_one() -> None:
    cap = Cap()
    names = [cap.of(f"line:{i}") for i in range(MOST_DESTINATIONS + 10)]
    assert names[:MOST_DESTINATIONS] == [f"line:{i}" for i in range(MOST_DESTINATIONS)]
    assert set(names[MOST_DESTINATIONS:]) == {OTHER}
    assert cap.of("line:0") == "line:0"


@pytest.mark.asyncio
async def test_destinations_beyond_the_cap_have_one_name_in_spans_and_metrics(emitted: Emitted) -> None:
    async with Scheduler(
        "memory://", sinks=[RecordingSink("line")], telemetry=emitted.telemetry(), dispatch=False
    ) as scheduler:
        for i in range(MOST_DESTINATIONS + 5):
            await scheduler.schedule(b"x", to=f"line:{i}", delay="1h")
    assert len(emitted.named(f"schedule {OTHER}")) == 5
    assert emitted.total("messaging.client.sent.messages", messaging_destination_name=OTHER) == 5


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.asyncio
async def test_destinations_of_one_name_report_the_worst_of_them(emitted: Emitted, step: int) -> None:
    places = [f"place{i}" for i in range(MOST_DESTINATIONS)]
    observer = observer_of(emitted.telemetry(), MemoryStore(), "", places)
    assert observer is not None
    observer.watch(tuple)
    lanes = [LaneState("overdue", 1_000, False), LaneState("fine", None, True)]
    await observer.look(Tidied(61_000, 0, 0, lanes[::step]))
    points = emitted.points()
    worst = [points[name] for name in ("aiodelay.overdue.age", "aiodelay.destination.served")]
    assert [[(labels["messaging.destination.name"], value) for labels, value in each] for each in worst] == [
        [(OTHER, 60)],
        [(OTHER, 0)],
    ]


@pytest.mark.asyncio
async def test_messages_that_an_intake_schedules_are_counted(emitted: Emitted) -> None:
    observer = observer_of(emitted.telemetry(), MemoryStore(), "", [])
    assert observer is not None
    puts = [Put(new_op(), Envelope(f"{n}", "line", address=f"{n % 2}"), After(1_000)) for n in range(3)]
    with observer.taken_in("requests", 0, puts):
        pass
    with pytest.raises(StoreUnavailableError), observer.taken_in("requests", 0, puts):
        raise StoreUnavailableError("the store", "gone")
    counted = {"messaging_operation_name": "schedule"}
    assert emitted.total("messaging.client.sent.messages", messaging_destination_name="line:0", **counted) == 2
    assert emitted.total("messaging.client.sent.messages", **counted) == 3


@pytest.mark.asyncio
async def test_a_retry_of_a_sink_is_not_late(emitted: Emitted, clock: VirtualClock) -> None:
    line = RecordingSink("line")
    line.inject(Failed("no"))
    scheduler = Scheduler(
        MemoryStore(clock=clock), sinks=[line], clock=clock, telemetry=emitted.telemetry(), retry=Retry(first="30s")
    )
    async with scheduler:
        await scheduler.schedule(b"x", to="line:a", delay="0s")
        await scheduler.run_until_idle()
    assert len(line.deliveries) == 2
    ((_, (count, total, _)),) = emitted.points()["aiodelay.delivery.lateness"]
    assert (count, total < 1) == (1, True)


# --- off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tracing": False, "metrics": False}])
@pytest.mark.asyncio
async def test_nobody_observes_where_nothing_is_configured(emitted: Emitted, options: dict[str, Any]) -> None:
    telemetry = emitted.telemetry(**options) if options else Telemetry()
    scheduler = Scheduler("memory://", telemetry=telemetry)
    async with scheduler:
        assert scheduler._running is not None
        assert scheduler._running._options.observer is None
        assert type(scheduler._commands).__name__ == "CommandSender"
        await scheduler.schedule(Check(1), delay="1h", id="a")
        snapshot = await scheduler.get("a")
    assert snapshot is not None
    assert snapshot.record.envelope.trace == {}


@pytest.mark.parametrize(("options", "spans", "counts"), [({"tracing": False}, 0, 1), ({"metrics": False}, 1, 0)])
@pytest.mark.asyncio
async def test_each_signal_can_be_left_out(emitted: Emitted, options: dict[str, Any], spans: int, counts: int) -> None:
    async with Scheduler("memory://", telemetry=emitted.telemetry(**options), dispatch=False) as scheduler:
        await scheduler.schedule(Check(1), delay="1h")
    assert (len(emitted.spans), emitted.total("messaging.client.sent.messages")) == (spans, counts)


GLOBAL = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from aiodelay import Scheduler

async def main():
    async with Scheduler("memory://", sinks=["stdout:"], dispatch=False) as before:
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        await before.schedule(b"x", to="stdout:a", delay="1h")
        assert not exporter.get_finished_spans()  # decided when it was opened
    async with Scheduler("memory://", sinks=["stdout:"], dispatch=False) as after:
        await after.schedule(b"x", to="stdout:a", delay="1h")
    print([span.name for span in exporter.get_finished_spans()])

asyncio.run(main())
"""


def test_the_global_provider_is_used_as_it_is_when_a_scheduler_opens() -> None:
    run = subprocess.run([sys.executable, "-c", GLOBAL], capture_output=True, text=True, check=False, timeout=60)
    assert run.stdout == "['schedule stdout:a']\n", run.stderr


@pytest.mark.parametrize(
    "options", [{"delayed": "both"}, {"continue_below": "soon"}, {"create_spans": "yes"}, {"metrics": 1}]
)
def test_a_wrong_setting_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Telemetry(**options)


def test_names_are_golden() -> None:
    """Dashboards and alerts hang on these: a change is a change for users."""
    assert [(metric.name, metric.kind, metric.unit) for metric in METRICS] == [
        ("messaging.client.operation.duration", "histogram", "s"),
        ("messaging.client.sent.messages", "counter", "{message}"),
        ("messaging.client.consumed.messages", "counter", "{message}"),
        ("messaging.process.duration", "histogram", "s"),
        ("aiodelay.delivery.lateness", "histogram", "s"),
        ("aiodelay.schedule.delay", "histogram", "s"),
        ("aiodelay.messages.dead_lettered", "counter", "{message}"),
        ("aiodelay.messages.released", "counter", "{message}"),
        ("aiodelay.leases.lost", "counter", "{lease}"),
        ("aiodelay.cancellations", "counter", "{message}"),
        ("aiodelay.dispatcher.wakeups", "counter", "{wakeup}"),
        ("aiodelay.overdue.age", "gauge", "s"),
        ("aiodelay.destination.served", "gauge", "{destination}"),
        ("aiodelay.messages", "up_down_counter", "{message}"),
        ("aiodelay.handler.in_flight", "up_down_counter", "{message}"),
        ("aiodelay.handler.demand", "up_down_counter", "{message}"),
        ("aiodelay.store.fill", "gauge", "{fraction}"),
        ("aiodelay.list.length", "gauge", "{message}"),
        ("aiodelay.assignment.partitions", "gauge", "{partition}"),
        ("aiodelay.restore.duration", "histogram", "s"),
    ]


# --- what is kept out of clients' instrumentation, and what leases and loops tell ---------------------------


class _Watched:
    """A store's dispatching side that notes whether clients' instrumentation would see each call.

    Args:
        loses: Whether the first answer to a settlement is lost, after the settlement was written.
    """

    def __init__(self, work: Work, seen: dict[str, list[bool]], renewed: RenewOutcome | None, *, loses: bool) -> None:
        self._work, self._seen, self._renewed, self._loses = work, seen, renewed, loses

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        found = getattr(self._work, name)
        if name not in ("claim", "settle", "renew", "tidy", "wait"):
            return found

        async def noted(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as above
            self._seen[name].append(is_instrumentation_enabled())
            answer = await found(*given, **named)
            if name == "settle" and self._loses:
                self._loses = False
                raise StoreUnavailableError("memory", "the answer is lost")
            return [self._renewed] * len(answer) if name == "renew" and self._renewed else answer

        return noted


class WatchedStore(MemoryStore):
    def __init__(self, clock: VirtualClock, renewed: RenewOutcome | None = None, *, loses: bool = False) -> None:
        super().__init__(clock=clock)
        self.seen: dict[str, list[bool]] = defaultdict(list)
        self._renewed, self._loses = renewed, loses

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[str]) -> AsyncIterator[Work]:
        self.seen["open"].append(is_instrumentation_enabled())
        async with super().work(worker, lanes) as work:
            yield cast("Work", _Watched(work, self.seen, self._renewed, loses=self._loses))


def play(store: WatchedStore, clock: VirtualClock, emitted: Emitted, runs_s: float) -> None:
    """Have one message handled that takes so long, in virtual time."""

    async def main() -> None:
        scheduler = Scheduler(store, telemetry=emitted.telemetry(), clock=clock)

        @scheduler.handler
        async def check(event: Check) -> None:
            await asyncio.sleep(runs_s)

        async with scheduler:
            await asyncio.sleep(40)
            await scheduler.schedule(Check(1), delay="10s")
            await asyncio.sleep(40 + runs_s)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_waits_renewals_and_housekeeping_are_kept_out_of_instrumentation(emitted: Emitted) -> None:
    clock = VirtualClock.of_next_loop()
    store = WatchedStore(clock)
    play(store, clock, emitted, runs_s=12)
    seen = store.seen
    assert len(seen["renew"]) >= 2
    assert {name: set(seen[name]) for name in ("open", "wait", "renew", "tidy")} == {
        name: {False} for name in ("open", "wait", "renew", "tidy")
    }
    assert set(seen["settle"]) == {True}
    # The message is due; the lease of its claim would have ended. All other claims find nothing.
    assert seen["claim"].count(True) == 2
    assert len(seen["claim"]) > 3
    reasons = {labels["aiodelay.reason"] for labels, _ in emitted.points()["aiodelay.dispatcher.wakeups"]}
    assert reasons == {"due", "demand", "earlier_head", "safety"}
    assert emitted.total("aiodelay.leases.lost") == 0


def test_a_settlement_that_is_repeated_after_a_lost_answer_is_no_lost_lease(emitted: Emitted) -> None:
    clock = VirtualClock.of_next_loop()
    store = WatchedStore(clock, loses=True)
    play(store, clock, emitted, runs_s=1)
    assert len(store.seen["settle"]) == 2
    assert emitted.total("aiodelay.leases.lost") == 0


def test_lost_leases_are_counted_and_their_runs_are_errors(emitted: Emitted) -> None:
    clock = VirtualClock.of_next_loop()
    play(WatchedStore(clock, RenewOutcome.LOST), clock, emitted, runs_s=8)
    assert emitted.total("aiodelay.leases.lost") >= 1
    span = emitted.named("process Check")[0]
    assert (span.attributes or {})["error.type"] == "left_to_lease"


@pytest.mark.asyncio
async def test_a_run_of_a_batch_has_a_span_with_a_link_for_each_message(emitted: Emitted) -> None:
    current: list[object] = []
    scheduler = Scheduler("memory://", telemetry=emitted.telemetry())

    @scheduler.handler
    async def handle(events: list[Check]) -> None:
        current.append(trace.get_current_span().get_span_context().span_id)

    async with scheduler:
        await scheduler.schedule_many(Message(Check(n), delay="20ms") for n in range(3))
        await scheduler.run_until_idle()
    spans = emitted.named("process Check")
    (run,) = [span for span in spans if "messaging.batch.message_count" in (span.attributes or {})]
    deliveries = [span for span in spans if span is not run]
    assert (run.attributes or {})["messaging.batch.message_count"] == 3
    assert sorted(linked(run)) == sorted(map(id_of, deliveries))
    assert current == [run.context.span_id]
    assert emitted.total("messaging.client.consumed.messages") == 3
