"""The routes of the overview: stores, counts, load, lateness, journal, pauses and consumers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from aiodelay import ports
from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import Registered
from aiodelay.errors import ConfigurationError, UnsupportedByStoreError
from aiodelay.operations.json_shapes import blocked_shape, counts_shape, journal_shape, load_shape, time_shape
from aiodelay.operations.load_forecast import asked, forecast_shape, forecast_store
from aiodelay.operations.queries import oldest_overdue_ms

from .bodies import Json, read_json
from .cursors import read_cursor, write_cursor
from .models import (
    ConsumerOut,
    ConsumersOut,
    CountsOut,
    ForecastOut,
    JournalOut,
    LatenessBucketOut,
    LatenessOut,
    LoadOut,
    OutcomeOut,
    PausesOut,
    StoresOut,
    WhatIn,
)
from .problems import unknown_if_unavailable
from .schemas import documents
from .security import audited, needs
from .served import After, Limit, Store, served_of

__all__ = [
    "changing",
    "consumers",
    "counts",
    "forecast",
    "journal",
    "lateness",
    "list_stores",
    "load",
    "pause",
    "pauses",
    "reading",
    "resume",
]

reading: APIRouter = APIRouter(prefix="/v1", tags=["overview"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1", tags=["overview"], route_class=needs("operate"))

MOST_BUCKETS = 1_000
MOST_ENTRIES = 5_000
"""The most journal entries to read for one request."""
ABILITIES_OF_ALL = ("Inspectable", "DeadLetters", "Pauses", "Journal")
"""Every store has these abilities. They were optional once, so clients of the API may still check for them."""
ABILITIES_OF_SOME = (ports.Transfer, ports.Registry)


@reading.get("/stores", summary="List the stores and their abilities", **documents(StoresOut))
async def list_stores(request: Request) -> Response:
    """If there are several stores, all other requests name their store with `?store=<name>`."""
    served = served_of(request)
    stores = []
    for name, opened in served.stores.items():
        store = opened.scheduler.opened_store()
        stores.append(
            {
                "name": name,
                "url": store.name,
                "namespace": opened.scheduler.namespace,
                "abilities": _abilities(store),
                "conflicts": sorted(store.traits.conflicts),
                "allowed_targets": opened.targets.allowed,
            }
        )
    return Json({"stores": stores, "read_only": served.read_only})


def _abilities(store: ports.Store) -> list[str]:
    return [*ABILITIES_OF_ALL, *(each.__name__ for each in ABILITIES_OF_SOME if isinstance(store, each))]


@reading.get("/counts", summary="Count messages by lane and state", **documents(CountsOut))
async def counts(store: Store) -> Response:
    """`oldest_overdue` is the time since which the oldest overdue message waits for its delivery."""
    found = await store.scheduler.counts()
    oldest = await oldest_overdue_ms(store.scheduler, found)
    return Json(
        {
            "lanes": counts_shape(found),
            "oldest_overdue": None if oldest is None else time_shape(oldest),
            "now": time_shape(store.scheduler.opened_store().now_ms()),
        }
    )


@reading.get("/load", summary="Count messages that come due, by bucket of time", **documents(LoadOut))
async def load(
    store: Store,
    bucket: Annotated[str, Query(description='The length of one bucket, such as "1m".', max_length=64)] = "1m",
    buckets: Annotated[
        int, Query(ge=1, le=MOST_BUCKETS, description="The number of buckets, counted from the present time.")
    ] = 60,
) -> Response:
    """Leaves out empty buckets."""
    found = await store.scheduler.load(bucket=bucket, buckets=buckets)
    length = format_duration(parse_duration(bucket, field="bucket", error=ConfigurationError, least_ms=1))
    return Json({"bucket": length, "buckets": load_shape(found)})


@reading.get("/forecast", summary="Forecast how late messages will be", **documents(ForecastOut))
async def forecast(
    store: Store,
    *,
    span: Annotated[str, Query(description='How far to look ahead, such as "24h".', max_length=64)] = "24h",
    lane: Annotated[str | None, Query(description="Only this event type or sink.", max_length=256)] = None,
    rate: Annotated[
        str | None,
        Query(description='The messages that start in a time, of all lanes together: "500/s".', max_length=64),
    ] = None,
    spread: Annotated[
        str | None,
        Query(description='The spread to forecast, such as "5m". Without it, one is suggested.', max_length=64),
    ] = None,
    within: Annotated[str, Query(description="The lateness that does not matter.", max_length=64)] = "10s",
) -> Response:
    """Without `rate`, the rate of each lane is measured from the store's journal, while the lane has a backlog."""
    span_ms = parse_duration(span, field="span", error=ConfigurationError, least_ms=1_000)
    slot_ms, found = await forecast_store(
        store.scheduler, store.lateness, span_ms, asked(rate, spread, within), lane=lane, most=MOST_ENTRIES
    )
    return Json(
        {
            "span": format_duration(span_ms),
            "slot": format_duration(slot_ms),
            "forecasts": [forecast_shape(each) for each in found],
        }
    )


