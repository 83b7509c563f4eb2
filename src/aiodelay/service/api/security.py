"""Who may do what: bearer tokens with scopes, one gate before everything, and a line in the audit log per change."""

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
]

log: logging.Logger = logging.getLogger("aiodelay.service")
audit_log: logging.Logger = logging.getLogger("aiodelay.audit")

HASH = "sha256:"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
FORWARDING = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"})
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
PLAIN = "identity"
"""What a body is encoded with that is not."""
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
"""On every answer that does not say otherwise itself."""


def hash_token(secret: str) -> str:
    """Return what is kept of a secret; it should be long and random, as `secrets.token_urlsafe()` makes it."""
    return HASH + sha256(secret.encode()).hexdigest()


class Tokens:
    """The tokens that are valid now; `load` puts others in their place while the service runs.

    Args:
        tokens: The first ones.
        clock: For intervals.

    Attributes:
        is_open: There never was one, so that whoever asks from this machine needs none. Taking the last one away lets
            nobody in any more.
    """

    def __init__(self, tokens: Collection[Token] = (), clock: Clock | None = None) -> None:
        self._tokens, self._clock = tuple(tokens), clock or SystemClock()
        self.is_open: bool = not self._tokens
        self._refused, self._next_line_ms = 0, 0

    def __contains__(self, token: Token) -> bool:
        return token in self._tokens

    def load(self, tokens: Collection[Token]) -> None:
        """Make these the valid ones."""
        self._tokens = tuple(tokens)
        self.is_open = self.is_open and not self._tokens

    def find(self, secret: str) -> Token | None:
        """Return the token of a secret; in the same time whichever it is."""
        given = hash_token(secret)
        found = None
        for token in self._tokens:
            if compare_digest(token.hash, given):
                found = token
        return found

    def refuse(self, peer: str) -> None:
        """Write that a token was shown that is not valid; further ones within a second are counted by the next line."""
        self._refused += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._next_line_ms:
            _write({"action": "refused token", "from": peer, "times": self._refused})
            self._refused, self._next_line_ms = 0, now_ms + REFUSALS_MS


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """How much a client may ask for.

    Attributes:
        max_body: Most bytes of a body, and of a line of a stream.
        max_stream: Most bytes of a stream.
        streams: Most streams at once.
        body_timeout_s: Longest time for a body to arrive whole, and for a stream to stand still.
        max_page: Most items of a page.
        max_examined: Most messages that a request looks at where no index answers.
        rate: Most requests a second of one token, or of one address without a token; 0 = any number.
        burst: How many may come at once.
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
    """Who asks, and from where."""

    name: str
    scopes: Collection[Scope]
    peer: str


class _Rates:
    """A bucket of requests per name, refilled with time; the buckets longest not used are forgotten."""

    def __init__(self, limits: ApiLimits, clock: Clock) -> None:
        self._rate, self._burst, self._clock = limits.rate, limits.burst, clock
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, name: str) -> float:
        """Take one; return 0, or how many seconds it takes until there is one."""
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
    """Stands before the app: limits rates, finds out who asks, refuses what another site has sent, adds headers.

    Without tokens, whoever asks from this machine by one of its own names may do what is not refused to all.

    Args:
        app: What is behind it.
        tokens: Who may ask.
        sessions: Of those who have shown theirs to the page.
        limits: How often.
        clock: For intervals.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, sessions: Sessions, limits: ApiLimits, clock: Clock | None = None
    ) -> None:
        self._app, self._tokens, self._sessions = app, tokens, sessions
        self._rates = _Rates(limits, clock or SystemClock())

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
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
        peer = scope["client"][0] if scope.get("client") else "local"
        host = headers.get("host", "")
        if host and not HOST.fullmatch(host):
            raise ApiError(400, "HostError", "the header Host names no host")
        if (coding := headers.get("content-encoding", PLAIN).lower()) != PLAIN:
            about = {"field": "content-encoding", "value": repr(cut(coding)), "allowed": "none"}
            raise ApiError(415, "ContentEncodingError", "bodies are taken as they are, not compressed", CLOSE, **about)
        caller = self._caller(peer, headers)
        wait_s = self._rates.take(f"token {caller.name}" if caller else f"peer {peer}")
        if wait_s:
            detail = "too many requests; wait as long as Retry-After says"
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


