"""`Measurements`: spans, counts and durations of one opening of a scheduler. `Observer` adds the wrappers of stores."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
)
from typing import Protocol, get_args

from msgspec import structs
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context

from aiodelay.core.values import (
    After,
    Claim,
    Dead,
    DeadReason,
    Delivery,
    Done,
    Lane,
    LaneCounts,
    NotTaken,
    Put,
    Record,
    SendOutcome,
    Sent,
    Settlement,
    Tidied,
)
from aiodelay.errors import AiodelayError
from aiodelay.ports import Bounded, Lists, Loads, Sink, Store

from . import names
from .attempts import Attempt, HandlerMeasures
from .instruments import Attributes, Instruments, now_s
from .tracing import (
    NOTHING,
    QUIET,
    Tracing,
    current_in,
    destination_of,
    fail,
    fail_as,
    no_links,
    sampled_in,
)

__all__ = ["Measurements", "ObservedClaim"]

log: logging.Logger = logging.getLogger("aiodelay.telemetry")

COUNTING_PART = 0.01
"""The largest part of the time that counting messages may take."""


class ObservedClaim(Protocol):
    """A claim of this process, with the observed attempt to deliver its message."""

    claim: Claim
    attempt: Attempt | None


class Measurements:
    """Measures one opening of a scheduler.

    Args:
        tracing: Makes the spans.
        instruments: Hold the counts and durations.
        store: The store of the scheduler.
        namespace: The namespace of the scheduler.
        create_spans: Whether each message of a `schedule_many` batch gets its own span.
    """

    def __init__(
        self, tracing: Tracing, instruments: Instruments, store: Store, namespace: str, *, create_spans: bool
    ) -> None:
        self.tracing: Tracing = tracing
        self.instruments: Instruments = instruments
        self._store = store
        self._create_spans = create_spans
        self.base: Attributes = {names.STORE: store.name, names.NAMESPACE: namespace}
        self._labels: dict[tuple[str, str, str], Attributes] = {}  # bounded, because destination labels are limited
        self._own_labels: dict[str, Attributes] = {}
        self._handlers: dict[Lane, HandlerMeasures] = {}
        self._loads: Callable[[], Iterable[tuple[Lane, int, int]]] = tuple
        self._tidied: Tidied | None = None
        self._counts: Mapping[Lane, LaneCounts] | None = None
        self._fill: float | None = None
        self._lengths: Mapping[str, int] = {}
        self._look_again_s = 0.0
        self._observed: dict[str, Callable[[], Iterable[tuple[float, Attributes]]]] = {
            names.OVERDUE_AGE.name: self._overdue,
            names.SERVED.name: self._served,
            names.MESSAGES.name: self._messages,
            names.IN_FLIGHT.name: lambda: [(n, self.of_ours(self.named(lane))) for lane, n, _ in self._loads()],
            names.DEMAND.name: lambda: [(n, self.of_ours(self.named(lane))) for lane, _, n in self._loads()],
            names.STORE_FILL.name: lambda: () if self._fill is None else [(self._fill, self.base)],
            names.LIST_LENGTH.name: lambda: [(n, self.of_ours(place)) for place, n in self._lengths.items()],
            names.PARTITIONS.name: self._partitions,
        }

    @staticmethod
    def apart(*, silent: bool = False) -> AbstractContextManager[None]:
        """Leave the caller's span for a block. Work that the block starts may outlive the caller's span.

        Args:
            silent: Also turn off the spans of client instrumentation for this work.
        """
        return current_in(QUIET if silent else NOTHING)

    # --- scheduling -----------------------------------------------------------------------------------------

    def carrying(self, put: Put, span: Span) -> Put:
        """Return a put whose message carries the context of a span."""
        ahead_ms = None if put.envelope.rule is not None else self._ahead_ms(put)
        trace = self.tracing.carried(span, ahead_ms=ahead_ms)
        return structs.replace(put, envelope=structs.replace(put.envelope, trace=trace)) if trace else put

    def note_delays(self, puts: Sequence[Put]) -> None:
        """Record the time from now to the due time of each message."""
        for put in puts:
            labels = self.of_ours(self.named(destination_of(put.envelope)))
            self.instruments.record(names.SCHEDULE_DELAY, self._ahead_ms(put) / 1000, labels)

    def _ahead_ms(self, put: Put) -> int:
        return put.due.ms if isinstance(put.due, After) else max(put.due.ms - self._store.now_ms(), 0)

    @contextmanager
    def taken_in(self, topic: str, partition: int, puts: Sequence[Put]) -> Iterator[Sequence[Put]]:
        """Observe the storing of intake requests in one span. The span has links to the spans that the records name."""
        if not puts:
            yield puts
            return
        span = self.tracing.start(
            names.PROCESS,
            self.named(f"{names.KAFKA}:{topic}"),
            SpanKind.CONSUMER,
            attributes=lambda: {names.MESSAGE_COUNT: len(puts), names.PARTITION: str(partition)},
            context=NOTHING,
            links=lambda: [link for put in puts for link in self.tracing.given_in(put.envelope.headers)],
            system=names.KAFKA,
        )
        try:
            with current_in(set_span_in_context(span, NOTHING)):
                yield [self.carrying(put, span) for put in puts]
            self.note_delays(puts)
            for put in puts:
                labels = self.labels(names.SCHEDULE, self.named(destination_of(put.envelope)))
                self.instruments.add(names.SENT, 1, labels)
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()

    # --- deliveries -----------------------------------------------------------------------------------------

    def begin(self, held: ObservedClaim, lateness_ms: int) -> None:
        """Begin the span and the measurements of a handler's run."""
        lane = held.claim.record.envelope.lane
        measures = self._handlers.get(lane) or self._measures(lane)
        first_ms = None if held.claim.record.attempt else lateness_ms
        decided = self.tracing.decide(held.claim.record)
        if isinstance(decided, Context):
            held.attempt = measures.begin(decided, None, first_ms)
        else:
            context, span = self._begin_span(held.claim, decided, measures.destination, lateness_ms)
            held.attempt = measures.begin(context, span, first_ms)

    def _begin_span(
        self, claim: Claim, tracer: Tracer, destination: str, lateness_ms: int
    ) -> tuple[Context, Span | None]:
        """Begin the span of a handler's run. Return the context of the run, and the span if it is recorded."""
        context, links = self.tracing.origin(claim.record)
        span = self.tracing.start(
            names.PROCESS,
            destination,
            SpanKind.CONSUMER,
            attributes=lambda: {**_of_one(claim.record, lateness_ms), **_place(claim)},
            context=context,
            links=links,
            system=names.SYSTEM if claim.partition is None else names.KAFKA,
            tracer=tracer,
        )
        return set_span_in_context(span, context), span if span.is_recording() else None

    def _measures(self, lane: Lane) -> HandlerMeasures:
        destination = self.named(lane)
        labels, own_labels = self.labels(names.PROCESS, destination), self.of_ours(destination)
        made = self._handlers[lane] = HandlerMeasures(self.instruments, destination, labels, own_labels)
        return made

    async def send(
        self, sink: Sink, held: Sequence[ObservedClaim], deliveries: Sequence[Delivery]
    ) -> Sequence[SendOutcome]:
        """Send a batch in one span. The span has a link for each message. The messages carry the span's context."""
        destination = self.named(_common_destination(deliveries))
        system = getattr(sink, "system", names.SYSTEM)
        span = self._begin_batch(held, deliveries, destination, system)
        context = set_span_in_context(span, NOTHING)
        for each in held:
            each.attempt = Attempt(context)
        sampled = sampled_in(span, context)
        for delivery in deliveries:
            if delivery.attempt == 1:
                self.instruments.record(
                    names.DELIVERY_LATENESS, delivery.lateness_ms / 1000, self.of_ours(destination), sampled
                )
        carried = self.tracing.carried(span)
        if carried:
            deliveries = [
                structs.replace(each, envelope=structs.replace(each.envelope, trace=carried)) for each in deliveries
            ]
        labels, started_s, error = self.labels(names.DELIVER, destination, system), now_s(), ""
        try:
            with current_in(context):
                outcomes = await sink.send(deliveries)
            error = next(filter(None, map(_error_of, outcomes)), "")
            if len(deliveries) == 1 and isinstance(sent := next(iter(outcomes), None), Sent):
                span.set_attributes(_place(sent))
            if error:
                fail_as(span, error)
        except BaseException as raised:
            error = fail(span, raised)
            raise
        else:
            return outcomes
        finally:
            span.end()
            if error:
                labels = {**labels, names.ERROR_TYPE: error}
            self.instruments.add(names.SENT, len(deliveries), labels)
            self.instruments.record(names.OPERATION_DURATION, now_s() - started_s, labels, sampled)

    def _begin_batch(
        self, held: Sequence[ObservedClaim], deliveries: Sequence[Delivery], destination: str, system: str
    ) -> Span:
        records = [each.claim.record for each in held]
        context, _ = self.tracing.origin(records[0]) if len(records) == 1 else (NOTHING, None)

        def attributes() -> Attributes:
            if len(records) == 1:
                return _of_one(records[0], deliveries[0].lateness_ms)
            return {names.MESSAGE_COUNT: len(deliveries)}

        return self.tracing.start(
            names.DELIVER,
            destination,
            SpanKind.CLIENT,
            attributes=attributes,
            context=context,
            links=lambda: [link for record in records for link in self.tracing.origin(record)[1]()],
            system=system,
        )

    def settled(self, held: ObservedClaim, settlement: Settlement) -> Settlement:
        """Record the end of an attempt; return the settlement with the trace headers for the next attempt."""
        attempt, held.attempt = held.attempt, None
        if not isinstance(settlement, Done):
            record = held.claim.record
            self._given_up_or_back(record, attempt, settlement)
            if attempt is not None:
                trace = self.tracing.attempted(record.envelope.trace, attempt.context)
                settlement = structs.replace(settlement, trace=trace)
        if attempt is not None:
            attempt.end(settlement)
        return settlement

    def left(self, held: ObservedClaim) -> None:
        """Record the end of an attempt whose claim ends with its lease, without a settlement."""
        attempt, held.attempt = held.attempt, None
        if attempt is not None:
            attempt.end(None)

    def _given_up_or_back(self, record: Record, attempt: Attempt | None, settlement: Settlement) -> None:
        is_dead = isinstance(settlement, Dead)
        operation = names.DEAD_LETTER if is_dead else names.RELEASE
        reason = settlement.reason if isinstance(settlement, Dead) else _why_back(record, settlement)
        destination = self.named(destination_of(record.envelope))
        labels = {**self.of_ours(destination), names.REASON: reason}
        self.instruments.add(names.DEAD_LETTERED if is_dead else names.RELEASED, 1, labels)
        if attempt is None and not is_dead:  # no attempt was made, so there is no span to end
            return
        context, links = self.tracing.origin(record) if attempt is None else (attempt.context, no_links)
        self.tracing.start(
            operation,
            destination,
            SpanKind.CLIENT,
            attributes=lambda: {
                names.MESSAGE_ID: record.id,
                names.ATTEMPT: _attempt_of(settlement),
                names.REASON: reason,
            },
            context=context,
            links=links,
        ).end()

    # --- labels ---------------------------------------------------------------------------------------------

    def named(self, destination: str) -> str:
        """Return the name of a destination for span names and labels."""
        return self.instruments.destinations.of(destination) if destination else ""

    def labels(self, operation: str, destination: str = "", system: str = names.SYSTEM) -> Attributes:
        """Return the labels of the metrics that OpenTelemetry's conventions define."""
        key = operation, destination, system
        found = self._labels.get(key)
        if found is None:
            made = {names.MESSAGING_SYSTEM: system, names.OPERATION_NAME: operation, **self.base}
            found = self._labels[key] = {**made, names.DESTINATION: destination} if destination else made
        return found

    def of_ours(self, destination: str) -> Attributes:
        """Return the labels of the `aiodelay.*` metrics."""
        found = self._own_labels.get(destination)
        if found is None:
            found = self._own_labels[destination] = {**self.base, names.DESTINATION: destination}
            for reason in get_args(DeadReason):
                self.instruments.count(names.DEAD_LETTERED, {**found, names.REASON: reason})
        return found

    # --- observed metrics -------------------------------------------------------------------------------------

    def watch(self, loads: Callable[[], Iterable[tuple[Lane, int, int]]]) -> None:
        """Give values to observed metrics from now on.

        Args:
            loads: Returns each served lane with its numbers of messages in flight and requested.
        """
        self._loads = loads
        self.instruments.watch(self)

    def forget(self) -> None:
        """Stop giving values to observed metrics."""
        self.instruments.forget(self)

    async def look(self, tidied: Tidied) -> None:
        """Keep the results of housekeeping for observed metrics, and count the messages in the store.

        If the last count took long, the next counts are left out. So counting takes at most `COUNTING_PART` of the
        time.
        """
        self._tidied = tidied
        for lane in {*(lane for lane, _, _ in self._loads()), *(each.lane for each in tidied.lanes)}:
            self.of_ours(self.named(lane))
        started_s = now_s()
        if started_s < self._look_again_s:
            return
        try:
            self._counts = await self._store.counts()
            if isinstance(self._store, Bounded):
                self._fill = await self._store.fill()
            if isinstance(self._store, Lists):
                self._lengths = await self._store.lengths(self.instruments.destinations.known)
        except AiodelayError as error:
            log.debug("messages cannot be counted: %s", error)
        finally:  # also after a cancellation: housekeeping has a time limit, and its next step needs its time
            ended_s = now_s()
            self._look_again_s = ended_s + (ended_s - started_s) / COUNTING_PART

    def observe(self, metric: str) -> Iterable[tuple[float, Attributes]]:
        """Return the present values of a metric."""
        return self._observed[metric]()

    def _overdue(self) -> Iterable[tuple[float, Attributes]]:
        if self._tidied is None:
            return
        ages_ms = {lane: 0 for lane, _, _ in self._loads()}
        for each in self._tidied.lanes:
            ages_ms[each.lane] = 0 if each.oldest_due_ms is None else max(self._tidied.now_ms - each.oldest_due_ms, 0)
        for name, of_name in _by_name(ages_ms, self.named).items():
            yield max(of_name) / 1000, self.of_ours(name)

    def _served(self) -> Iterable[tuple[float, Attributes]]:
        served = {lane: True for lane, _, _ in self._loads()}
        if self._tidied is not None:
            served.update((each.lane, each.served) for each in self._tidied.lanes)
        for name, of_name in _by_name(served, self.named).items():
            yield float(all(of_name)), self.of_ours(name)

    def _messages(self) -> Iterable[tuple[float, Attributes]]:
        if self._counts is None:  # a 0 before the first count would make all dead letters look new
            return
        empty = {lane: LaneCounts() for lane, _, _ in self._loads()}
        for lane, counts in {**empty, **self._counts}.items():
            labels = self.of_ours(self.named(lane))
            yield from ((n, {**labels, names.STATE: state}) for state, n in _states(counts))

    def _partitions(self) -> Iterable[tuple[float, Attributes]]:
        if isinstance(self._store, Loads):
            yield self._store.status().of, self.base


