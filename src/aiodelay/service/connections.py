"""`Server`: the HTTP server, with limits for the number of connections, for idle connections and for request heads.

A request head is the first line of a request with its headers.
"""

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

from .api.problems import CLOSE, ApiError, response_of

__all__ = ["MOST_HEAD", "MOST_URL", "Server"]

REQUESTS_END_S = 5
"""Seconds for which open requests may go on when the server stops. Without this limit, live pages would never end."""
KEPT_S = 620
"""Seconds for which the server keeps a connection without a request after an answer.

Proxies keep their connections for shorter: nginx and an Application Load Balancer of AWS 60 s, Caddy 120 s, the load
balancers of Google Cloud 600 s. Otherwise a proxy may send a request on a connection that the server closes at that
moment. The proxy must not repeat a `POST`, so its client gets the error 502.
"""
TICKS = 10
"""The calls of `on_tick` per second, set by uvicorn."""
MOST_HEAD = 16_384
"""Most bytes of a request's first line and headers."""
MOST_URL = 8_192
"""Most bytes of a request's path and query."""
log: logging.Logger = logging.getLogger("aiodelay.service")


class Server(uvicorn.Server):
    """Serves an app on HTTP/1.1, without handling signals.

    The server ends an idle connection. A connection is idle if its client has sent no complete request head, or has
    read nothing of an answer, for `still_s`. After an answer, the next request may begin up to `KEPT_S` later. The app
    itself limits the time of bodies and of slow answers.

    Args:
        app: The app that answers requests.
        most: Most connections at the same time. For a further connection, the server closes a connection that has no
            request now. If all connections have a request, the server refuses the further connection.
        still_s: Seconds after which a connection counts as idle, accurate to a second.
    """

    def __init__(self, app: ASGIApp, *, most: int, still_s: float) -> None:
        make_protocol = cast("type[asyncio.Protocol]", partial(_Protocol, self))
        config = uvicorn.Config(
            _without_cancellation(_with_bounded_head(app)),
            http=make_protocol,
            h11_max_incomplete_event_size=MOST_HEAD,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=REQUESTS_END_S,
            timeout_keep_alive=KEPT_S,
        )
        super().__init__(config)
        self._most, self._still_s = most, still_s
        self._refused = self._gave_way = 0
        self._open: dict[_Protocol, None] = {}  # oldest first
        self._seen: dict[H11Protocol, tuple[object, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: the service handles them."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """End idle connections, and log refused connections, once a second."""
        if counter % TICKS == 0:
            self._end_idle_connections()
            self._log_too_many()
        return await super().on_tick(counter)

    def _log_too_many(self) -> None:
        most = f"api.max_connections is {self._most}"
        if self._gave_way:
            log.warning("%s idle connections were closed to accept new connections: %s", self._gave_way, most)
        if self._refused:
            log.warning("%s connections were refused: %s", self._refused, most)
        self._refused = self._gave_way = 0

    def take(self, connection: _Protocol) -> None:
        """Accept a new connection. If there are too many, close a waiting connection, or else refuse the new one."""
        if len(self._open) >= self._most and not self._make_room():
            self._refused += 1
            connection.transport.abort()
            return
        self._open[connection] = None

    def lose(self, connection: _Protocol) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection, None)

    def _make_room(self) -> bool:
        """Close the oldest connection that waits for a request; return False if all connections have a request.

        Connections that have never sent a request are closed before all other waiting connections.
        """
        waiting = [each for each in self._open if each.is_waiting]
        if not waiting:
            return False
        oldest = next((each for each in waiting if each.cycle is None), waiting[0])
        self._gave_way += 1
        self.lose(oldest)
        oldest.transport.abort()
        return True

    def _end_idle_connections(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        before, self._seen = self._seen, {}
        for each in cast("set[H11Protocol]", self.server_state.connections):
            unsent = each.transport.get_write_buffer_size()
            is_answering = each.cycle is not None and not each.cycle.response_complete
            is_kept = each.timeout_keep_alive_task is not None
            if (is_answering or is_kept) and not unsent:
                continue
            state = each.cycle, unsent
            known, since_s = before.get(each, (None, now_s))
            self._seen[each] = state, since_s if known == state else now_s
            if now_s - self._seen[each][1] >= self._still_s:
                each.transport.abort()


def _without_cancellation(app: ASGIApp) -> ASGIApp:
    """Return an app that ends quietly if the server cancels its requests when it stops."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return answer


def _with_bounded_head(app: ASGIApp) -> ASGIApp:
    """Return an app that refuses a request if its head is too large, or if its headers give two lengths of the body."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        error = _error_in_head(scope) if scope["type"] == "http" else None
        if error is None:
            await app(scope, receive, send)
        else:
            await response_of(error.problem, error.headers)(scope, receive, send)

    return answer


def _error_in_head(scope: Scope) -> ApiError | None:
    url = len(scope["raw_path"]) + len(scope["query_string"])
    if url > MOST_URL:
        return ApiError(414, "UrlTooLongError", f"the URL has {url} bytes; at most {MOST_URL} are allowed", CLOSE)
    headers = scope["headers"]
    if url + sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
        detail = f"the URL and the headers together have more than the allowed {MOST_HEAD} bytes"
        return ApiError(431, "HeadersTooLargeError", detail, CLOSE)
    names = {name for name, _ in headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        detail = "the request has both Content-Length and Transfer-Encoding; send only one of them"
        return ApiError(400, "BodyLengthError", detail, CLOSE)
    return None


class _Protocol(H11Protocol):
    """One connection. While the connection has no request, the server may close it to accept a new connection."""

    def __init__(self, server: Server, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(**options)
        self._server = server

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no request, and the last answer on it is fully sent."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not is_answering and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.take(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.lose(self)
        super().connection_lost(exc)
