"""The routes of limits: read them, see which keys wait because of them, and change them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from msgspec import Struct

from aiodelay.core import values
from aiodelay.operations.limit_shapes import limit_shapes, limited_key_shape

from .bodies import Json, read_json
from .schemas import documents
from .security import audited, needs
from .served import Limit, Store, served_of

__all__ = [
    "LimitIn",
    "LimitOut",
    "LimitedKeyOut",
    "LimitedKeysOut",
    "LimitsIn",
    "LimitsOut",
    "changing",
    "keys",
    "list_limits",
    "reading",
    "set_limits",
]

reading: APIRouter = APIRouter(prefix="/v1", tags=["limits"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1", tags=["limits"], route_class=needs("operate"))


class LimitIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A limit: of each key if there is a `key`, else of all messages together. Give `concurrency`, `rate` or both."""

    key: str | None = None
    concurrency: int | None = None
    rate: str | None = None


class LimitsIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The new limits of a handler or sink: at most one with a key, and one without. An empty list ends the limits."""

    what: str
    limits: list[LimitIn]


class LimitOut(Struct, frozen=True):
    """A limit of a handler or sink. `rate` is a number per time, such as "5/min"."""

    what: str
    key: str | None
    concurrency: int | None
    rate: str | None


class LimitsOut(Struct, frozen=True):
    """All limits of a store."""

    limits: list[LimitOut]


class LimitedKeyOut(Struct, frozen=True, omit_defaults=True):
    """A key with messages in flight or waiting. Both `key` and `key_base64` are null if no limit has a key.

    `why` is the number that is used up: `concurrency` or `rate` of the key, or `lane` for the limit of all messages.
    `until` is the time at which a rate lets the next message begin. `since` is the time at which the first of the
    waiting messages was due.
    """

    what: str
    running: int
    waiting: int
    why: Literal["concurrency", "rate", "lane", ""]
    until: str | None
    since: str | None
    key: str | None = None
    key_base64: str | None = None


class LimitedKeysOut(Struct, frozen=True):
    """The keys of a handler or sink, most waiting messages first."""

    keys: list[LimitedKeyOut]


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
    with audited(request, "limit", store=store.name, what=given.what) as facts:
        await store.scheduler.set_limits(given.what, *limits)
        facts["outcome"] = "set" if limits else "ended"
    return Json({"limits": limit_shapes(given.what, limits)})
