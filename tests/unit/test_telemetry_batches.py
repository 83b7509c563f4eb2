"""Values of histograms that are handed to OpenTelemetry's SDK together, and new traces that aiodelay decides about."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import Histogram as SdkHistogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, MetricReader
from opentelemetry.sdk.metrics.view import (
    DropAggregation,
    ExplicitBucketHistogramAggregation,
    ExponentialBucketHistogramAggregation,
    View,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanContext, SpanKind, get_current_span

from aiodelay import Message, Retry, Scheduler, Telemetry
from aiodelay.core.values import Demand, Done
from aiodelay.memory import MemoryStore
from aiodelay.telemetry import sdk_histograms, sdk_sampling
from aiodelay.telemetry.histogram_values import MOST_WAITING, HistogramValues
from aiodelay.telemetry.instruments import Instruments
from aiodelay.telemetry.names import DELIVERY_LATENESS, DURATION_BUCKETS, PROCESS_DURATION
from aiodelay.telemetry.observer import observer_of
from aiodelay.telemetry.sdk_sampling import root_sampling_of
from tests.support.telemetry import Emitted, id_of, linked

NAME = "messaging.process.duration"
LABELS = {"messaging.destination.name": "Check", "aiodelay.store": "memory://"}
OTHER_LABELS = {"messaging.destination.name": "Other", "aiodelay.store": "memory://"}


@dataclass
class Check:
    number: int


# --- values in batches ------------------------------------------------------------------------------------


def made_of(readers: Sequence[MetricReader], views: Sequence[View] = ()) -> Histogram:
    provider = MeterProvider(readers, views=views, shutdown_on_exit=False)
    meter = provider.get_meter("aiodelay")
    return meter.create_histogram(NAME, "s", explicit_bucket_boundaries_advisory=DURATION_BUCKETS)


def points_of(reader: InMemoryMetricReader) -> list[Any]:
    """Return all that is exported of the histograms, except times."""
    data = reader.get_metrics_data()
    metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
    found = []
    for metric in metrics:
        for point in metric.data.data_points:
            fields = {
                name: getattr(point, name)
                for name in (
                    "attributes",
                    "count",
                    "min",
                    "max",
                    "explicit_bounds",
                    "bucket_counts",
                    "scale",
                    "positive",
                )
                if hasattr(point, name)
            }
            found.append((metric.name, fields, pytest.approx(point.sum)))  # type: ignore[union-attr]
    return found


VIEWS = {
    "no view": (),
    "other bounds": (View(instrument_name=NAME, aggregation=ExplicitBucketHistogramAggregation((0.2, 0.5, 0.7))),),
    "no minimum": (
        View(instrument_name=NAME, aggregation=ExplicitBucketHistogramAggregation((0.2, 0.5), record_min_max=False)),
    ),
    "fewer labels": (View(instrument_name=NAME, attribute_keys={"aiodelay.store"}),),
    "two names": (View(instrument_name=NAME, name="a"), View(instrument_name=NAME, name="b", attribute_keys=set())),
    "dropped": (View(instrument_name=NAME, aggregation=DropAggregation()),),
    "exponential": (View(instrument_name=NAME, aggregation=ExponentialBucketHistogramAggregation()),),
    "both kinds": (
        View(instrument_name=NAME, name="a"),
        View(instrument_name=NAME, name="b", aggregation=ExponentialBucketHistogramAggregation()),
    ),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("temporality", [AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA])
def test_values_in_batches_are_exported_like_values_that_are_recorded_one_at_a_time(
    views: Sequence[View], temporality: AggregationTemporality
) -> None:
    def readers() -> list[InMemoryMetricReader]:
        return [InMemoryMetricReader({SdkHistogram: temporality}), InMemoryMetricReader()]

    alone, together, rng = readers(), readers(), random.Random(1)
    expected, batched = made_of(alone, views), made_of(together, views)
    values = [HistogramValues(batched, labels) for labels in (LABELS, OTHER_LABELS)]
    for _ in range(3):
        for _ in range(MOST_WAITING + 70):
            at, value = rng.randrange(2), rng.choice([rng.random(), 0.5, 0.0, 20.0])
            expected.record(value, (LABELS, OTHER_LABELS)[at])
            values[at].add(value)
        for each in values:
            each.hand_over()
        assert [points_of(reader) for reader in together] == [points_of(reader) for reader in alone]
    one_at_a_time = any(isinstance(each._aggregation, ExponentialBucketHistogramAggregation) for each in views)
    assert [each._waits for each in values] == 2 * [not one_at_a_time]


def test_the_installed_sdk_takes_values_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails with a new version of the SDK, metrics are right but slow: see `sdk_histograms`."""
    reader, recorded = InMemoryMetricReader(), list[float]()
    histogram = made_of([reader])
    record = histogram.record

    def recording(value: float, *given: Any) -> None:  # noqa: ANN401 - as `record`
        recorded.append(value)
        record(value, *given)

    monkeypatch.setattr(histogram, "record", recording)
    values = HistogramValues(histogram, LABELS)
    for i in range(2 * MOST_WAITING):
        values.add(i)
    assert len(recorded) == 2, "one value of each batch"
    assert points_of(reader)[0][1]["count"] == 2 * MOST_WAITING


