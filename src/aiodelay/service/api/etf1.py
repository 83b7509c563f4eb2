"""The routes of etf1/kafka-message-scheduler's REST API, for programs that were clients of that scheduler.

Answers have the JSON form of that API. The routes only read, like the original routes. docs/migration.md lists the
differences.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse

from aiodelay.core.validation import to_of
from aiodelay.core.values import Snapshot
from aiodelay.errors import AiodelayError
from aiodelay.operations.queries import Filter, page

from .bodies import Json, encoded
from .messages import not_found
from .models import Etf1Info, Etf1Kafka, Etf1Schedule
from .schemas import documents
from .security import needs
from .served import Opened, Store, served_of

__all__ = [
    "alive",
    "get_schedule",
    "info",
    "liveness",
    "reading",
    "schedules",
]

reading: APIRouter = APIRouter(tags=["etf1"], route_class=needs("read"))
alive: APIRouter = APIRouter(tags=["etf1"])

KAFKA = "kafka"
AT_ONCE = 200
ALIVE_S = 1.0
PROBE = "liveness"


@reading.get("/schedules", summary="List all schedules, earliest first", **documents(list[Etf1Schedule]))
async def schedules(
    store: Store,
    limit: Annotated[int, Query(ge=1, le=1_000_000, description="The most schedules to list.")] = 10_000,
) -> Response:
    """Returns an array of `{id, epoch, timestamp, topic, target-topic, target-key, value}`.

    `epoch` and `timestamp` are in seconds, `value` is base64.
    """
    first = await page(store.scheduler, Filter(), after=None, limit=min(limit, AT_ONCE), most=AT_ONCE)

    async def parts() -> AsyncIterator[bytes]:
        found, left, comma = first, limit, b""
        yield b"["
        while True:
            for each in found.messages:
                yield comma + encoded(_schedule(store, each))
                comma = b","
            left -= len(found.messages)
            if found.after is None or left <= 0:
                break
            size = min(left, AT_ONCE)
            found = await page(store.scheduler, Filter(), after=found.after, limit=size, most=size)
        yield b"]"

    return StreamingResponse(parts(), media_type="application/json")


@reading.get("/schedule/{id:path}", summary="Get one schedule", **documents(Etf1Schedule))
async def get_schedule(id: str, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """Returns one schedule, in the form of an item of `/schedules`."""
    found = await store.scheduler.get(id)
    if found is None:
        raise not_found(id)
    return Json(_schedule(store, found))


@reading.get("/info", summary="Get the addresses of the service", **documents(Etf1Info))
async def info(request: Request, store: Store) -> Response:
    """Returns `{hostname, address, server_address, kafka: {bootstrap_servers, topics, history_topic}}`."""
    host, port = request.scope.get("server") or ("", None)
    bootstrap, topics, history = _kafka_of(store)
    address = host if port is None else f"{host}:{port}"
    return Json(Etf1Info(socket.gethostname(), [host], address, Etf1Kafka(bootstrap, topics, history)))


@alive.get("/liveness", operation_id="liveness", summary="Check that the stores answer", **documents(None))
async def liveness(request: Request) -> Response:
    """Answers 200, or 500 if not all stores answer within a second. No token is needed. The answer has no body."""
    try:
        async with asyncio.timeout(ALIVE_S):
            for opened in served_of(request).stores.values():
                await opened.scheduler.opened_store().get(PROBE)
    except (AiodelayError, TimeoutError):
        return Response(status_code=500)
    return Response(status_code=200)


def _kafka_of(store: Opened) -> tuple[str, list[str], str]:
    """Return the servers, the schedules topics and the history topic of a store; empty values if it is not Kafka."""
    url = urlsplit(store.scheduler.opened_store().name)
    if url.scheme != KAFKA:
        return "", [], ""
    topics = [each for each in url.path.strip("/").split(",") if each]
    return url.netloc.rpartition("@")[2], topics, parse_qs(url.query).get("history", [""])[0]


def _schedule(store: Opened, found: Snapshot) -> Etf1Schedule:
    envelope = found.record.envelope
    _, topics, _ = _kafka_of(store)
    return Etf1Schedule(
        envelope.id,
        -(-found.record.due_ms // 1000),
        found.record.revision // 1000,
        topics[0] if topics else store.scheduler.namespace,
        envelope.address if envelope.lane == KAFKA else to_of(envelope),
        (envelope.key or b"").decode(errors="replace"),
        None if envelope.encoding == "null" else base64.b64encode(envelope.payload).decode(),
    )
