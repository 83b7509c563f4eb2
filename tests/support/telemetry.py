"""OpenTelemetry's own SDK, which keeps what was emitted."""

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
    """Return a span's trace and span id."""
    return span.context.trace_id, span.context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    """Return the same of those that it is linked to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


class Emitted:
    """Providers of one test, and what they were given."""

    def __init__(self) -> None:
        self._spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self.reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    def telemetry(self, **options: Any) -> Telemetry:  # noqa: ANN401 - those of Telemetry
        """Return what tells a scheduler to emit here."""
        return Telemetry(**{"tracer_provider": self.tracers, "meter_provider": self.meters, **options})

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Those that have ended, in that order."""
        return self._spans.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of a name that have ended."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only span of a name."""
        (span,) = self.named(name)
        return span

    def points(self) -> dict[str, list[tuple[Mapping[str, Any], Any]]]:
        """Collect; return the labels and the value of each metric's points: of a histogram, count, sum and bounds."""
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
        """Add up a metric's points, of a histogram their counts, that have these labels (`a_b` stands for `a.b`)."""
        wanted = {name.replace("_", "."): value for name, value in labels.items()}
        found = [value for point, value in self.points().get(metric, ()) if wanted.items() <= point.items()]
        return float(sum(value[0] if isinstance(value, tuple) else value for value in found))
