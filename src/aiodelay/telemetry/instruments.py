"""The instruments of a meter provider: made once, however many schedulers are open; observed ones ask them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation

from aiodelay.core.version import __version__

from .names import METRICS, OTHER, SCHEMA, SCOPE, Metric

__all__ = ["Attributes", "Cap", "Instruments", "Observed", "instruments_of", "now_s"]

Attributes: TypeAlias = Mapping[str, str | int | float]
"""What a point, or a span, is labelled with."""
MOST_DESTINATIONS = 200


class Observed(Protocol):
    """Who is asked when metrics are collected: from any thread."""

    def observe(self, metric: str) -> Iterable[tuple[float, Attributes]]:
        """Return the values of a metric now, none where it does not know them."""
        ...


class Cap:
    """Destinations are users' words: only so many of them become labels, and all others one."""

    def __init__(self, most: int = MOST_DESTINATIONS) -> None:
        self._most, self._known = most, dict[str, None]()

    def of(self, destination: str) -> str:
        """Return what a destination is called."""
        if destination in self._known:
            return destination
        if len(self._known) == self._most:
            return OTHER
        self._known[destination] = None
        return destination

    @property
    def known(self) -> Collection[str]:
        """Those that are labels."""
        return list(self._known)


class Instruments:
    """Counts, records, and asks those that are observed.

    Args:
        meter: Makes the instruments.
    """

    def __init__(self, meter: Meter) -> None:
        self.destinations: Cap = Cap()
        self._observed: tuple[Observed, ...] = ()  # replaced, not changed: read from other threads
        self._sums: dict[str, dict[tuple[tuple[str, str | int | float], ...], int]] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            self._make(meter, metric)

    def _make(self, meter: Meter, metric: Metric) -> None:
        name, kind, unit, description, buckets = metric
        if kind == "counter":
            self._sums[name] = {}
            meter.create_observable_counter(name, [self._summing(name)], unit, description)
        elif kind == "histogram":
            self._histograms[name] = meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=buckets
            )
        elif kind == "gauge":
            meter.create_observable_gauge(name, [self._callback(name)], unit, description)
        else:
            meter.create_observable_up_down_counter(name, [self._callback(name)], unit, description)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(value, attributes)
                for observed in self._observed
                for value, attributes in observed.observe(name)
            ]

        return observe

    def _summing(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(n, dict(attributes)) for attributes, n in list(self._sums[name].items())]

        return observe

    def add(self, metric: Metric, n: int, attributes: Attributes) -> None:
        """Count; told when metrics are collected, which costs a hundredth of telling the SDK each time."""
        sums, key = self._sums[metric.name], tuple(attributes.items())
        sums[key] = sums.get(key, 0) + n

    def start_at_zero(self, metric: Metric, attributes: Attributes) -> None:
        """Report a count before there is anything to count: rates need a value from before the first event."""
        self._sums[metric.name].setdefault(tuple(attributes.items()), 0)

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None:
        """Record a value in a histogram."""
        self._histograms[metric.name].record(value, attributes)

    def watch(self, observed: Observed) -> None:
        """Ask it from now on."""
        self._observed = (*self._observed, observed)

    def forget(self, observed: Observed) -> None:
        """Ask it no more."""
        self._observed = tuple(each for each in self._observed if each is not observed)


_made: WeakKeyDictionary[MeterProvider, Instruments] = WeakKeyDictionary()
_lock = Lock()


def instruments_of(provider: MeterProvider) -> Instruments:
    """Return the instruments of a provider: the same for all schedulers, as a second set would not be observed."""
    with _lock:
        if provider not in _made:
            _made[provider] = Instruments(provider.get_meter(SCOPE, __version__, SCHEMA))
        return _made[provider]


def now_s() -> float:
    """Return the loop's time, for durations."""
    loop = asyncio.get_running_loop()
    return loop.time()
