"""`HistogramValues`: the values of one histogram with one set of labels, handed over to OpenTelemetry in batches."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram

from .sdk_histograms import SdkHistogram, can_add_many

__all__ = ["HistogramValues"]

MOST_WAITING = 500
"""The number of values that are handed over together, at the latest."""
NO_SPAN = Context({"aiodelay.batch": True})
"""A context without a span: the span that is current when a batch is handed over has nothing to do with its values. The
context is not empty, because the SDK takes the current context instead of an empty one."""


class HistogramValues:
    """Values of one histogram with one set of labels.

    The SDK takes half the time of a delivery to record one value. So the values of a histogram of the SDK wait here
    until there are `MOST_WAITING`, or until a reader collects metrics. If the histogram is not the SDK's, or if the SDK
    has to take its values one at a time, nothing waits.

    Args:
        histogram: The histogram that gets the values.
        labels: The labels of the values.
    """

    __slots__ = ("_histogram", "_labels", "_lock", "_sdk", "_waiting", "_waits")

    def __init__(self, histogram: Histogram, labels: Mapping[str, str | int | float]) -> None:
        self._histogram, self._labels = histogram, labels
        self._sdk = SdkHistogram(histogram, labels)
        self._waits: bool = can_add_many(histogram)
        self._waiting: list[float] = []
        self._lock = Lock()

    def add(self, value: float, sampled_in: Context | None = None) -> None:
        """Record a value.

        Args:
            value: The value.
            sampled_in: The context of the span that the value belongs to, if the span is sampled. Such a value does not
                wait, because the SDK may keep it as an exemplar, with the ids of the span.
        """
        if self._waits and sampled_in is None:
            self._waiting.append(value)
            if len(self._waiting) >= MOST_WAITING:
                self.hand_over()
        else:
            self._histogram.record(value, self._labels, sampled_in)

    def hand_over(self) -> None:
        """Hand the waiting values over. Any thread may call this, while another thread adds values."""
        with self._lock:
            n = len(self._waiting)
            values = self._waiting[:n]
            del self._waiting[:n]  # values that another thread has added meanwhile stay
            if not values:
                return
            self._histogram.record(values.pop(), self._labels, NO_SPAN)
            if values and not self._sdk.add_many(values):
                self._waits = False
                for value in values:
                    self._histogram.record(value, self._labels, NO_SPAN)