@pytest.mark.parametrize("view", [VIEWS["exponential"], VIEWS["both kinds"]])
def test_nothing_waits_for_a_histogram_that_takes_values_one_at_a_time(view: Sequence[View]) -> None:
    reader = InMemoryMetricReader()
    values = HistogramValues(made_of([reader], view), LABELS)
    for i in range(MOST_WAITING + 1):
        values.add(i)
    assert {fields["count"] for _, fields, _ in points_of(reader)} == {MOST_WAITING + 1}


def test_values_are_recorded_one_at_a_time_if_the_sdk_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(*_: object) -> bool:
        raise AttributeError("_value")

    sdk_histograms._is_known.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(sdk_histograms, "_add", renamed)
        reader = InMemoryMetricReader()
        values = HistogramValues(made_of([reader]), LABELS)
    sdk_histograms._is_known.cache_clear()
    values.add(1)
    values.add(2)
    assert points_of(reader)[0][1]["count"] == 2


def test_a_provider_that_is_not_the_sdk_gets_each_value_at_once() -> None:
    recorded = []

    class Own(Histogram):
        def __init__(self) -> None: ...

        def record(self, amount: float, attributes: object = None, context: Context | None = None) -> None:
            recorded.append((amount, attributes))

    HistogramValues(Own(), LABELS).add(0.5)
    assert recorded == [(0.5, LABELS)]


def test_a_reader_that_comes_later_gets_the_values_from_then_on() -> None:
    first, later = InMemoryMetricReader(), InMemoryMetricReader()
    provider = MeterProvider([first], shutdown_on_exit=False)
    if not hasattr(provider, "add_metric_reader"):
        pytest.skip("this SDK takes no readers later")
    values = HistogramValues(provider.get_meter("aiodelay").create_histogram(NAME), LABELS)
    for count in (10, 20):
        for i in range(count):
            values.add(i)
        values.hand_over()
        if count == 10:
            provider.add_metric_reader(later)
    assert [points_of(reader)[0][1]["count"] for reader in (first, later)] == [30, 20]


