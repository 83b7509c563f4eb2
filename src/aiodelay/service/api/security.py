"""Access control: bearer tokens with scopes, a gate that checks each request, and an audit log line for each change."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from math import ceil
from typing import Any, get_args

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from aiodelay.core.validation import check_count
from aiodelay.errors import ConfigurationError, StoreError, cut, kind_of, shortened
from aiodelay.ports.clock import Clock, SystemClock
from aiodelay.service.config import Scope, Token

from .problems import CLOSE, INTERNAL, UNKNOWN, UNTOLD, ApiError, response_of
from .sessions import COOKIE, Sessions

__all__ = [
    "ApiLimits",
    "Caller",
    "Gate",
    "Tokens",
    "audit",
    "audited",
    "audited_by",
    "caller_of",
    "check_allowed",
    "hash_token",
    "needs",
    "peer_of",
]

log: logging.Logger = logging.getLogger("aiodelay.service")
audit_log: logging.Logger = logging.getLogger("aiodelay.audit")

HASH = "sha256:"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
FORWARDING = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"})
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
PLAIN = "identity"
"""The content encoding of a body that is not compressed."""
CALLER = "aiodelay.caller"
BUCKETS = 10_000
LONGEST_FACT = 300
REFUSALS_MS = 1_000
SCOPES: tuple[Scope, ...] = get_args(Scope)
HEADERS = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }.items()
)
"""Headers of every answer. An answer may set another value."""


def hash_token(secret: str) -> str:
    """Return the hash of a token's secret, as the settings hold it.

    Use a long random secret, such as a result of `secrets.token_urlsafe()`.
    """
    return HASH + sha256(secret.encode()).hexdigest()


class Tokens:
    """The tokens that are valid now. `load` replaces them while the service runs.

    Args:
        tokens: The tokens at the start.
        clock: Measures intervals.

    Attributes:
        is_open: Whether there has never been a token. If true, requests from this machine need no token. If tokens
            existed and the last token is removed, the service refuses all requests.
    """

    def __init__(self, tokens: Collection[Token] = (), clock: Clock | None = None) -> None:
        self._tokens, self._clock = tuple(tokens), clock or SystemClock()
        self.is_open: bool = not self._tokens
        self._refused, self._next_line_ms = 0, 0

    def __contains__(self, token: Token) -> bool:
        return token in self._tokens

    def load(self, tokens: Collection[Token]) -> None:
        """Replace the valid tokens."""
        self._tokens = tuple(tokens)
        self.is_open = self.is_open and not self._tokens

    def find(self, secret: str) -> Token | None:
        """Return the token of a secret; None if there is none. The duration of the call does not reveal the token."""
        given = hash_token(secret)
        found = None
        for token in self._tokens:
            if compare_digest(token.hash, given):
                found = token
        return found

    def refuse(self, peer: str) -> None:
        """Write to the audit log that a caller sent an invalid token.

        There is at most one line a second. Each line gives the number of refusals since the line before it.
        """
        self._refused += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._next_line_ms:
            _write({"action": "refused token", "from": peer, "times": self._refused})
            self._refused, self._next_line_ms = 0, now_ms + REFUSALS_MS


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Limits on the requests of clients.

    Attributes:
        max_body: Most bytes of a body, and of a line of a stream.
        max_stream: Most bytes of a stream.
        streams: Most streams at the same time.
        body_timeout_s: Longest time for a whole body to arrive, and for a stream to send nothing.
        max_page: Most items of a page.
        max_examined: Most messages that one request compares with a filter that no index answers.
        rate: Most requests a second of one token, or of one address without a token; 0 = no limit.
        burst: Most requests that may come at once.
    """

    max_body: int = 1_048_576
    max_stream: int = 1_073_741_824
    streams: int = 16
    body_timeout_s: float = 10.0
    max_page: int = 500
    max_examined: int = 2_000
    rate: int = 500
    burst: int = 1_000

    def __post_init__(self) -> None:
        check_count(self.max_body, "max_body", 1_024, 1 << 30)
        check_count(self.max_stream, "max_stream", 1_024, 1 << 50)
        check_count(self.streams, "streams", 1, 10_000)
        check_count(self.max_page, "max_page", 1, 1_000)
        check_count(self.max_examined, "max_examined", 1, 100_000)
        check_count(self.rate, "rate", 0, 1_000_000)
        check_count(self.burst, "burst", 1, 1_000_000)
        if not self.body_timeout_s > 0:
            raise ConfigurationError("body_timeout_s", shortened(self.body_timeout_s), "more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the token's name and scopes, and the network address."""

    name: str
    scopes: Collection[Scope]
    peer: str


class _Rates:
    """Limits the request rate: one token bucket per name, refilled as time passes.

    If there are too many buckets, the buckets that were not used for the longest time are dropped.
    """

    def __init__(self, limits: ApiLimits, clock: Clock) -> None:
        self._rate, self._burst, self._clock = limits.rate, limits.burst, clock
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, name: str) -> float:
        """Take one request from a bucket; return 0, or the seconds to wait if the bucket is empty."""
        if not self._rate:
            return 0
        now_ms = self._clock.monotonic_ms()
        left, since_ms = self._buckets.pop(name, (float(self._burst), now_ms))
        left = min(left + (now_ms - since_ms) / 1000 * self._rate, self._burst)
        self._buckets[name] = (left - 1 if left >= 1 else left, now_ms)
        while len(self._buckets) > BUCKETS:
            self._buckets.popitem(last=False)
        return 0 if left >= 1 else (1 - left) / self._rate


