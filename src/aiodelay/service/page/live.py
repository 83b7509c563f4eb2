"""The event stream that updates open pages. The service asks a store once in two seconds, for all viewers together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from aiodelay.errors import AiodelayError
from aiodelay.service.api.problems import ApiError
from aiodelay.service.api.served import Opened
from aiodelay.service.api.sessions import COOKIE

from .overview import given_of_overview, given_of_strip
from .rendering import encoded, links_of, rendered
from .requests import screen, store_of, wanted
from .state import SPANS, PageState, state_of

__all__ = ["live"]

EVERY_S = 2.0
MOST_EVENTS = 5
"""Events after which a stream ends. The browser then connects again.

Otherwise a server that waits for open answers before it ends, such as uvicorn, could not end while a page is open.
"""
MOST_VIEWERS = 200
STRIP = "strip"
"""The view of all pages except the overview. The strip is the row of counts at the top of each page."""


@screen("read")
async def live(request: Request) -> Response:
    """Send the state of the store every two seconds, `MOST_EVENTS` times."""
    state, store = state_of(request), store_of(request)
    if state.viewers >= MOST_VIEWERS:
        detail = f"{MOST_VIEWERS} open pages get live updates, and no more are allowed"
        raise ApiError(503, "TooManyViewersError", detail)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="text/event-stream")
    return StreamingResponse(_events(request, state, store), headers=headers, media_type="text/event-stream")


async def _events(request: Request, state: PageState, store: Opened) -> AsyncIterator[bytes]:
    view, root = wanted(request, "view") or STRIP, request.scope.get("root_path", "")
    view = view if view in SPANS else STRIP
    if state.viewers >= MOST_VIEWERS:  # other viewers may have come since `live` checked the number
        return
    state.viewers += 1
    try:
        for _ in range(MOST_EVENTS):
            if state.closing.is_set() or not _may_look(request, state):
                return
            yield await state.shared.get(("event", store.name, view, root), lambda: _event(request, state, store, view))
            await _until_next(state)
    finally:
        state.viewers -= 1


def _may_look(request: Request, state: PageState) -> bool:
    """Whether the viewer's session, or token, is still valid."""
    secret = request.headers.get("authorization", "").partition(" ")[2].strip()
    token = state.tokens.find(secret) if secret else state.sessions.find(request.cookies.get(COOKIE, ""))
    return not state.has_tokens or token is not None


async def _until_next(state: PageState) -> None:
    """Wait for the next multiple of `EVERY_S`: all viewers get their event at the same time, from one query."""
    loop_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(EVERY_S - loop_s % EVERY_S):
            await state.closing.wait()
    except TimeoutError:
        pass


async def _event(request: Request, state: PageState, store: Opened, view: str) -> bytes:
    """Return the event for all viewers of a view."""
    try:
        if view in SPANS:
            given = await given_of_overview(state.shared, store, SPANS[view])
        else:
            given = await given_of_strip(state.shared, store)
        text = rendered("live.html", view=view, links=links_of(request, store), problem="", **given)
    except AiodelayError as error:
        text = rendered("live.html", view=STRIP, facts=None, problem=str(error))
    return b"".join(b"data: %b\n" % line for line in encoded(text).splitlines() if line) + b"\n"