def test_no_value_is_lost_while_other_threads_collect() -> None:
    reader = InMemoryMetricReader({SdkHistogram: AggregationTemporality.DELTA})
    provider = MeterProvider([reader], shutdown_on_exit=False)
    instruments = Instruments(provider.get_meter("aiodelay"))
    added, counts = 40_000, list[int]()

    def add() -> None:
        for i in range(added):
            instruments.record(PROCESS_DURATION, i / added, LABELS)

    threads = [Thread(target=add) for _ in range(2)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        counts += [fields["count"] for _, fields, _ in points_with_counts(reader)]
    counts += [fields["count"] for _, fields, _ in points_with_counts(reader)]
    assert sum(counts) == 2 * added


class Interrupted(list[float]):
    """Another thread adds a value as soon as a part of the list was read."""

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as of a list
        found = super().__getitem__(index)
        self.append(8)
        return found


def test_a_value_that_comes_during_a_hand_over_is_in_the_next_one() -> None:
    reader = InMemoryMetricReader()
    values = HistogramValues(made_of([reader]), LABELS)
    values._waiting = Interrupted([1, 2])
    values.hand_over()
    assert (points_of(reader)[0][1]["count"], list(values._waiting)) == (2, [8])


def points_with_counts(reader: InMemoryMetricReader) -> list[Any]:
    return [point for point in points_of(reader) if point[0] == NAME]


def test_a_collection_brings_the_values_that_wait() -> None:
    emitted = Emitted()
    instruments = Instruments(emitted.meters.get_meter("aiodelay"))
    instruments.record(DELIVERY_LATENESS, 0.25, LABELS)
    ((_, (count, total, _)),) = emitted.points()[DELIVERY_LATENESS.name]
    assert (count, total) == (1, 0.25)


@pytest.mark.asyncio
async def test_the_values_of_a_sampled_run_are_exemplars_with_its_ids() -> None:
    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider(ALWAYS_ON)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    telemetry = Telemetry(tracer_provider=tracers, meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    scheduler = Scheduler("memory://", telemetry=telemetry)

    @scheduler.handler
    async def check(event: Check) -> None: ...

    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        await scheduler.run_until_idle()
    (process,) = [span for span in spans.get_finished_spans() if span.name == "process Check"]
    data, found = reader.get_metrics_data(), dict[str, object]()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            found.update((metric.name, (each.trace_id, each.span_id)) for each in point.exemplars or ())
    ids = process.context.trace_id, process.context.span_id
    assert (found[DELIVERY_LATENESS.name], found[PROCESS_DURATION.name]) == (ids, ids)


def test_a_batch_is_no_exemplar_of_the_span_in_which_it_is_handed_over() -> None:
    reader = InMemoryMetricReader()
    values = HistogramValues(made_of([reader]), LABELS)
    with TracerProvider(ALWAYS_ON).get_tracer("t").start_as_current_span("other"):
        values.add(1)
        values.hand_over()
    data = reader.get_metrics_data()
    assert data is not None
    (point,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert not point.exemplars


def test_equal_labels_in_dicts_of_their_own_are_one_point() -> None:
    emitted = Emitted()
    instruments = Instruments(emitted.meters.get_meter("aiodelay"))
    for _ in range(3):
        instruments.record(DELIVERY_LATENESS, 1, dict(LABELS))
    assert [value[0] for _, value in emitted.points()[DELIVERY_LATENESS.name]] == [3]


@pytest.mark.asyncio
async def test_a_run_ends_once() -> None:
    emitted, store = Emitted(), MemoryStore()
    telemetry = emitted.telemetry(tracing=False)
    async with Scheduler(store, telemetry=telemetry, dispatch=False) as scheduler, store.work("w", ["Check"]) as work:
        await scheduler.schedule(Check(1), delay="0s", to="handler:Check")
        claimed = await work.claim({"Check": Demand(1)}, request="r", lease_ms=10_000)
        observer = observer_of(telemetry, store, "", [])
        assert observer is not None
        held = SimpleNamespace(claim=claimed.claims[0], attempt=None)
        observer.begin(held, 5)
        observer.settled(held, Done(claimed.claims[0].record.id, 1, 1))
        observer.left(held)
    assert emitted.total(PROCESS_DURATION.name) == 1


# --- new traces -------------------------------------------------------------------------------------------


class GivenIds(RandomIdGenerator):
    """Trace ids whose lower bits are given."""

    def __init__(self, *lower: int) -> None:
        self._lower = iter(lower)

    def generate_trace_id(self) -> int:
        return 1 << 100 | next(self._lower)


@dataclass
class Ran:
    number: int
    trace_id: int
    is_valid: bool
    is_sampled: bool
    child_is_sampled: bool


async def ran(tracers: TracerProvider, n: int) -> list[Ran]:
    """Schedule and run messages one after another, without a trace of their own. Return what their handlers saw."""
    runs = list[Ran]()
    scheduler = Scheduler("memory://", telemetry=Telemetry(tracer_provider=tracers, metrics=False))

    @scheduler.handler(concurrency=1)
    async def check(event: Check) -> None:
        current = get_current_span().get_span_context()
        with tracers.get_tracer("app").start_as_current_span("child") as child:
            flags = child.get_span_context().trace_flags
        runs.append(Ran(event.number, current.trace_id, current.is_valid, current.trace_flags.sampled, flags.sampled))

    async with scheduler:
        with trace.use_span(trace.NonRecordingSpan(UNSAMPLED_CALLER)):
            await scheduler.schedule_many(Message(Check(i), delay=f"{i}ms") for i in range(n))
        await scheduler.run_until_idle()
    return runs


UNSAMPLED_CALLER = SpanContext(trace_id=7, span_id=7, is_remote=False, trace_flags=trace.TraceFlags(0))
HALF = 1 << 63


@pytest.mark.parametrize(
    "sampler", [TraceIdRatioBased(0.5), ParentBased(TraceIdRatioBased(0.5)), ParentBasedTraceIdRatio(0.5)]
)
@pytest.mark.asyncio
async def test_the_trace_id_decides_whether_a_run_is_sampled(sampler: Sampler) -> None:
    spans, lower = InMemorySpanExporter(), [HALF - 1, HALF, 1, HALF + 1]
    tracers = TracerProvider(sampler, id_generator=GivenIds(*lower))
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    assert root_sampling_of(tracers.get_tracer("t")) is not None, "else it is right but slow: see `sdk_sampling`"
    runs = await ran(tracers, 4)
    sampled = [HALF - 1, 1]
    assert [(each.number, each.trace_id & (HALF * 2 - 1)) for each in runs] == list(enumerate(lower))
    assert all(each.is_valid for each in runs)
    assert [each.is_sampled for each in runs] == [each in sampled for each in lower]
    if isinstance(sampler, ParentBased):
        assert [each.child_is_sampled for each in runs] == [each.is_sampled for each in runs]
    recorded = [span for span in spans.get_finished_spans() if span.name == "process Check"]
    assert [span.context.trace_id for span in recorded] == [each.trace_id for each in runs if each.is_sampled]
    assert [link.context.trace_id for span in recorded for link in span.links] == [7, 7], "to the span that scheduled"
    assert [(span.attributes or {})["aiodelay.message.attempt"] for span in recorded] == [1, 1]


def test_another_sdk_decides_about_each_span(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(*_: object) -> None:
        raise AttributeError("id_generator")

    tracer = TracerProvider(TraceIdRatioBased(0.5)).get_tracer("t")
    sdk_sampling._is_known.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(sdk_sampling, "_GivenTraceId", given)
        assert root_sampling_of(tracer) is None
    sdk_sampling._is_known.cache_clear()


@pytest.mark.asyncio
async def test_no_run_is_sampled_if_nothing_is_ever_sampled() -> None:
    runs = await ran(TracerProvider(ParentBased(ALWAYS_OFF)), 3)
    assert [(each.is_valid, each.is_sampled, each.child_is_sampled) for each in runs] == 3 * [(True, False, False)]
    assert len({each.trace_id for each in runs}) == 3


class Asked(Sampler):
    """A sampler that looks at attributes and links."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Any]] = []

    def should_sample(  # noqa: PLR0917 - the SDK's own signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Mapping[str, object] | None = None,
        links: Sequence[Link] | None = None,
        trace_state: object = None,
    ) -> SamplingResult:
        self.seen.append((name, dict(attributes or {}), [link.context.trace_id for link in links or ()]))
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        return "TraceIdRatioBased{0.5}"


class Louder(TraceIdRatioBased):
    """A sampler that is not the SDK's, although it is made of it."""

    def should_sample(self, *given: object, **named: object) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE)


class LouderParent(ParentBased):
    """As above."""

    def should_sample(self, *given: object, **named: object) -> SamplingResult:
        return SamplingResult(Decision.RECORD_AND_SAMPLE)


@pytest.mark.asyncio
async def test_a_sampler_of_the_user_s_own_sees_attributes_and_links() -> None:
    sampler = Asked()
    await ran(TracerProvider(sampler), 1)
    ((attributes, links),) = [
        (attributes, links) for name, attributes, links in sampler.seen if name == "process Check"
    ]
    assert attributes["messaging.destination.name"] == "Check"
    assert attributes["aiodelay.message.attempt"] == 1
    assert len(links) == 1


@pytest.mark.parametrize(
    "sampler", [ALWAYS_ON, TraceIdRatioBased(1), Louder(0), ParentBased(Louder(0)), LouderParent(ALWAYS_OFF)]
)
@pytest.mark.asyncio
async def test_all_runs_are_sampled_if_the_sampler_says_so(sampler: Sampler) -> None:
    assert [each.is_sampled for each in await ran(TracerProvider(sampler), 2)] == [True, True]


@pytest.mark.asyncio
async def test_a_retry_is_linked_to_an_attempt_that_was_not_sampled() -> None:
    spans, ids = InMemorySpanExporter(), GivenIds(5, HALF, 6)
    tracers = TracerProvider(ParentBased(TraceIdRatioBased(0.5)), id_generator=ids)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    telemetry, tries = Telemetry(tracer_provider=tracers, metrics=False), list[SpanContext]()
    scheduler = Scheduler("memory://", telemetry=telemetry, retry=Retry(attempts=2, first="1ms"))

    @scheduler.handler
    async def check(event: Check) -> None:
        tries.append(get_current_span().get_span_context())
        if len(tries) == 1:
            raise ValueError

    async with scheduler:
        await scheduler.schedule(Check(1), delay="1ms")
        await scheduler.run_until_idle()
    (schedule,) = [span for span in spans.get_finished_spans() if span.name == "schedule Check"]
    (process,) = [span for span in spans.get_finished_spans() if span.name == "process Check"]
    first, second = tries
    assert (first.trace_flags.sampled, second.trace_flags.sampled) == (False, True)
    assert linked(process) == [id_of(schedule), (first.trace_id, first.span_id)]