class Gate:
    """The middleware in front of the app: identifies callers, limits rates, refuses changes from other sites.

    The gate also adds the security headers to each answer. Without tokens, a request gets all scopes only if it comes
    from this machine, through no proxy, and its `Host` is a loopback name.

    Args:
        app: The app that answers the requests.
        tokens: The tokens of the callers.
        sessions: The browser sessions of the page.
        limits: The limits on the request rate.
        clock: Measures intervals.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, sessions: Sessions, limits: ApiLimits, clock: Clock | None = None
    ) -> None:
        self._app, self._tokens, self._sessions = app, tokens, sessions
        self._rates = _Rates(limits, clock or SystemClock())

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it to the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                said = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in HEADERS if each[0] not in said)]
            await send(message)

        try:
            scope[CALLER] = self._admit(scope, _headers_of(scope))
        except ApiError as error:
            response = response_of(error.problem, error.headers)
            await response(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            if not has_begun:
                await response_of(UNTOLD if scope["method"] in SAFE else UNKNOWN)(scope, receive, send_with_headers)
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], cut(scope["path"]))
            if has_begun:
                raise
            await response_of(INTERNAL)(scope, receive, send_with_headers)

    def _admit(self, scope: AsgiScope, headers: Mapping[str, str]) -> Caller | None:
        peer = peer_of(scope)
        host = headers.get("host", "")
        if host and not HOST.fullmatch(host):
            raise ApiError(400, "HostError", "the header Host is not a host name with an optional port")
        if (coding := headers.get("content-encoding", PLAIN).lower()) != PLAIN:
            about = {"field": "content-encoding", "value": repr(cut(coding)), "allowed": "none"}
            raise ApiError(415, "ContentEncodingError", "send the body without compression", CLOSE, **about)
        caller = self._caller(peer, headers)
        wait_s = self._rates.take(f"token {caller.name}" if caller else f"peer {peer}")
        if wait_s:
            detail = "too many requests; wait the seconds that the header Retry-After gives"
            raise ApiError(429, "TooManyRequestsError", detail, headers={"retry-after": str(ceil(wait_s))})
        if scope["method"] not in SAFE:
            _refuse_other_sites(headers)
        return caller

    def _caller(self, peer: str, headers: Mapping[str, str]) -> Caller | None:
        if self._tokens.is_open:
            return Caller("anonymous", SCOPES, peer) if _is_local(peer, headers) else None
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind:
            token = self._tokens.find(secret.strip()) if kind.lower() == "bearer" else None
            if token is None:
                self._tokens.refuse(peer)
        else:
            token = self._sessions.find(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))
        return None if token is None else Caller(token.name, token.scopes, peer)


def peer_of(scope: AsgiScope) -> str:
    """Return the IP address of the client, or `local` if the server does not know it.

    uvicorn before 0.31 has no address if each address in X-Forwarded-For is of a trusted proxy.
    """
    host, _ = scope.get("client") or (None, None)
    return host or "local"


def _headers_of(scope: AsgiScope) -> dict[str, str]:
    """Return the headers of a request. If a header is sent twice, the first value counts."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(scope["headers"]))}