@reading.get("/lateness", summary="Measure the lateness of recent deliveries", **documents(LatenessOut))
async def lateness(store: Store) -> Response:
    """Measures the first attempts of the last 5 minutes, at most 10,000.

    The store must keep a journal: add `?journal=10000` to its URL; for Kafka, `?history=<topic>`.
    """
    measured = await store.lateness.measure(store.scheduler)
    buckets = [LatenessBucketOut(bound, n) for bound, n in measured.buckets]
    return Json(
        LatenessOut(measured.samples, measured.p50_ms, measured.p99_ms, measured.max_ms, buckets, measured.is_complete)
    )


@reading.get("/journal", summary="Read the journal, in order", **documents(JournalOut))
async def journal(
    store: Store,
    limit: Limit,
    id: Annotated[str | None, Query(description="Only this message.")] = None,  # noqa: A002 - its name in the URL
    after: Annotated[int, Query(ge=0, le=1 << 62, description="Only entries with a higher number.")] = 0,
) -> Response:
    """The store must keep a journal: add `?journal=10000` to its URL; for Kafka, `?history=<topic>`.

    In a Redis namespace of several shards, later entries may have lower numbers than earlier entries. A client that
    reads on with `after` then misses these entries, unless it asks for the entries of one message.
    """
    entries = await store.scheduler.journal(id, after=after, limit=limit)
    last = entries[-1].number if entries else after
    return Json({"entries": [journal_shape(each) for each in entries], "after": last})


@reading.get("/holds", include_in_schema=False)  # the former name
@reading.get("/pauses", summary="List paused lanes and blocked destinations", **documents(PausesOut))
async def pauses(store: Store) -> Response:
    """Messages of a paused lane or blocked destination stay in the store, where they can be cancelled.

    These messages do not delay other messages.
    """
    blocked = [blocked_shape(each) for each in await store.scheduler.blocked()]
    return Json({"paused": await store.scheduler.paused(), "blocked": blocked})


@reading.get("/consumers", summary="List consumers of topics and logs, with their lag", **documents(ConsumersOut))
async def consumers(
    store: Store,
    limit: Limit,
    after: After = None,
    topic: Annotated[str | None, Query(description="Only consumers of this topic.", max_length=100)] = None,
) -> Response:
    """The consumers are sorted by topic, kind and name. Only a Redis store can answer: it has topics on its server."""
    opened = store.scheduler.opened_store()
    if not isinstance(opened, ports.Registry):
        raise UnsupportedByStoreError(
            "store", opened.name, "a Redis store: only its server has topics with registered consumers"
        )
    begins = read_cursor(after, tuple[str, str, str]) or ("", "", "")
    found = [each for each in await opened.registered(topic) if _place(each) > begins]
    now_ms = opened.now_ms()
    page = [
        ConsumerOut(
            each.topic,
            each.kind,
            each.consumer,
            each.ordered,
            time_shape(each.since_ms),
            None if each.seen_ms is None else time_shape(each.seen_ms),
            each.is_away(now_ms),
            each.waiting,
            each.in_flight,
            each.retrying,
            each.missed,
            each.cursor,
        )
        for each in found[:limit]
    ]
    place = _place(found[limit - 1]) if len(found) > limit else None
    return Json({"consumers": page, "after": write_cursor(place)})


def _place(consumer: Registered) -> tuple[str, str, str]:
    return consumer.topic, consumer.kind, consumer.consumer


@changing.post("/pause", summary="Pause a lane or a destination", **documents(OutcomeOut, WhatIn))
async def pause(request: Request, store: Store) -> Response:
    """The pause applies to all instances, until a resume. Attempts in flight go on."""
    what = (await read_json(request, served_of(request).limits, WhatIn)).what
    with unknown_if_unavailable(), audited(request, "pause", store=store.name, what=what) as facts:
        facts["outcome"] = outcome = "paused" if await store.scheduler.pause(what) else "was_paused"
    return Json({"id": what, "outcome": outcome})


@changing.post("/resume", summary="Resume a lane or a destination", **documents(OutcomeOut, WhatIn))
async def resume(request: Request, store: Store) -> Response:
    """Messages that are already due are delivered at once."""
    what = (await read_json(request, served_of(request).limits, WhatIn)).what
    with unknown_if_unavailable(), audited(request, "resume", store=store.name, what=what) as facts:
        facts["outcome"] = outcome = "resumed" if await store.scheduler.resume(what) else "was_not_paused"
    return Json({"id": what, "outcome": outcome})
