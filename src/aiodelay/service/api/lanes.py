"""How much stands where, what is coming, how late it was, what is held: by lane."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from aiodelay import ports
from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import Registered
from aiodelay.errors import ConfigurationError, UnsupportedByStoreError
from aiodelay.operations.json_shapes import blocked_shape, counts_shape, journal_shape, load_shape, time_shape
from aiodelay.operations.queries import oldest_overdue_ms

from .bodies import Json, read_json
from .cursors import read_cursor, write_cursor
from .models import (
    ConsumerOut,
    ConsumersOut,
    CountsOut,
    HoldsOut,
    JournalOut,
    LatenessBucketOut,
    LatenessOut,
    LoadOut,
    OutcomeOut,
    StoresOut,
    WhatIn,
)
from .schemas import documents
from .security import audited, needs
from .served import After, Limit, Store, served_of

__all__ = [
    "changing",
    "consumers",
    "counts",
    "holds",
    "journal",
    "lateness",
    "list_stores",
    "load",
    "looking",
    "pause",
    "resume",
]

looking: APIRouter = APIRouter(prefix="/v1", tags=["overview"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1", tags=["overview"], route_class=needs("operate"))

MOST_BUCKETS = 1_000
ABILITIES_OF_ALL = ("Inspectable", "DeadLetters", "Holds", "Journal")
"""Every store has them; clients of the API may look for them since they were optional."""
ABILITIES_OF_SOME = (ports.Transfer, ports.Registry)


@looking.get("/stores", summary="The stores, and what they can do", **documents(StoresOut))
async def list_stores(request: Request) -> Response:
    """Where there are several, all else is asked with `?store=<name>`."""
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


@looking.get("/counts", summary="Messages by lane and state", **documents(CountsOut))
async def counts(store: Store) -> Response:
    """`oldest_overdue`: since when the longest waiting message could have been delivered."""
    lanes = counts_shape(await store.scheduler.counts())
    oldest = await oldest_overdue_ms(store.scheduler)
    return Json(
        {
            "lanes": lanes,
            "oldest_overdue": None if oldest is None else time_shape(oldest),
            "now": time_shape(store.scheduler.opened_store().now_ms()),
        }
    )


@looking.get("/load", summary="What comes due, by span of time", **documents(LoadOut))
async def load(
    store: Store,
    bucket: Annotated[str, Query(description='The length of one span: "1m".', max_length=64)] = "1m",
    buckets: Annotated[int, Query(ge=1, le=MOST_BUCKETS, description="How many, from now on.")] = 60,
) -> Response:
    """Empty spans are left out."""
    found = await store.scheduler.load(bucket=bucket, buckets=buckets)
    length = format_duration(parse_duration(bucket, field="bucket", error=ConfigurationError, least_ms=1))
    return Json({"bucket": length, "buckets": load_shape(found)})


@looking.get("/lateness", summary="How late messages were begun to be delivered", **documents(LatenessOut))
async def lateness(store: Store) -> Response:
    """Of first attempts of the last 5 minutes, 10,000 at most; the store has to keep a journal (`?journal=10000`)."""
    measured = await store.lateness.measure(store.scheduler)
    buckets = [LatenessBucketOut(bound, n) for bound, n in measured.buckets]
    return Json(
        LatenessOut(measured.samples, measured.p50_ms, measured.p99_ms, measured.max_ms, buckets, measured.is_complete)
    )


@looking.get("/journal", summary="What happened, in order", **documents(JournalOut))
async def journal(
    store: Store,
    limit: Limit,
    id: Annotated[str | None, Query(description="Only to this message.")] = None,  # noqa: A002 - its name in the URL
    after: Annotated[int, Query(ge=0, le=1 << 62, description="Only entries with a higher number.")] = 0,
) -> Response:
    """The store has to keep a journal (`?journal=10000`)."""
    entries = await store.scheduler.journal(id, after=after, limit=limit)
    last = entries[-1].number if entries else after
    return Json({"entries": [journal_shape(each) for each in entries], "after": last})


@looking.get("/holds", summary="What is paused, and what takes nothing now", **documents(HoldsOut))
async def holds(store: Store) -> Response:
    """Messages of both wait in the store, can be cancelled, and hold up no others."""
    blocked = [blocked_shape(each) for each in await store.scheduler.blocked()]
    return Json({"paused": await store.scheduler.paused(), "blocked": blocked})


@looking.get("/consumers", summary="Consumers of fan-out topics and of logs, with their lag", **documents(ConsumersOut))
async def consumers(
    store: Store,
    limit: Limit,
    after: After = None,
    topic: Annotated[str | None, Query(description="Only of this topic.", max_length=100)] = None,
) -> Response:
    """By topic, kind and name; only of a store that has topics beside it, as Redis has."""
    opened = store.scheduler.opened_store()
    if not isinstance(opened, ports.Registry):
        raise UnsupportedByStoreError("store", opened.name, "stores that have topics beside them")
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


@changing.post("/pause", summary="Hold back a handler, a sink or a destination", **documents(OutcomeOut, WhatIn))
async def pause(request: Request, store: Store) -> Response:
    """For all instances, until it is resumed; what is in flight goes on."""
    what = (await read_json(request, served_of(request).limits, WhatIn)).what
    with audited(request, "pause", store=store.name, what=what) as facts:
        facts["outcome"] = outcome = "paused" if await store.scheduler.pause(what) else "was_paused"
    return Json({"id": what, "outcome": outcome})


@changing.post("/resume", summary="Release what is paused", **documents(OutcomeOut, WhatIn))
async def resume(request: Request, store: Store) -> Response:
    """What is due then is delivered at once."""
    what = (await read_json(request, served_of(request).limits, WhatIn)).what
    with audited(request, "resume", store=store.name, what=what) as facts:
        facts["outcome"] = outcome = "resumed" if await store.scheduler.resume(what) else "was_not_paused"
    return Json({"id": what, "outcome": outcome})
