"""`ObservedCommands`: observes each call of a command in a span. Scheduled messages carry the context of that span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from opentelemetry.trace import Link, Span, SpanKind, set_span_in_context

from aiodelay.core.values import After, Cancel, Command, Fire, Put, Refused, Reschedule, Stored
from aiodelay.errors import AiodelayError
from aiodelay.ports.carrier import Carrier

from . import names
from .instruments import Attributes, now_s
from .measurements import Measurements
from .tracing import current_in, destination_of, fail, sampled_in

__all__ = ["ObservedCommands"]

_OPERATIONS: dict[type[Command], str] = {
    Cancel: names.CANCEL,
    Reschedule: names.RESCHEDULE,
    Fire: names.FIRE,
}


class ObservedCommands:
    """Carries commands out, and measures each call.

    Args:
        commands: The object that carries the commands out.
        observer: The measurements that get the spans and counts.
        create_spans: Whether each message of a batch gets its own span.
    """

    def __init__(self, commands: Carrier, observer: Measurements, *, create_spans: bool) -> None:
        self._commands, self._observer, self._create_spans = commands, observer, create_spans

    async def carry_out(self, command: Command, size: int) -> Stored | Refused:
        """Carry out one command in a span."""
        if isinstance(command, Put):
            answer = await self._schedule(command, size)
        else:
            answer = await self._change(command)
        return answer

    async def _schedule(self, put: Put, size: int) -> Stored | Refused:
        observer, envelope = self._observer, put.envelope
        destination = observer.named(destination_of(envelope))
        attributes: dict[str, str | int | float] = {names.MESSAGE_ID: put.id}
        if not isinstance(put.due, After):
            attributes[names.DELIVERY_TIMESTAMP] = put.due.ms
        span = observer.tracing.start(
            names.SCHEDULE,
            destination,
            SpanKind.PRODUCER,
            attributes=lambda: attributes,
            links=lambda: observer.tracing.given_in(envelope.headers),
        )
        with _Call(observer, span, observer.labels(names.SCHEDULE, destination)) as call, current_in(call.context):
            answer = await self._commands.carry_out(self._observer.carrying(put, span), size)
            if isinstance(put.due, After) and isinstance(answer, Stored):
                span.set_attribute(names.DELIVERY_TIMESTAMP, answer.due_ms)
            call.sent = 1
            self._observer.note_delays([put])
            return answer

    async def _change(self, command: Command) -> Stored | Refused:
        observer, operation = self._observer, _OPERATIONS[type(command)]
        span = observer.tracing.start(operation, "", SpanKind.CLIENT, attributes=lambda: {names.MESSAGE_ID: command.id})
        with _Call(observer, span, observer.labels(operation)) as call, current_in(call.context):
            answer = await self._commands.carry_out(command, 0)
            if isinstance(command, Cancel):
                outcome = answer.answer if isinstance(answer, Stored) else answer.reason
                span.set_attribute(names.CANCEL_OUTCOME, outcome)
                observer.instruments.add(names.CANCELLATIONS, 1, {**observer.base, names.CANCEL_OUTCOME: outcome})
            return answer

    async def carry_out_many(
        self, commands: Sequence[Command], size: int
    ) -> Sequence[Stored | Refused | AiodelayError]:
        """Carry out a batch in one span. Each message of the batch carries the context of the span.

        A batch with a cancel comes from the service's health check. Such a batch is not observed.
        """
        observer, puts = self._observer, [each for each in commands if isinstance(each, Put)]
        if len(puts) < len(commands):
            return await self._commands.carry_out_many(commands, size)
        destinations = {destination_of(each.envelope) for each in puts}
        destination = observer.named(destinations.pop()) if len(destinations) == 1 else ""
        links: list[Link] = []
        if self._create_spans:
            puts = [self._created(put, links) for put in puts]
        span = observer.tracing.start(
            names.SCHEDULE,
            destination,
            SpanKind.CLIENT if self._create_spans else SpanKind.PRODUCER,
            attributes=lambda: {names.MESSAGE_COUNT: len(puts)},
            links=lambda: links,
        )
        if not self._create_spans:
            puts = [self._observer.carrying(put, span) for put in puts]
        with _Call(observer, span, observer.labels(names.SCHEDULE, destination)) as call, current_in(call.context):
            answers = await self._commands.carry_out_many(puts, size)
            errors = [each for each in answers if isinstance(each, AiodelayError)]
            if errors:
                call.failed(errors[0])
            call.sent = len(answers)
            self._observer.note_delays(puts)
            return answers

    def _created(self, put: Put, links: list[Link]) -> Put:
        observer = self._observer
        span = observer.tracing.start(
            names.CREATE,
            observer.named(destination_of(put.envelope)),
            SpanKind.PRODUCER,
            attributes=lambda: {names.MESSAGE_ID: put.id},
            links=lambda: observer.tracing.given_in(put.envelope.headers),
        )
        span.end()
        links.append(Link(span.get_span_context(), {names.MESSAGE_ID: put.id}))
        return self._observer.carrying(put, span)


class _Call:
    """One call: its span, its duration, and the number of messages sent."""

    def __init__(self, observer: Measurements, span: Span, labels: Attributes) -> None:
        self._observer, self._span, self._labels, self.sent = observer, span, labels, 0
        self.context = set_span_in_context(span)

    def __enter__(self) -> Self:
        self._started_s = now_s()
        return self

    def failed(self, error: BaseException) -> None:
        self._labels = {**self._labels, names.ERROR_TYPE: fail(self._span, error)}

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.failed(error)
        if self.sent:
            self._observer.instruments.add(names.SENT, self.sent, self._labels)
        took_s = now_s() - self._started_s
        sampled = sampled_in(self._span, self.context)
        self._observer.instruments.record(names.OPERATION_DURATION, took_s, self._labels, sampled)
        self._span.end()
