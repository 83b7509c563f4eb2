"""`Observer`: measures one opening of a scheduler, with wrappers for the scheduler's store, sources and commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    SpanKind,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)

from aiodelay.core.values import DeadKey, Lane, Outcome
from aiodelay.core.version import __version__
from aiodelay.ports import DeadLetters, Feed, Loads, LocalFeed, Store, Transferring, Work
from aiodelay.ports.carrier import Carrier

from . import names
from .attempts import BatchRun
from .commands import ObservedCommands
from .instruments import Instruments, instruments_of
from .measurements import Measurements, ObservedClaim
from .settings import Telemetry
from .tracing import NOTHING, Tracing
from .work import ObservedFeed, ObservedLocalFeed, ObservedTransfer, ObservedWork

__all__ = ["Observer", "observer_of"]


class Observer(Measurements):
    """Observes one opening of a scheduler: `Measurements`, with wrappers for the commands, the store and the sources.

    A wrapper measures each call, and passes the call on.
    """

    def commands(self, commands: Carrier) -> Carrier:
        """Return a wrapper that observes commands: schedule, cancel, reschedule and fire."""
        return ObservedCommands(commands, self, create_spans=self._create_spans)

    async def redrive(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again. This call is not observed."""
        return await letters.redrive(keys)

    async def purge(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters. This call is not observed."""
        return await letters.purge(keys)

    @asynccontextmanager
    async def work(self, opening: AbstractAsyncContextManager[Work]) -> AsyncIterator[Work]:
        """Open the dispatching side of a store, and yield a wrapper that observes it."""
        async with AsyncExitStack() as stack:
            if isinstance(self._store, Loads):
                self._store.tell_restored(lambda s: self.instruments.record(names.RESTORE_DURATION, s, self.base))
                stack.callback(self._store.tell_restored, None)
            with self.apart(silent=True):
                work = await stack.enter_async_context(opening)
            yield ObservedWork(work, self, self._store)

    @asynccontextmanager
    async def feed(self, opening: AbstractAsyncContextManager[Feed], lane: Lane) -> AsyncIterator[Feed]:
        """Open the feed of a source, and yield a wrapper that observes it."""
        async with AsyncExitStack() as stack:
            with self.apart(silent=True):
                feed = await stack.enter_async_context(opening)
            if isinstance(feed, LocalFeed):
                yield ObservedLocalFeed(feed, self, self._store, lane)
            else:
                yield ObservedFeed(feed, self, self._store, lane)

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        """Return a wrapper that observes the transfer of one sink's messages."""
        return ObservedTransfer(moves, self, self._store, lane)

    def begin_batch(self, held: Sequence[ObservedClaim]) -> BatchRun:
        """Begin the span of a run of a handler of batches. It has a link to the span of each message."""
        contexts = [each.attempt.context for each in held if each.attempt is not None]
        spans = [get_current_span(context).get_span_context() for context in contexts]
        span = self.tracing.start(
            names.PROCESS,
            self.named(held[0].claim.record.envelope.lane),
            SpanKind.INTERNAL,
            attributes=lambda: {names.MESSAGE_COUNT: len(held)},
            context=NOTHING,
            links=lambda: [Link(each) for each in spans if each.is_valid],
        )
        return BatchRun(set_span_in_context(span, NOTHING), span)


def observer_of(telemetry: Telemetry, store: Store, namespace: str, places: Iterable[str]) -> Observer | None:
    """Return an observer; None if neither traces nor metrics have a provider.

    Args:
        telemetry: The settings.
        store: The store of the scheduler.
        namespace: The namespace of the scheduler.
        places: Known destinations. They get a label of their own before all other destinations.
    """
    tracers = telemetry.tracer_provider or trace.get_tracer_provider()
    meters = telemetry.meter_provider or metrics.get_meter_provider()
    has_tracing = telemetry.tracing and _is_configured(tracers)
    has_metrics = telemetry.metrics and _is_configured(meters)
    if not has_tracing and not has_metrics:
        return None
    tracer = (tracers if has_tracing else NoOpTracerProvider()).get_tracer(
        names.SCOPE, __version__, schema_url=names.SCHEMA
    )
    tracing = Tracing(tracer, continue_below_ms=telemetry.continue_below_ms, with_baggage=telemetry.propagate_baggage)
    instruments = instruments_of(meters) if has_metrics else Instruments(NoOpMeterProvider().get_meter(names.SCOPE))
    for place in places:
        instruments.destinations.of(place)
    return Observer(tracing, instruments, store, namespace, create_spans=telemetry.create_spans)


def _is_configured(provider: TracerProvider | MeterProvider) -> bool:
    """Return whether a provider does something. The providers of the OpenTelemetry API itself do nothing."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