def _headers_of(scope: AsgiScope) -> dict[str, str]:
    """Return a request's headers; of those sent twice, the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(scope["headers"]))}


@lru_cache(1_024)
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is of this machine's own, and not passed on, nor sent to a name that was bent to here."""
    host = HOST.fullmatch(headers.get("host", ""))
    is_ours = host is not None and _is_loopback(host[1].lower())
    return _is_loopback(peer) and is_ours and FORWARDING.isdisjoint(headers)


def _refuse_other_sites(headers: Mapping[str, str]) -> None:
    origin, host = headers.get("origin"), headers.get("host", "")
    is_other = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if is_other or (origin is not None and (origin.partition("://")[2] or "null") != host):
        raise ApiError(403, "CrossSiteError", "requests that change something are not taken from other sites")


def caller_of(request: Request) -> Caller:
    """Return who asks; only behind `needs`."""
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def needs(scope: Scope, find: Callable[[Request], Any] | None = None) -> type[APIRoute]:
    """Return the kind of route that lets only those through whose token is for this; to a read-only service, to look.

    A route of its own kind rather than a dependency: it costs each request a tenth of one.

    Args:
        scope: What a token must be for.
        find: Finds what a function is given beside the request; without it FastAPI does, which takes longer than to
            schedule a message.
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
    """Refuse whoever may not do this.

    Raises:
        ApiError: 401 without a valid token, 403 with one that is for something else, and where nothing may be changed.
    """
    caller = request.scope[CALLER]
    if caller is None:
        detail = "a valid bearer token is needed: Authorization: Bearer <token>"
        raise ApiError(401, "UnauthorizedError", detail, {"www-authenticate": 'Bearer realm="aiodelay"'})
    if scope not in caller.scopes:
        raise ApiError(
            403,
            "ScopeError",
            f"this needs a token with the scope {scope}",
            field="scope",
            value=" ".join(sorted(caller.scopes)) or "none",
            allowed=scope,
        )
    if scope != "read" and request.app.state.served.read_only:
        detail = "this service changes nothing: it is read-only ([api] read_only = false allows changes)"
        raise ApiError(403, "ReadOnlyError", detail)


def audit(request: Request, action: str, **facts: Any) -> None:  # noqa: ANN401 - what is told of a change
    """Write who has changed what, and what came of it, as one line of JSON; payloads and headers are never among it."""
    _audit(caller_of(request), action, facts)


def _audit(caller: Caller, action: str, facts: Mapping[str, object]) -> None:
    if audit_log.isEnabledFor(logging.INFO):
        _write({"action": action, "by": caller.name, "from": caller.peer, **facts})


@contextmanager
def audited(request: Request, action: str, **facts: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - as of `audit`
    """Write what comes of a change; of one that the store may have carried out in part, or without saying so, as well.

    Yields:
        What is told, to be completed.
    """
    with audited_by(caller_of(request), action, **facts) as told:
        yield told


@contextmanager
def audited_by(caller: Caller, action: str, **facts: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - as of `audit`
    """As `audited`, for what a caller has begun and is carried out after the request."""
    try:
        yield facts
    except (StoreError, asyncio.CancelledError) as error:
        _audit(caller, action, {**facts, "outcome": type(error).__name__})
        raise
    _audit(caller, action, facts)


def _write(told: Mapping[str, object]) -> None:
    plain = {name: _plain(value) for name, value in told.items()}
    audit_log.info("%s", msgspec.json.encode(plain).decode(), extra={"audit": plain})


def _plain(value: object) -> object:
    """Return a fact so that it cannot be taken for more than one line, or for another field."""
    if isinstance(value, int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {cut(str(name)): _plain(each) for name, each in value.items()}
    return cut(value, LONGEST_FACT) if isinstance(value, str) else kind_of(value)
