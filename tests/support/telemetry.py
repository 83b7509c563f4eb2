"""`Emitted`: OpenTelemetry's SDK with exporters that keep the emitted spans and metrics for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aiodelay import Telemetry

__all__ = ["Emitted", "id_of", "linked"]


def id_of(span: ReadableSpan) -> tuple[int, int]:
    """Return the trace id and the span id of a span."""
    return span.context.trace_id, span.context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    """Return the trace ids and span ids of the linked spans."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


class Emitted:
    """The providers of one test, and the spans and metrics that they received."""

    def __init__(self) -> None:
        self._spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self.reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    def telemetry(self, **options: Any) -> Telemetry:  # noqa: ANN401 - options of Telemetry
        """Return the settings with which a scheduler emits to these providers."""
        return Telemetry(**{"tracer_provider": self.tracers, "meter_provider": self.meters, **options})

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """The ended spans, in the order in which they ended."""
        return self._spans.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the ended spans with this name."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only ended span with this name."""
        (span,) = self.named(name)
        return span

    def points(self) -> dict[str, list[tuple[Mapping[str, Any], Any]]]:
        """Collect the metrics. Return the labels and the value of each point; for histograms, count, sum and bounds."""
        data = self.reader.get_metrics_data()
        found: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
        for metric in [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                value: Any = getattr(point, "value", None)
                if value is None:
                    value = (point.count, point.sum, tuple(point.explicit_bounds))  # type: ignore[union-attr]
                found.setdefault(metric.name, []).append((dict(point.attributes or {}), value))
        return found

    def total(self, metric: str, **labels: str) -> float:
        """Add up the points (or the counts of a histogram) with these labels. `a_b` means the label `a.b`."""
        wanted = {name.replace("_", "."): value for name, value in labels.items()}
        found = [value for point, value in self.points().get(metric, ()) if wanted.items() <= point.items()]
        return float(sum(value[0] if isinstance(value, tuple) else value for value in found))
