"""The login of a new connection: credentials that a program computes, and the name of the connection.

Managed services let a client log in with a token that expires. A *credential provider* computes the token. Its
interface is `redis.CredentialProvider`, so the providers of cloud vendors fit.
"""

from __future__ import annotations

import asyncio
import pkgutil
from contextlib import suppress
from typing import Any

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ResponseError

from aiodelay.errors import ConfigurationError, cut, kind_of, shortened
from aiodelay.ports.clock import SystemClock

__all__ = ["LOGIN_LASTS_S", "Credentials", "checked_provider", "find_provider", "is_stale", "login", "login_blocking"]

CLIENT_NAME = "aiodelay"
LOGIN_LASTS_S = 240.0
"""How long a connection uses one answer of a credential provider, in seconds.

A service may end a connection whose token has expired. Clients of clouds renew a token 5 minutes before it expires, so
a token is valid for longer than this time.
"""
_CLOCK = SystemClock()
_ALLOWED = "an instance of redis.CredentialProvider"


class Credentials(CredentialProvider):
    """Asks a provider for credentials, and turns its errors into errors of redis-py.

    A provider that has only the method `get_credentials` runs in a thread, because it may wait for a server.

    Args:
        provider: The provider of the program.
    """

    def __init__(self, provider: CredentialProvider) -> None:
        self.provider = provider
        self._is_async = type(provider).get_credentials_async is not CredentialProvider.get_credentials_async

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return a password, or a user and a password.

        Raises:
            AuthenticationError: The provider failed, or returned something else.
        """
        try:
            return _checked(self.provider.get_credentials())
        except Exception as error:
            raise _failed(error) from error

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return a password, or a user and a password.

        Raises:
            AuthenticationError: The provider failed, or returned something else.
        """
        if not self._is_async:
            return await asyncio.to_thread(self.get_credentials)
        try:
            return _checked(await self.provider.get_credentials_async())
        except Exception as error:
            raise _failed(error) from error


def _checked(found: Any) -> tuple[str] | tuple[str, str]:  # noqa: ANN401 - anything that a provider returns
    if not isinstance(found, tuple) or len(found) not in (1, 2) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"it returned {kind_of(found)}, not a tuple with a user and a password")
    return found


def _failed(error: Exception) -> AuthenticationError:
    return AuthenticationError(f"the credential provider failed: {type(error).__name__}: {cut(str(error), 200)}")


def checked_provider(given: object) -> Credentials:
    """Return the credentials of a provider that a program gives.

    Raises:
        ConfigurationError: The object is not a credential provider.
    """
    if not isinstance(given, CredentialProvider):
        raise ConfigurationError("credential_provider", kind_of(given), _ALLOWED)
    return Credentials(given)


def find_provider(reference: str, masked: str) -> Credentials:
    """Import the provider that `MODULE:OBJECT` in a URL names.

    Raises:
        ConfigurationError: There is no such object, its import failed, or the object is not a credential provider.
    """
    setting, allowed = f"credential_provider in {masked}", f"MODULE:OBJECT, which names {_ALLOWED}"
    try:
        found = pkgutil.resolve_name(reference) if ":" in reference else None
    except Exception as error:  # the import runs the program's code
        text = f"{shortened(reference)}, whose import failed ({type(error).__name__}: {cut(str(error), 200)})"
        raise ConfigurationError(setting, text, allowed) from error
    if not isinstance(found, CredentialProvider):
        what = f", {kind_of(found)}" if found is not None else ""
        raise ConfigurationError(setting, f"{shortened(reference)}{what}", allowed)
    return Credentials(found)


def is_stale(connection: Any) -> bool:  # noqa: ANN401 - redis-py's connection
    """Return True if a connection should log in again, because its token may expire soon."""
    if connection.credential_provider is None:
        return False
    return bool(_CLOCK.monotonic_ms() >= connection.logged_in_ms + LOGIN_LASTS_S * 1000)


async def login(connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
    """Log in on a new connection, and name it. A service may refuse the name, which only CLIENT LIST shows."""
    await connection.on_connect()
    await connection.send_command("CLIENT", "SETNAME", CLIENT_NAME)
    with suppress(ResponseError):
        await connection.read_response()
    connection.logged_in_ms = _CLOCK.monotonic_ms()


def login_blocking(connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
    """Do the same as `login`, on a blocking connection."""
    connection.on_connect()
    connection.send_command("CLIENT", "SETNAME", CLIENT_NAME)
    with suppress(ResponseError):
        connection.read_response()
    connection.logged_in_ms = _CLOCK.monotonic_ms()
