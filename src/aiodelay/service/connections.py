"""The service's connections: how many there may be, how long one may stand still, how large a request's head may be."""

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
"""How long requests that were taken may go on at the end: streams and pages that follow what happens have none."""
TICKS = 10
"""A second, of uvicorn's."""
MOST_HEAD = 16_384
"""Most bytes of a request's first line and headers."""
MOST_URL = 8_192
"""Most bytes of a request's path and query."""
log: logging.Logger = logging.getLogger("aiodelay.service")


class Server(uvicorn.Server):
    """Serves an app on HTTP/1.1; leaves signals to us.

    A connection ends that stands still on its client's side: nothing or not all of a request's headers came, or
    nothing of an answer was taken. Bodies, and answers that take long to find, are the app's to limit.

    Args:
        app: What answers.
        most: Most connections at once. For a further one, that gives way which has waited longest without a request;
            while all are being answered, it is refused.
        still_s: Longest time to stand still, to a second.
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
        )
        super().__init__(config)
        self._most, self._still_s = most, still_s
        self._refused = self._gave_way = 0
        self._open: dict[_Protocol, None] = {}  # the oldest first
        self._seen: dict[H11Protocol, tuple[object, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look after the connections once a second."""
        if counter % TICKS == 0:
            self._end_what_stands_still()
            self._tell_of_too_many()
        return await super().on_tick(counter)

    def _tell_of_too_many(self) -> None:
        most = f"no more than {self._most} are taken at once"
        if self._gave_way:
            log.warning("%s connections without a request gave way to new ones: %s", self._gave_way, most)
        if self._refused:
            log.warning("%s connections were refused: %s", self._refused, most)
        self._refused = self._gave_way = 0

    def take(self, connection: _Protocol) -> None:
        """Take a new connection; close another one for it, or this one, if there are too many."""
        if len(self._open) >= self._most and not self._make_room():
            self._refused += 1
            connection.transport.abort()
            return
        self._open[connection] = None

    def lose(self, connection: _Protocol) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection, None)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest, one without any request first; return False if all are busy."""
        waiting = [each for each in self._open if each.is_waiting]
        if not waiting:
            return False
        oldest = next((each for each in waiting if each.cycle is None), waiting[0])
        self._gave_way += 1
        self.lose(oldest)
        oldest.transport.abort()
        return True

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


def _with_bounded_head(app: ASGIApp) -> ASGIApp:
    """Return an app that gets no request whose head is too large, or that says in two ways where its body ends."""

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
        return ApiError(414, "UrlTooLongError", f"a URL has at most {MOST_URL} bytes", CLOSE)
    headers = scope["headers"]
    if url + sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
        return ApiError(431, "HeadersTooLargeError", f"URL and headers have at most {MOST_HEAD} bytes together", CLOSE)
    names = {name for name, _ in headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        detail = "a request has Content-Length or Transfer-Encoding, not both"
        return ApiError(400, "BodyLengthError", detail, CLOSE)
    return None


class _Protocol(H11Protocol):
    """A connection that the server may close for another one."""

    def __init__(self, server: Server, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(**options)
        self._server = server

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not is_answering and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.take(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.lose(self)
        super().connection_lost(exc)
