"""`Sessions`: the browser sessions of the page. A user begins a session with a token; a random cookie names it."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from typing import Protocol

from aiodelay.ports.clock import Clock, SystemClock
from aiodelay.service.config import Token

__all__ = ["COOKIE", "SESSION_S", "Sessions", "ValidTokens"]

COOKIE = "aiodelay-session"
SESSION_S = 12 * 3600
SESSIONS = 1_000


class ValidTokens(Protocol):
    """The tokens that are valid now. The class `Tokens` in `security` implements this Protocol."""

    def find(self, secret: str) -> Token | None:
        """Return the token of a secret; None if there is no such token."""
        ...

    def __contains__(self, token: Token) -> bool:
        """Return whether a token is still valid."""
        ...


class Sessions:
    """The sessions of this process.

    A session ends after 12 hours, when its token becomes invalid, at `end`, or when the process ends. If there would be
    more than 1,000 sessions, the oldest session ends.

    Args:
        tokens: The tokens that are valid now.
        clock: Measures intervals.
    """

    def __init__(self, tokens: ValidTokens, clock: Clock | None = None) -> None:
        self._tokens, self._clock = tokens, clock or SystemClock()
        self._sessions: OrderedDict[str, tuple[int, Token]] = OrderedDict()
        self._key = secrets.token_bytes(32)

    def begin(self, secret: str) -> tuple[str, Token] | None:
        """Start a session; return its cookie and its token, or None if the secret belongs to no valid token."""
        token = self._tokens.find(secret)
        if token is None:
            return None
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = self._clock.monotonic_ms() + SESSION_S * 1000, token
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return cookie, token

    def find(self, cookie: str) -> Token | None:
        """Return the token of a session; None if the session or the token is not valid any more."""
        ends_ms, token = self._sessions.get(cookie, (0, None))
        if token is None or ends_ms < self._clock.monotonic_ms():
            self._sessions.pop(cookie, None)
            return None
        return token if token in self._tokens else None

    def end(self, cookie: str) -> None:
        """Forget a session."""
        self._sessions.pop(cookie, None)

    def csrf(self, cookie: str) -> str:
        """Return the CSRF token of a session: each form must send it, and no other site can know it."""
        return hmac.new(self._key, cookie.encode(), "sha256").hexdigest()

    def is_csrf(self, cookie: str, given: str) -> bool:
        """Return whether a form has sent the CSRF token of its session."""
        return hmac.compare_digest(self.csrf(cookie).encode(), given.encode())