def _by_name(values: Mapping[Lane, int], named: Callable[[Lane], str]) -> Mapping[str, Sequence[int]]:
    """Return the values of lanes by their names in labels. Of several values, the SDK would keep only the last one."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for lane, value in values.items():
        found[named(lane)].append(value)
    return found


def _of_one(record: Record, lateness_ms: int) -> Attributes:
    return {
        names.MESSAGE_ID: record.id,
        names.DELIVERY_TIMESTAMP: record.due_ms,
        names.ATTEMPT: record.attempt + 1,
        names.LATENESS: lateness_ms / 1000,
    }


def _place(of: Claim | Sent) -> Attributes:
    """Return the partition and the offset of a record, if they are known."""
    if of.partition is None or of.offset is None:
        return {}
    return {names.PARTITION: str(of.partition), names.KAFKA_OFFSET: of.offset}


def _common_destination(deliveries: Sequence[Delivery]) -> str:
    """Return the destination of a batch; only the name of the sink if the batch has several destinations."""
    found = {destination_of(each.envelope) for each in deliveries}
    return found.pop() if len(found) == 1 else deliveries[0].envelope.lane


def _error_of(outcome: SendOutcome) -> str:
    if isinstance(outcome, Sent):
        return ""
    return "not_taken" if isinstance(outcome, NotTaken) else "refused"


def _why_back(record: Record, settlement: Settlement) -> str:
    assert not isinstance(settlement, Done | Dead)
    if settlement.attempt > record.attempt:
        return "retry"
    if settlement.error is not None:
        return "not_taken"
    return "given_back" if settlement.due_ms == record.due_ms else "later"


def _attempt_of(settlement: Settlement) -> int:
    """Return the number of attempts so far."""
    return 0 if isinstance(settlement, Done) else settlement.attempt


def _states(counts: LaneCounts) -> Iterable[tuple[str, int]]:
    return (
        ("scheduled", counts.scheduled),
        ("overdue", counts.overdue),
        ("claimed", counts.in_flight),
        ("held", counts.held),
        ("dead", counts.dead),
    )
