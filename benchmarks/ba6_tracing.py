"""BA6: the cost of telemetry for due messages of a Redis store that reach a handler (the work of BP1).

The side "without the calls" is the same code, compiled without the lines that call an observer. A side with metrics
also collects and encodes them, once for each drain.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import generate_latest

from aiodelay import Telemetry
from aiodelay.engine.delivery.lease_book import LeaseBook
from aiodelay.engine.delivery.run_settlements import RunSettlements
from aiodelay.engine.delivery.subscription import HandlerSubscription

from .bp1_redis_dispatch import CONCURRENCY, MESSAGES, typed
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us

__all__ = ["BENCHMARK"]

GOAL = Goal("at most", 1.02)
METRICS_GOAL, SAMPLED_GOAL = Goal("at most", 1.25), Goal("at most", 1.3)
SAMPLED = 0.01
TOLD: dict[type, Sequence[str]] = {
    HandlerSubscription: ("_read", "_start"),
    RunSettlements: ("after_failure",),
    LeaseBook: ("settle", "forget"),
}
"""The functions on a message's path that call an observer."""


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    otlp, all_on, prometheus = _reader(), _reader(), PrometheusMetricReader()
    sides = {
        "without the calls": partial(_without_calls, plan, n),
        "without a provider": partial(_measured, plan, n, Telemetry()),
        "metrics, OTLP": partial(_collected, plan, n, _telemetry(reader=otlp), otlp.collect),
        "metrics, Prometheus": partial(_collected, plan, n, _telemetry(reader=prometheus), generate_latest),
        "sampled": partial(_measured, plan, n, _telemetry(sampled=SAMPLED)),
        "traced": partial(_measured, plan, n, _telemetry(sampled=1)),
        "both": partial(_collected, plan, n, _telemetry(sampled=1, reader=all_on), all_on.collect),
    }
    try:
        times = in_turn(plan, sides)
    finally:
        prometheus.shutdown()

    def row(what: str, side: str, beside: str, goal: Goal | None = None) -> Row:
        values = tuple(ours / other for ours, other in zip(times[side], times[beside], strict=True))
        text = f"{per_message_us(times[side], n)} a message, {beside} {per_message_us(times[beside], n)}"
        return Row("BA6", f"Redis, {n:,} messages due at once: {what}", f"x time {beside}", values, goal, text)

    return [
        row("no provider", "without a provider", "without the calls", GOAL),
        row("metrics, encoded for OTLP", "metrics, OTLP", "without a provider", METRICS_GOAL),
        row("metrics, encoded for Prometheus", "metrics, Prometheus", "without a provider", METRICS_GOAL),
        row(f"traces, {SAMPLED:.0%} sampled", "sampled", "without a provider", SAMPLED_GOAL),
        row("traces, all sampled, the exporter drops them", "traced", "without a provider"),
        row("traces and metrics", "both", "without a provider"),
    ]


def _measured(plan: Plan, n: int, telemetry: Telemetry) -> float:
    return plan.run(typed(plan.redis, n, CONCURRENCY, telemetry=telemetry))


def _collected(plan: Plan, n: int, telemetry: Telemetry, collect: Callable[[], object]) -> float:
    seconds = _measured(plan, n, telemetry)
    with Stopwatch() as watch:
        collect()
    return seconds + watch.seconds


class _Nowhere(SpanExporter):
    """Takes spans and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class _Encoded(MetricExporter):
    """Encodes metrics for OTLP and drops them."""

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **options: object) -> MetricExportResult:
        encode_metrics(metrics_data).SerializeToString()
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **options: object) -> None: ...


def _reader() -> PeriodicExportingMetricReader:
    """Return a reader that collects only when its `collect` is called."""
    return PeriodicExportingMetricReader(_Encoded(), math.inf)


def _telemetry(*, sampled: float = 0, reader: MetricReader | None = None) -> Telemetry:
    tracers = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sampled)), shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(_Nowhere()))
    meters = MeterProvider([] if reader is None else [reader], shutdown_on_exit=False)
    return Telemetry(tracer_provider=tracers, meter_provider=meters, tracing=sampled > 0, metrics=reader is not None)


# --- without the calls ------------------------------------------------------------------------------------


def _without_calls(plan: Plan, n: int) -> float:
    with _removed():
        return _measured(plan, n, Telemetry())


@contextmanager
def _removed() -> Iterator[None]:
    before = [(class_, name, vars(class_)[name]) for class_, found in TOLD.items() for name in found]
    for class_, name, function in before:
        setattr(class_, name, _compiled_without(function))
    try:
        yield
    finally:
        for class_, name, function in before:
            setattr(class_, name, function)


class _Removing(ast.NodeTransformer):
    """Drops `if self.observer is not None: ...` and `if held.attempt is not None: ...`."""

    removed = 0

    def visit_If(self, node: ast.If) -> Any:  # noqa: ANN401 - a node or None
        if ast.unparse(node.test).endswith(("observer is not None", "attempt is not None")):
            self.removed += 1
            return None
        return self.generic_visit(node)


def _compiled_without(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    removing = _Removing()
    tree = removing.visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    check(removing.removed == 1, f"{function.__qualname__} tells an observer {removing.removed} times, not once")
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec", dont_inherit=False)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    found = made[function.__name__]
    assert isinstance(found, FunctionType)
    return found


BENCHMARK = Benchmark("BA6", "the cost of telemetry", run, needs_redis=True)
