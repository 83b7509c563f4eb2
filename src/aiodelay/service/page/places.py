"""The screens of sinks and handlers, of live instances, and of consumers."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from aiodelay import ports
from aiodelay.errors import UnsupportedByStoreError

from .overview import MOST_LANES, instances_of, lanes_of
from .rendering import shown
from .requests import screen, store_of
from .state import state_of

__all__ = ["consumers", "instances", "sinks"]

MOST_CONSUMERS = 500
MOST_KEYS = 20


@screen("read")
async def sinks(request: Request) -> Response:
    """Show sinks and handlers, the paused lanes, the blocked destinations, and the keys that limits make wait."""
    store = store_of(request)
    scheduler = store.scheduler
    facts = await state_of(request).shared.facts(store)
    lanes = await lanes_of(store, facts.lanes)
    return shown(
        request,
        "sinks.html",
        store,
        facts=facts,
        lanes=lanes[:MOST_LANES],
        more_lanes=len(lanes[MOST_LANES:]),
        sinks=[(name, scheduler.reaches(name)) for name in sorted(scheduler.sinks)],
        blocked=await scheduler.blocked(),
        paused=await scheduler.paused(),
        has_limits=isinstance(scheduler.opened_store(), ports.Limits),
        limits=(limits := await scheduler.limits()),
        limited=[each for what in sorted(limits) for each in await scheduler.limited_keys(what, limit=MOST_KEYS)],
    )


@screen("read")
async def instances(request: Request) -> Response:
    """Show the live instances that serve the store."""
    store = store_of(request)
    facts = await state_of(request).shared.facts(store)
    return shown(request, "instances.html", store, facts=facts, instances=await instances_of(store))


@screen("read")
async def consumers(request: Request) -> Response:
    """Show the consumers of fan-out topics and of logs, with their lag."""
    store = store_of(request)
    facts = await state_of(request).shared.facts(store)
    opened = store.scheduler.opened_store()
    if not isinstance(opened, ports.Registry):
        raise UnsupportedByStoreError(
            "store", opened.name, "a Redis store: only its server has topics with registered consumers"
        )
    found = await state_of(request).shared.get(("consumers", store.name), opened.registered)
    return shown(
        request,
        "consumers.html",
        store,
        facts=facts,
        consumers=found[:MOST_CONSUMERS],
        more=len(found[MOST_CONSUMERS:]),
    )
