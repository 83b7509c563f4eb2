"""The first connection of aiokafka's clients, but for three faults.

A start that is cancelled or refused leaves it open (K20), one host that is silent takes all the time there is (K25),
and the error does not say why no host could be used (K29).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from aiokafka import client
from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from msgspec import Struct

__all__ = ["install"]

CLOSE_S = 1.0
"""Longest wait for a broker to take leave of a connection over TLS."""

_bootstrap = client.AIOKafkaClient.bootstrap


class _Start(Struct):
    """A client that starts.

    Attributes:
        hosts: How many hosts it may ask, one after the other.
        refusals: Hosts that could not be used, each with its reason.
    """

    hosts: int = 1
    refusals: list[str] = []


_start: ContextVar[_Start] = ContextVar("_start")


def install() -> None:
    """Have aiokafka's clients connect so; repeating it changes nothing."""
    client.create_conn, client.collect_hosts = _create_conn, _collect_hosts
    client.AIOKafkaClient.bootstrap = _tell_refusals


async def _tell_refusals(starting: Any) -> None:  # noqa: ANN401 - aiokafka's
    """Start a client; the error names each host, and why it could not be used."""
    start = _Start()
    _start.set(start)
    try:
        await _bootstrap(starting)
    except KafkaConnectionError as error:
        raise KafkaConnectionError("; ".join(start.refusals) or str(error)) from error


def _collect_hosts(servers: Sequence[str]) -> Any:  # noqa: ANN401 - aiokafka's
    found = collect_hosts(servers)
    _start.get().hosts = len(found)
    return found


async def _create_conn(*where: Any, on_close: Any = None, **options: Any) -> Any:  # noqa: ANN401 - aiokafka's
    if on_close is not None:  # of all connections, only the first one belongs to no client yet
        return await create_conn(*where, on_close=on_close, **options)
    start = _start.get()
    options["request_timeout_ms"] //= start.hosts
    host, security = f"{where[0]}:{where[1]}", options["security_protocol"]
    connection = AIOKafkaConnection(*where, **options)
    try:
        await connection.connect()
    except (OSError, KafkaError, TimeoutError) as error:
        start.refusals.append(f"{host}: {_refusal(error, security)}")
        await _until_closed(connection)
        raise
    connection.send = partial(_send_first, connection, start, host, security)
    return connection


async def _send_first(connection: Any, start: _Start, host: str, security: str, request: Any) -> Any:  # noqa: ANN401
    del connection.send
    answer: Awaitable[Any] = connection.send(request)
    try:
        return await answer
    except Exception as error:
        start.refusals.append(f"{host}: {_refusal(error, security, has_answered=True)}")
        connection.close()
        await _until_closed(connection)
        raise
    except BaseException:
        connection.close()
        raise


async def _until_closed(connection: Any) -> None:  # noqa: ANN401 - aiokafka's
    """Wait until a connection is closed, if there ever was one: over TLS, the broker takes leave as well."""
    if connection._protocol is not None:
        await asyncio.wait([connection._closed_fut], timeout=CLOSE_S)


def _refusal(error: Exception, security: str, *, has_answered: bool = False) -> str:
    """Say why a host cannot be used, and which option of the URL may be wrong; `remedies` looks for these words.

    Args:
        error: The error of the connection.
        security: The option that the connection was made with.
        has_answered: The broker has told its versions, which it tells before a login.
    """
    if isinstance(error, SaslAuthenticationFailed | UnsupportedSaslMechanismError | IllegalSaslStateError):
        return _login_refusal(error, security)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate is refused, ca_certs= may be missing: {error.verify_message}"
    if isinstance(error, ssl.SSLError | ConnectionResetError) and security.endswith("SSL"):
        why = str(error) or type(error).__name__
        return f"TLS fails, the port may be one without TLS, security={security} wrong: {why}"
    if isinstance(error, KafkaConnectionError):
        return _ending(security, has_answered=has_answered)
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)


def _login_refusal(error: KafkaError, security: str) -> str:
    if isinstance(error, SaslAuthenticationFailed):
        return f"user or password is refused: {error.args[0] if error.args else error}"
    if isinstance(error, UnsupportedSaslMechanismError):
        return f"the login is refused, sasl= may be wrong: {error}"
    return f"the broker takes no login at this port, security={security} may be wrong"


def _ending(security: str, *, has_answered: bool) -> str:
    """Say why a broker may have ended the connection."""
    if has_answered and not security.startswith("SASL"):
        return f"the broker answers, then ends the connection: it may want a login, security={security} may be wrong"
    if has_answered:
        return "the broker answers, then ends the connection"
    if security.endswith("SSL"):
        return "the broker ends the connection after the TLS handshake, client_cert= may be missing"
    return f"the broker ends the connection, the port may be one for TLS, security={security} may be wrong"
