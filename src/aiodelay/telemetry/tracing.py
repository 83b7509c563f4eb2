"""`Tracing`: makes spans with their names and links, and stores their context with messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from opentelemetry import context as contexts
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from aiodelay.core.values import ATTEMPTED, CONTINUED, NO_TRACE, Envelope, Record

from . import names
from .instruments import Attributes

__all__ = ["NOTHING", "QUIET", "Tracing", "current_in", "destination_of", "fail", "fail_as"]

NOTHING = Context()
NO_ATTRIBUTES: Attributes = {}
_SUPPRESS = getattr(contexts, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")
"""The key that client instrumentation checks. OpenTelemetry has no public name for it."""
QUIET = Context({_SUPPRESS: True})
"""A context in which client instrumentation makes no spans. So traces do not contain the polls of an idle process."""


@contextmanager
def current_in(context: Context) -> Iterator[None]:
    """Make a context the current context until the block ends."""
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def destination_of(envelope: Envelope) -> str:
    """Return the destination of a message: `kafka:orders`, or the event type of a handler."""
    return f"{envelope.lane}:{envelope.address}" if envelope.address else envelope.lane


def fail(span: Span, error: BaseException) -> str:
    """Mark a span as failed by an exception; return the type of the error."""
    with suppress(Exception):  # to show a user's exception may itself raise an error
        span.record_exception(error)
    return fail_as(span, type(error).__qualname__)


def fail_as(span: Span, kind: str) -> str:
    """Mark a span as failed without an exception; return the kind of the failure."""
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, kind))
    return kind


class Tracing:
    """Begins spans, and converts their context to and from the trace headers of messages.

    Args:
        tracer: The tracer that makes the spans.
        continue_below_ms: The delay below which a delivery continues the trace of the schedule call.
        with_baggage: Whether baggage is stored with a message.
    """

    def __init__(self, tracer: Tracer, *, continue_below_ms: int, with_baggage: bool) -> None:
        self._tracer = tracer
        self.is_on: bool = not isinstance(tracer, NoOpTracer)
        self._continue_below_ms, self._with_baggage = continue_below_ms, with_baggage

    def start(
        self,
        operation: str,
        destination: str,
        kind: SpanKind,
        *,
        attributes: Attributes,
        context: Context | None = None,
        links: Sequence[Link] = (),
        system: str = names.SYSTEM,
        start_ns: int | None = None,
    ) -> Span:
        """Begin a span. All attributes are set at the start, so that samplers see them.

        Args:
            operation: The name of the operation.
            destination: The name of the destination, from a limited set of names; "" if the destination is not known.
            kind: The kind of the span.
            attributes: Further attributes.
            context: The context of the parent; None = the current context.
            links: Links to other spans.
            system: The messaging system.
            start_ns: The start time, epoch ns; None = now.
        """
        said = {names.MESSAGING_SYSTEM: system, names.OPERATION_NAME: operation, **attributes}
        if operation in names.TYPES:
            said[names.OPERATION_TYPE] = names.TYPES[operation]
        if destination:
            said[names.DESTINATION] = destination
        name = f"{operation} {destination}" if destination else operation
        return self._tracer.start_span(name, context, kind, said, links, start_ns)

    # --- trace headers of messages --------------------------------------------------------------------------

    def carried(self, span: Span, *, ahead_ms: int | None = None) -> Mapping[str, str]:
        """Return the trace headers to store with a scheduled message, or to send with a delivered one.

        Args:
            span: The span that schedules or delivers the message.
            ahead_ms: The ms until the message is due; None for a delivery, and for a recurring message.
        """
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(span, None if self._with_baggage else NOTHING))
        if carrier and ahead_ms is not None and ahead_ms < self._continue_below_ms:
            carrier[CONTINUED] = "1"
        return carrier or NO_TRACE

    def origin(self, record: Record) -> tuple[Context, Sequence[Link]]:
        """Return the context and the links of a delivery's span, from the trace headers of the message.

        If the delivery continues the trace, the context has the schedule span as parent. Otherwise the delivery begins
        a new trace, and the first link leads to the schedule span. If there was a previous attempt, a link to the span
        of that attempt follows.
        """
        trace = record.envelope.trace
        if not trace:
            return NOTHING, ()
        before = {name.removeprefix(ATTEMPTED): text for name, text in trace.items() if name.startswith(ATTEMPTED)}
        links: Sequence[Link] = ()
        if before:
            links = _links_to(propagate.extract(before, NOTHING), record.id, {names.ATTEMPT: record.attempt})
        context = propagate.extract(trace, NOTHING)
        creation = _links_to(context, record.id)
        if creation and CONTINUED in trace:
            return context, links
        return _without_span(context), (*creation, *links)

    @staticmethod
    def creation(message_id: str, trace: Mapping[str, str]) -> Sequence[Link]:
        """Return the link to the span that scheduled a message; empty if the trace headers name no span."""
        return _links_to(propagate.extract(trace, NOTHING), message_id)

    def attempted(self, trace: Mapping[str, str], context: Context) -> Mapping[str, str]:
        """Return the trace headers to store with a message after an attempt.

        Args:
            trace: The trace headers stored so far.
            context: The context of the attempt's span.
        """
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(get_current_span(context), NOTHING))
        kept = {name: text for name, text in trace.items() if not name.startswith(ATTEMPTED)}
        return kept | {f"{ATTEMPTED}{name}": text for name, text in carrier.items()}

    @staticmethod
    def given_in(headers: Mapping[str, bytes]) -> Sequence[Link]:
        """Return the link to the span that the headers of a message name; empty if they name no span."""
        if not headers:
            return ()
        texts = {name.lower(): value.decode(errors="replace") for name, value in headers.items()}
        found = get_current_span(propagate.extract(texts, NOTHING)).get_span_context()
        return (Link(found),) if found.is_valid else ()


def _links_to(context: Context, message_id: str, more: Attributes = NO_ATTRIBUTES) -> Sequence[Link]:
    """Return the link to the span of a context; empty if the context has no valid span."""
    found = get_current_span(context).get_span_context()
    return (Link(found, {names.MESSAGE_ID: message_id, **more}),) if found.is_valid else ()


def _without_span(context: Context) -> Context:
    """Return a context without its span. The baggage stays."""
    span = get_current_span(context)
    return Context({key: value for key, value in context.items() if value is not span})
