"""The instruments of a meter provider, made once for each provider.

Gauges and up-down counters ask all open schedulers for values when metrics are collected.
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, NoOpMeter, Observation

from aiodelay.core.version import __version__

from .histogram_values import HistogramValues
from .names import METRICS, OTHER, SCHEMA, SCOPE, Metric

__all__ = ["Attributes", "Cap", "Count", "Instruments", "Observed", "instruments_of", "loop_clock", "now_s"]

Attributes: TypeAlias = Mapping[str, str | int | float]
"""The attributes of a data point or of a span."""
_Key: TypeAlias = tuple[tuple[str, str | int | float], ...]
"""The attributes of a data point, as the key of a dict."""
MOST_DESTINATIONS = 200


class Observed(Protocol):
    """An object that gives metric values when metrics are collected. Any thread may call the object."""

    def observe(self, metric: str) -> Iterable[tuple[float, Attributes]]:
        """Return the present values of a metric; empty if they are not known."""
        ...


class Cap:
    """Limits the number of destination labels. Users choose destinations, so their number has no limit.

    The first `most` destinations get their own label. All further destinations share the label `_OTHER`.
    """

    def __init__(self, most: int = MOST_DESTINATIONS) -> None:
        self._most, self._known = most, dict[str, None]()

    def of(self, destination: str) -> str:
        """Return the label of a destination."""
        if destination in self._known:
            return destination
        if len(self._known) == self._most:
            return OTHER
        self._known[destination] = None
        return destination

    @property
    def known(self) -> Collection[str]:
        """The destinations that have their own label."""
        return list(self._known)


class Count:
    """The sum of one counter with one set of labels. The SDK reads it when it collects.

    Adding to it costs a thirtieth of the time of a call to the SDK.
    """

    __slots__ = ("_lock", "n")

    def __init__(self) -> None:
        self.n: int = 0
        self._lock = Lock()

    def add(self, n: int) -> None:
        """Add to the sum. Any thread may call this: schedulers of several event loops share a counter."""
        with self._lock:  # Race: without it, an addition of another thread could be lost.
            self.n += n


class Instruments:
    """All instruments of one meter: counters, histograms, and gauges that ask observed objects.

    Args:
        meter: The meter that makes the instruments.
    """

    def __init__(self, meter: Meter) -> None:
        self.destinations: Cap = Cap()
        self.is_on: bool = not isinstance(meter, NoOpMeter)
        self._lock = Lock()
        self._observed: tuple[Observed, ...] = ()  # replaced and never changed, because other threads read it
        self._counts: dict[str, dict[_Key, Count]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._values: dict[tuple[str, _Key], HistogramValues] = {}
        for metric in METRICS:
            self._make(meter, metric)

    def _make(self, meter: Meter, metric: Metric) -> None:
        name, kind, unit, description, buckets = metric
        if kind == "counter":
            self._counts[name] = {}
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
            self._hand_over()  # the SDK calls the counters of a collection before it reads the histograms
            return [Observation(count.n, dict(attributes)) for attributes, count in list(self._counts[name].items())]

        return observe

    def _hand_over(self) -> None:
        for values in list(self._values.values()):
            values.hand_over()

    def count(self, metric: Metric, attributes: Attributes) -> Count:
        """Return the sum of a counter. It is reported from now on, as 0 before the first event.

        Without this 0, a rate would miss the first event.
        """
        counts, key = self._counts[metric.name], tuple(attributes.items())
        return counts.get(key) or counts.setdefault(key, Count())

    def add(self, metric: Metric, n: int, attributes: Attributes) -> None:
        """Add to a counter."""
        self.count(metric, attributes).add(n)

    def values(self, metric: Metric, attributes: Attributes) -> HistogramValues:
        """Return the values of a histogram with these labels."""
        key = metric.name, tuple(attributes.items())
        return self._values.get(key) or self._values.setdefault(
            key, HistogramValues(self._histograms[metric.name], attributes)
        )

    def record(self, metric: Metric, value: float, attributes: Attributes, sampled_in: Context | None = None) -> None:
        """Record a value in a histogram.

        Args:
            metric: The histogram.
            value: The value.
            attributes: The labels of the value.
            sampled_in: The context of the span that the value belongs to, if the span is sampled.
        """
        self.values(metric, attributes).add(value, sampled_in)

    def watch(self, observed: Observed) -> None:
        """Ask an object for values from now on. Any thread may call this."""
        with self._lock:  # Race: schedulers of several event loops may open and close at the same time.
            self._observed = (*self._observed, observed)

    def forget(self, observed: Observed) -> None:
        """Stop asking an object for values. Any thread may call this."""
        with self._lock:
            self._observed = tuple(each for each in self._observed if each is not observed)


_made: WeakKeyDictionary[MeterProvider, Instruments] = WeakKeyDictionary()
_lock = Lock()


def instruments_of(provider: MeterProvider) -> Instruments:
    """Return the instruments of a provider. All schedulers share them: the SDK would not observe a second set."""
    with _lock:
        if provider not in _made:
            _made[provider] = Instruments(provider.get_meter(SCOPE, __version__, SCHEMA))
        return _made[provider]


def now_s() -> float:
    """Return the time of the event loop in seconds, to measure durations."""
    loop = get_running_loop()
    return loop.time()


def loop_clock() -> Callable[[], float]:
    """Return the clock of the event loop. To call this clock takes half the time of `now_s`."""
    return get_running_loop().time
