"""`SdkHistogram`: adds many values at once to a histogram of OpenTelemetry's SDK, which itself takes one at a time.

The SDK has no public way to do so, so this module uses private names of the SDK. No other module does. `can_add_many`
first tries these names on a provider of its own. If its exported histogram is wrong, aiodelay records each value alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from opentelemetry.metrics import Histogram

__all__ = ["SdkHistogram", "can_add_many"]


class SdkHistogram:
    """One histogram of the SDK with one set of labels.

    Args:
        histogram: A histogram for which `can_add_many` is true.
        labels: The labels of the values.
    """

    def __init__(self, histogram: Histogram, labels: Mapping[str, str | int | float]) -> None:
        self._histogram: Any = histogram
        self._labels = labels
        self._storages: object = None  # one storage for each reader; the SDK replaces them when readers are added
        self._aggregations: list[Any] = []

    def add_many(self, values: Sequence[float]) -> bool:
        """Add values for all readers of the provider. Return False if the SDK has to take these values one at a time.

        Before the first call, the SDK must have recorded one value with these labels. This value makes the
        aggregations, and follows the user's views.
        """
        storages = self._histogram._measurement_consumer._reader_storages
        if storages is not self._storages:
            found = self._found(storages.values())
            if found is None:
                return False
            self._storages, self._aggregations = storages, found
        ordered = sorted(values)
        for aggregation in self._aggregations:
            _add(aggregation, ordered)
        return True

    def _found(self, storages: Sequence[Any]) -> list[Any] | None:
        """Return the aggregations of these labels; None if one is missing, or if one has no buckets with fixed bounds.

        A view may drop the histogram, or some of its labels. Other views make exponential histograms.
        """
        from opentelemetry.sdk.metrics._internal import aggregation as sdk  # noqa: PLC0415 - the SDK may be missing

        found = []
        for storage in storages:
            for match in storage._instrument_view_instrument_matches.get(self._histogram) or [None]:
                aggregation = match and self._of_labels(match)
                if isinstance(aggregation, sdk._DropAggregation):
                    continue
                if type(aggregation) is not sdk._ExplicitBucketHistogramAggregation:
                    return None
                found.append(aggregation)
        return found

    def _of_labels(self, match: Any) -> object:  # noqa: ANN401 - private to the SDK
        kept = match._view._attribute_keys
        labels = {name: value for name, value in self._labels.items() if kept is None or name in kept}
        aggregations = list(match._attributes_aggregation.values())
        return next((each for each in aggregations if dict(each._attributes) == labels), None)


def _add(aggregation: Any, ordered: Sequence[float]) -> None:  # noqa: ANN401 - private to the SDK
    """Add values, in ascending order, to the buckets of one aggregation. A bound belongs to the bucket below it."""
    ends = [bisect_right(ordered, bound) for bound in aggregation._boundaries]
    counts = [end - start for start, end in pairwise([0, *ends, len(ordered)])]
    with aggregation._lock:
        before = aggregation._value or aggregation._get_empty_bucket_counts()
        aggregation._value = [old + new for old, new in zip(before, counts, strict=True)]
        aggregation._sum += sum(ordered)
        if aggregation._record_min_max:
            aggregation._min = min(aggregation._min, ordered[0])
            aggregation._max = max(aggregation._max, ordered[-1])


def can_add_many(histogram: Histogram) -> bool:
    """Return whether a histogram belongs to the SDK, and whether this module works with the installed SDK."""
    try:
        from opentelemetry.sdk.metrics import Histogram as SdkHistogramType  # noqa: PLC0415 - the SDK may be missing
    except ImportError:
        return False
    return isinstance(histogram, SdkHistogramType) and _is_known()


@cache
def _is_known() -> bool:
    """Return whether values that are added together are exported like values that the SDK records one at a time."""
    try:
        return _exported(together=True) == _exported(together=False)
    except Exception:  # noqa: BLE001 - another version of the SDK may raise anything
        return False


def _exported(*, together: bool) -> object:
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider  # noqa: PLC0415 - as above
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    reader, points = InMemoryMetricReader(), []
    labels: dict[str, str | int | float] = {"a": "x", "b": 1}
    provider = MeterProvider(
        [reader], Resource.get_empty(), exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False
    )
    histogram = provider.get_meter("aiodelay").create_histogram("tried", explicit_bucket_boundaries_advisory=(1, 2))
    many = SdkHistogram(histogram, labels)
    for first, *others in ([1.5, 0.25, 1, 2, 4], [8, 1.25, 0.5]):
        histogram.record(first, labels)
        if not (together and many.add_many(others)):
            for value in others:
                histogram.record(value, labels)
        data = reader.get_metrics_data()
        assert data is not None
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                assert isinstance(point, HistogramDataPoint)
                points.append((point.attributes, point.bucket_counts, point.sum, point.min, point.max))
    return points
