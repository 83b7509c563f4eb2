"""`Observer`: takes what the engine tells of one opening of a scheduler, and wraps its store, sources and commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider, TracerProvider

from aiodelay.core.values import Lane
from aiodelay.core.version import __version__
from aiodelay.ports import Feed, Loads, Store, Transferring, Work

from . import names
from .commands import Carrier, ObservedCommands
from .instruments import Instruments, instruments_of
from .measurements import Measurements
from .settings import Telemetry
from .tracing import Tracing
from .work import ObservedFeed, ObservedTransfer, ObservedWork

__all__ = ["Observer", "observer_of"]


class Observer(Measurements):
    """Observes one opening of a scheduler: its measurements, and wrappers that make them."""

    def commands(self, commands: Carrier) -> Carrier:
        """Observe what is scheduled, cancelled, rescheduled and fired."""
        return ObservedCommands(commands, self, create_spans=self._create_spans)

    @asynccontextmanager
    async def work(self, opening: AbstractAsyncContextManager[Work]) -> AsyncIterator[Work]:
        """Observe a store's dispatching side from its opening on."""
        async with AsyncExitStack() as stack:
            if isinstance(self._store, Loads):
                self._store.tell_restored(lambda s: self.instruments.record(names.RESTORE_DURATION, s, self.base))
                stack.callback(self._store.tell_restored, None)
            with self.apart(silent=True):
                work = await stack.enter_async_context(opening)
            yield ObservedWork(work, self, self._store)

    @asynccontextmanager
    async def feed(self, opening: AbstractAsyncContextManager[Feed], lane: Lane) -> AsyncIterator[Feed]:
        """Observe a source's feed from its opening on."""
        async with AsyncExitStack() as stack:
            with self.apart(silent=True):
                feed = await stack.enter_async_context(opening)
            yield ObservedFeed(feed, self, self._store, lane)

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        """Observe a store's moving of one sink's messages."""
        return ObservedTransfer(moves, self, self._store, lane)


def observer_of(telemetry: Telemetry, store: Store, namespace: str, places: Iterable[str]) -> Observer | None:
    """Return an observer, None where nobody would see anything.

    Args:
        telemetry: How to observe.
        store: The scheduler's.
        namespace: The scheduler's.
        places: Destinations that are known already.
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
    """Say whether a provider is anybody's but the API's own, which do nothing."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
