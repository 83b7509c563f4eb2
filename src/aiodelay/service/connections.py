"""The connections of the service's port: how many there may be, and how long one may stand still."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Server"]

REQUESTS_END_S = 5
"""How long requests that were taken may go on at the end: streams and pages that follow what happens have none."""
TICKS = 10
"""A second, of uvicorn's."""
log: logging.Logger = logging.getLogger("aiodelay.service")


class Server(uvicorn.Server):
    """Serves an app on HTTP/1.1; leaves signals to us.

    A connection ends that stands still on its client's side: nothing or not all of a request's headers came, or
    nothing of an answer was taken. Bodies, and answers that take long to find, are the app's to limit.

    Args:
        app: What answers.
        most: Most connections at once; further ones are refused.
        still_s: Longest time to stand still, to a second.
    """

    def __init__(self, app: ASGIApp, *, most: int, still_s: float) -> None:
        make_protocol = cast("type[asyncio.Protocol]", partial(_Protocol, self))
        config = uvicorn.Config(
            _without_cancellation(app),
            http=make_protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=REQUESTS_END_S,
        )
        super().__init__(config)
        self.most: int = most
        self.refused: int = 0
        self._still_s = still_s
        self._seen: dict[H11Protocol, tuple[object, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look after the connections once a second."""
        if counter % TICKS == 0:
            self._end_what_stands_still()
            if self.refused:
                log.warning("%s connections were refused: no more than %s are taken at once", self.refused, self.most)
                self.refused = 0
        return await super().on_tick(counter)

    def _end_what_stands_still(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        before, self._seen = self._seen, {}
        for each in cast("set[H11Protocol]", self.server_state.connections):
            unsent = each.transport.get_write_buffer_size()
            is_answering = each.cycle is not None and not each.cycle.response_complete
            if is_answering and not unsent:
                continue
            state = each.cycle, unsent
            known, since_s = before.get(each, (None, now_s))
            self._seen[each] = state, since_s if known == state else now_s
            if now_s - self._seen[each][1] >= self._still_s:
                each.transport.abort()


def _without_cancellation(app: ASGIApp) -> ASGIApp:
    """Return an app whose requests the server may cancel at its end, without calling that a failure of the app."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return answer


class _Protocol(H11Protocol):
    """A connection, if it is not one too many."""

    def __init__(self, server: Server, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(**options)
        self._server = server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._server.most:
            self._server.refused += 1
            transport.abort()
