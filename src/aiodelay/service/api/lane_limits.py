"""The routes of limits: read them, see which keys wait because of them, and change them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from aiodelay.core import values
from aiodelay.operations.limit_shapes import limit_shapes, limited_key_shape

from .bodies import Json, read_json
from .models import LimitedKeysOut, LimitsIn, LimitsOut
from .problems import unknown_if_unavailable
from .schemas import documents
from .security import audited, needs
from .served import Limit, Store, served_of

__all__ = ["changing", "keys", "list_limits", "reading", "set_limits"]

reading: APIRouter = APIRouter(prefix="/v1", tags=["limits"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1", tags=["limits"], route_class=needs("operate"))


@reading.get("/limits", summary="List limits", **documents(LimitsOut))
async def list_limits(store: Store) -> Response:
    """Lists the limits that code has declared, and the limits that operators have set."""
    found = await store.scheduler.limits()
    return Json({"limits": [shape for what in sorted(found) for shape in limit_shapes(what, found[what])]})


@reading.get("/limits/keys", summary="List the keys that a limit makes wait", **documents(LimitedKeysOut))
async def keys(
    store: Store, limit: Limit, what: Annotated[str, Query(description="A handler or sink.", max_length=200)]
) -> Response:
    """Keys with most waiting messages come first. A key without messages is left out."""
    found = await store.scheduler.limited_keys(what, limit=limit)
    return Json({"keys": [limited_key_shape(each) for each in found]})


@changing.post("/limits", summary="Set the limits of a handler or sink", **documents(LimitsOut, LimitsIn))
async def set_limits(request: Request, store: Store) -> Response:
    """The limits hold for all instances at once, also for messages that wait already. Messages in flight go on."""
    given = await read_json(request, served_of(request).limits, LimitsIn)
    limits = [values.Limit(each.key, each.concurrency, each.rate) for each in given.limits]
    with unknown_if_unavailable(), audited(request, "limit", store=store.name, what=given.what) as facts:
        await store.scheduler.set_limits(given.what, *limits)
        facts["outcome"] = "set" if limits else "ended"
    return Json({"limits": limit_shapes(given.what, limits)})