@lru_cache(1_024)
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from this machine, through no proxy, and to a loopback name.

    Only a loopback name is safe: a web page can make another host name resolve to this machine (DNS rebinding).
    """
    host = HOST.fullmatch(headers.get("host", ""))
    is_ours = host is not None and _is_loopback(host[1].lower())
    return _is_loopback(peer) and is_ours and FORWARDING.isdisjoint(headers)


def _refuse_other_sites(headers: Mapping[str, str]) -> None:
    origin, host = headers.get("origin"), headers.get("host", "")
    is_other = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if is_other or (origin is not None and (origin.partition("://")[2] or "null") != host):
        raise ApiError(403, "CrossSiteError", "the service refuses changes that another site's page requests")


def caller_of(request: Request) -> Caller:
    """Return the sender of a request. Only routes that use `needs` may call this function."""
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def needs(scope: Scope, find: Callable[[Request], Any] | None = None) -> type[APIRoute]:
    """Return a route class that refuses callers whose token lacks a scope.

    On a read-only service, the routes refuse every scope except `read`. A route class costs a tenth of the time of a
    FastAPI dependency.

    Args:
        scope: The scope that a token must have.
        find: A function such as `store_of`. If it is given, the route calls the endpoint with the request and with the
            function's result for this request. If not, FastAPI finds the arguments of the endpoint, which takes longer
            than to schedule a message.
    """

    class Guarded(APIRoute):
        needed = scope

        def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as FastAPI's
            super().__init__(*args, **options)
            self.unique_id = self.name

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            endpoint: Callable[..., Awaitable[Response]] = self.endpoint
            handle = super().get_route_handler()

            async def check_and_handle(request: Request) -> Response:
                check_allowed(request, scope)
                return await (handle(request) if find is None else endpoint(request, find(request)))

            return check_and_handle

    return Guarded


def check_allowed(request: Request, scope: Scope) -> None:
    """Refuse a caller that does not have a scope.

    Raises:
        ApiError: 401 without a valid token; 403 if the token lacks the scope, or if the service is read-only.
    """
    caller = request.scope[CALLER]
    if caller is None:
        detail = "send a valid bearer token: Authorization: Bearer <token>"
        raise ApiError(401, "UnauthorizedError", detail, {"www-authenticate": 'Bearer realm="aiodelay"'})
    if scope not in caller.scopes:
        raise ApiError(
            403,
            "ScopeError",
            f"this request needs a token with the scope {scope}",
            field="scope",
            value=" ".join(sorted(caller.scopes)) or "none",
            allowed=scope,
        )
    if scope != "read" and request.app.state.served.read_only:
        detail = "the service is read-only; set [api] read_only = false to allow changes"
        raise ApiError(403, "ReadOnlyError", detail)


def audit(request: Request, action: str, **facts: Any) -> None:  # noqa: ANN401 - values of the audit log line
    """Write a change, its caller and its outcome to the audit log, as one line of JSON without payloads and headers."""
    _audit(caller_of(request), action, facts)


def _audit(caller: Caller, action: str, facts: Mapping[str, object]) -> None:
    if audit_log.isEnabledFor(logging.INFO):
        _write({"action": action, "by": caller.name, "from": caller.peer, **facts})


@contextmanager
def audited(request: Request, action: str, **facts: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - as in `audit`
    """Write a change to the audit log when the block ends, also after a store error or a cancellation.

    After a store error or a cancellation, the store may have carried out the change, fully or in part. After any other
    error, nothing was changed, and no line is written.

    Yields:
        The facts of the audit log line. The block adds the outcome.
    """
    with audited_by(caller_of(request), action, **facts) as completed:
        yield completed


@contextmanager
def audited_by(caller: Caller, action: str, **facts: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - as in `audit`
    """Do the same as `audited`, for a change that goes on after its request has ended."""
    try:
        yield facts
    except (StoreError, asyncio.CancelledError) as error:
        _audit(caller, action, {**facts, "outcome": type(error).__name__})
        raise
    _audit(caller, action, facts)


def _write(facts: Mapping[str, object]) -> None:
    plain = {name: _plain(value) for name, value in facts.items()}
    audit_log.info("%s", msgspec.json.encode(plain).decode(), extra={"audit": plain})


def _plain(value: object) -> object:
    """Return a fact, shortened and without control characters, so that it cannot forge a line or a field of the log."""
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {cut(str(name)): _plain(each) for name, each in value.items()}
    return cut(value, LONGEST_FACT) if isinstance(value, str) else kind_of(value)
