"""`Tracing`: makes spans with their names and links, and stores their context with messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from opentelemetry import context as contexts
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
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
from .sdk_sampling import UnsampledSpan, root_sampling_of

__all__ = [
    "NOTHING",
    "QUIET",
    "Tracing",
    "context_of",
    "current_in",
    "destination_of",
    "fail",
    "fail_as",
    "no_links",
    "sampled_in",
]

NOTHING = Context()
(_SPAN,) = set_span_in_context(INVALID_SPAN, NOTHING)
"""The key of the span in a context. OpenTelemetry has no public name for it."""
NO_ATTRIBUTES: Attributes = {}
_SUPPRESS = getattr(contexts, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")
"""The key that client instrumentation checks. OpenTelemetry has no public name for it."""
QUIET = Context({_SUPPRESS: True})
"""A context in which client instrumentation makes no spans. So traces do not contain the polls of an idle process."""


TRACE_PARENT = "traceparent"
"""The header of W3C Trace Context. From this header alone, a propagator reads a span and nothing else."""


def no_links() -> Sequence[Link]:
    """Return no links, for spans that have none."""
    return ()


@contextmanager
def current_in(context: Context) -> Iterator[None]:
    """Make a context the current context until the block ends."""
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def context_of(span: Span) -> Context:
    """Return a context that has only this span. It takes half the time of `set_span_in_context`."""
    return Context({_SPAN: span})


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


def sampled_in(span: Span, context: Context) -> Context | None:
    """Return the context of a span if the span is sampled; None if it is not."""
    return context if span.get_span_context().trace_flags.sampled else None


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
        self._roots = root_sampling_of(tracer)
        self._continue_below_ms, self._with_baggage = continue_below_ms, with_baggage
        self._heads: dict[tuple[str, str, str], tuple[str, Attributes]] = {}  # bounded, as destinations are limited

    def start(
        self,
        operation: str,
        destination: str,
        kind: SpanKind,
        *,
        attributes: Callable[[], Attributes],
        context: Context | None = None,
        links: Callable[[], Sequence[Link]] = no_links,
        system: str = names.SYSTEM,
        start_ns: int | None = None,
        tracer: Tracer | None = None,
    ) -> Span:
        """Begin a span. All attributes and links are set at the start, so that samplers see them.

        Args:
            operation: The name of the operation.
            destination: The name of the destination, from a limited set of names; "" if the destination is not known.
            kind: The kind of the span.
            attributes: Makes further attributes. Not called if a sampler that needs no attributes drops the span.
            context: The context of the parent; None = the current context; `NOTHING` = the span begins a trace.
            links: Makes links to other spans, like `attributes`.
            system: The messaging system.
            start_ns: The start time, epoch ns; None = now.
            tracer: The tracer that `decide` has returned; None if nothing is decided yet.
        """
        if not self.is_on:
            return self._tracer.start_span(name=operation, context=context)  # the caller's span, to hand it on
        if tracer is None:
            decided = self._tracer if self._roots is None or context is not NOTHING else self._roots.decide()
            if type(decided) is UnsampledSpan:
                return decided
            tracer = decided
        head = operation, destination, system
        name, said = self._heads.get(head) or self._head(*head)
        return tracer.start_span(name, context, kind, {**said, **attributes()}, links(), start_ns)

    def decide(self, record: Record) -> Tracer | Context:
        """Decide whether a delivery has a recorded span, if that does not depend on the span's attributes and links.

        Returns:
            The context of the delivery, if it has no recorded span. Otherwise the tracer that has to start the span.
        """
        if not self.is_on:
            return self.origin(record)[0] if record.envelope.trace else NOTHING
        if self._roots is None or not _begins_trace(record.envelope.trace):
            return self._tracer
        decided = self._roots.decide()
        return Context({_SPAN: decided}) if type(decided) is UnsampledSpan else decided

    def _head(self, operation: str, destination: str, system: str) -> tuple[str, Attributes]:
        """Return the name and the attributes that spans with this operation and destination share."""
        said = {names.MESSAGING_SYSTEM: system, names.OPERATION_NAME: operation}
        if operation in names.TYPES:
            said[names.OPERATION_TYPE] = names.TYPES[operation]
        if destination:
            said[names.DESTINATION] = destination
        name = f"{operation} {destination}" if destination else operation
        made = self._heads[operation, destination, system] = name, said
        return made

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

    @staticmethod
    def origin(record: Record) -> tuple[Context, Callable[[], Sequence[Link]]]:
        """Return the context of a delivery's span, and what makes its links, from the trace headers of the message.

        If the delivery continues the trace, the context has the schedule span as parent. Otherwise the delivery begins
        a new trace, and the first link leads to the schedule span. If there was a previous attempt, a link to the span
        of that attempt follows.
        """
        trace = record.envelope.trace
        if _begins_trace(trace):
            return NOTHING, partial(_links_of, record)
        context = propagate.extract(trace, NOTHING)
        if CONTINUED in trace and get_current_span(context).get_span_context().is_valid:
            return context, partial(_links_to_attempt, record)
        return _without_span(context), partial(_links_of, record)

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


def _begins_trace(trace: Mapping[str, str]) -> bool:
    """Return whether the trace headers of a message tell nothing about the context of its delivery."""
    return not trace or (len(trace) == 1 and TRACE_PARENT in trace)


def _links_of(record: Record) -> Sequence[Link]:
    """Return the links to the span that scheduled a message, and to the span of its previous attempt."""
    creation = _links_to(propagate.extract(record.envelope.trace, NOTHING), record.id)
    return (*creation, *_links_to_attempt(record))


def _links_to_attempt(record: Record) -> Sequence[Link]:
    """Return the link to the span of the previous attempt; empty for a first attempt."""
    trace = record.envelope.trace
    before = {name.removeprefix(ATTEMPTED): text for name, text in trace.items() if name.startswith(ATTEMPTED)}
    return _links_to(propagate.extract(before, NOTHING), record.id, {names.ATTEMPT: record.attempt}) if before else ()


def _without_span(context: Context) -> Context:
    """Return a context without its span. The baggage stays."""
    span = get_current_span(context)
    return Context({key: value for key, value in context.items() if value is not span})
