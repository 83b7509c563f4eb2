"""Spans: how they are named, what they are linked to, and how their context goes with a message."""

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
"""What clients' instrumentation looks for; it has no public name."""
QUIET = Context({_SUPPRESS: True})
"""In it clients' instrumentation makes no spans: an idle process is not news."""


@contextmanager
def current_in(context: Context) -> Iterator[None]:
    """Have a context be the current one for the length of a block."""
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def destination_of(envelope: Envelope) -> str:
    """Return where a message goes: `kafka:orders`, or the event type of a handler."""
    return f"{envelope.lane}:{envelope.address}" if envelope.address else envelope.lane


def fail(span: Span, error: BaseException) -> str:
    """Say on a span that what it stands for failed; return the error's type."""
    with suppress(Exception):  # whatever a user's exception raises when it is shown
        span.record_exception(error)
    return fail_as(span, type(error).__qualname__)


def fail_as(span: Span, kind: str) -> str:
    """Say on a span that what it stands for failed, where there is no exception; return the kind."""
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, kind))
    return kind


class Tracing:
    """Begins spans and carries their context.

    Args:
        tracer: Makes spans.
        continue_below_ms: What is due sooner goes on in its trace.
        with_baggage: Whether baggage goes with a message.
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
        """Begin a span; samplers see all that is said here.

        Args:
            operation: What is done.
            destination: Where to, low-cardinality; "" if that is not known.
            kind: Its kind.
            attributes: Further ones.
            context: Of its parent; None = the current one.
            links: To other spans.
            system: Which messaging system.
            start_ns: When it began, epoch ns; None = now.
        """
        said = {names.MESSAGING_SYSTEM: system, names.OPERATION_NAME: operation, **attributes}
        if operation in names.TYPES:
            said[names.OPERATION_TYPE] = names.TYPES[operation]
        if destination:
            said[names.DESTINATION] = destination
        name = f"{operation} {destination}" if destination else operation
        return self._tracer.start_span(name, context, kind, said, links, start_ns)

    # --- what goes with a message ---------------------------------------------------------------------------

    def carried(self, span: Span, *, ahead_ms: int | None = None) -> Mapping[str, str]:
        """Return what is kept with a message of the span that scheduled it, or goes out of that which delivers it.

        Args:
            span: That one.
            ahead_ms: How long until the message is due; None where it is delivered, or recurs.
        """
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(span, None if self._with_baggage else NOTHING))
        if carrier and ahead_ms is not None and ahead_ms < self._continue_below_ms:
            carrier[CONTINUED] = "1"
        return carrier or NO_TRACE

    def origin(self, record: Record) -> tuple[Context, Sequence[Link]]:
        """Return the context in which a message is delivered, and links: to what scheduled it, and the attempt before.

        A message that goes on in its trace has a parent; any other begins a trace of its own, and has the first link.
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
        """Return the link to the span that scheduled a message, if its trace holds one."""
        return _links_to(propagate.extract(trace, NOTHING), message_id)

    def attempted(self, trace: Mapping[str, str], context: Context) -> Mapping[str, str]:
        """Return what is kept with a message after an attempt.

        Args:
            trace: What was kept with it.
            context: That of the attempt's span.
        """
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(get_current_span(context), NOTHING))
        kept = {name: text for name, text in trace.items() if not name.startswith(ATTEMPTED)}
        return kept | {f"{ATTEMPTED}{name}": text for name, text in carrier.items()}

    @staticmethod
    def given_in(headers: Mapping[str, bytes]) -> Sequence[Link]:
        """Return the link to the span whose context a caller's headers hold, if they hold one."""
        if not headers:
            return ()
        texts = {name.lower(): value.decode(errors="replace") for name, value in headers.items()}
        found = get_current_span(propagate.extract(texts, NOTHING)).get_span_context()
        return (Link(found),) if found.is_valid else ()


def _links_to(context: Context, message_id: str, more: Attributes = NO_ATTRIBUTES) -> Sequence[Link]:
    """Return the link to a context's span, if it has one."""
    found = get_current_span(context).get_span_context()
    return (Link(found, {names.MESSAGE_ID: message_id, **more}),) if found.is_valid else ()


def _without_span(context: Context) -> Context:
    """Return a context with all but its span: with the baggage."""
    span = get_current_span(context)
    return Context({key: value for key, value in context.items() if value is not span})
