"""`OwnConnection`: a connection to a broker. `Start`: connects a client to one host after the other.

aiokafka logs whole requests at DEBUG (K9). The start of aiokafka's clients has three faults. A cancelled or refused
start leaves its connection open (K20). One silent host takes all the time (K25). The error gives no reason for any
host (K29).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from functools import partial
from typing import Any

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from .rebound import rebound

__all__ = ["OwnConnection", "Start", "connect"]

CLOSE_S = 1.0
"""Longest wait for a broker to end a TLS connection."""
_log = logging.getLogger("aiokafka.conn")


class _RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Logs like aiokafka, but logs whole requests only if somebody has set a level for aiokafka's loggers (K9)."""

    def debug(self, msg: object, *args: object, **_: Any) -> None:  # noqa: ANN401 - as `LoggerAdapter` has it
        """Log a request or its answer, payloads and passwords included."""
        if self.logger.isEnabledFor(logging.DEBUG) and _is_level_set():
            self.logger.debug(msg, *args)


class _LoginLog(logging.LoggerAdapter[logging.Logger]):
    """Logs like aiokafka, but warns about an unencrypted login only once, not at each connection."""

    _has_warned = False

    def warning(self, msg: object, *args: object, **_: Any) -> None:  # noqa: ANN401 - as `LoggerAdapter` has it
        """Log the first warning, and no other."""
        if not self._has_warned:
            self._has_warned = True
            self.logger.warning(msg, *args)


def _is_level_set() -> bool:
    return any(each.level != logging.NOTSET for each in (_log, logging.getLogger("aiokafka")))


_requests, _logins = _RequestLog(_log), _LoginLog(_log)


class OwnConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka has no types
    """A connection to one broker. It logs requests only if the user has set a level for aiokafka's loggers (K9)."""

    send = rebound(AIOKafkaConnection.send, log=_requests)
    _handle_frame = rebound(AIOKafkaConnection._handle_frame, log=_requests)
    _do_sasl_handshake = rebound(AIOKafkaConnection._do_sasl_handshake, log=_logins)


connect = rebound(create_conn, AIOKafkaConnection=OwnConnection)
"""Connects as aiokafka's `create_conn` does, and returns an `OwnConnection`."""


class Start:
    """The start of one client: it connects to one host after the other, until one answers.

    Args:
        hosts: The number of hosts. They share the time for an answer (K25).
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self.refusals: list[str] = []
        """The hosts that could not be used, each with the reason (K29)."""

    async def connect(self, host: str, port: int, *, request_timeout_ms: int, **options: Any) -> OwnConnection:  # noqa: ANN401 - aiokafka's
        """Connect to one host. The host's first answer decides whether the client can use the host.

        Raises:
            KafkaError, TimeoutError, OSError: The client cannot use the host.
        """
        where, security = f"{host}:{port}", options["security_protocol"]
        connection = OwnConnection(host, port, request_timeout_ms=request_timeout_ms // self._hosts, **options)
        try:
            await connection.connect()
        except (OSError, KafkaError, TimeoutError) as error:
            self.refusals.append(f"{where}: {_refusal(error, security)}")
            await _until_closed(connection)
            raise
        connection.send = partial(self._send_first, connection, where, security)
        return connection

    async def _send_first(self, connection: Any, where: str, security: str, request: Any) -> Any:  # noqa: ANN401 - aiokafka's
        del connection.send
        answer: Awaitable[Any] = connection.send(request)
        try:
            return await answer
        except Exception as error:
            self.refusals.append(f"{where}: {_refusal(error, security, has_answered=True)}")
            connection.close()
            await _until_closed(connection)
            raise
        except BaseException:
            connection.close()  # aiokafka leaves it open if the start is cancelled (K20)
            raise


async def _until_closed(connection: Any) -> None:  # noqa: ANN401 - aiokafka's
    """Wait until a connection is closed, if it was ever open. Over TLS, the broker must also end the connection."""
    if connection._protocol is not None:
        await asyncio.wait([connection._closed_fut], timeout=CLOSE_S)


def _refusal(error: Exception, security: str, *, has_answered: bool = False) -> str:
    """Return the reason why a host cannot be used, and the URL option that may be wrong. `remedies` searches this text.

    Args:
        error: The error of the connection.
        security: The `security` option of the connection.
        has_answered: Whether the broker has sent the versions of its API. A broker sends them before a login.
    """
    if isinstance(error, SaslAuthenticationFailed | UnsupportedSaslMechanismError | IllegalSaslStateError):
        return _login_refusal(error, security)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate is refused, ca_certs= may be missing: {error.verify_message}"
    if isinstance(error, ssl.SSLError | ConnectionResetError) and security.endswith("SSL"):
        why = str(error) or type(error).__name__
        return f"TLS fails, the port may be one without TLS, security={security} may be wrong: {why}"
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
    """Return why a broker may have ended the connection."""
    if has_answered and not security.startswith("SASL"):
        return f"the broker answers, then ends the connection: it may want a login, security={security} may be wrong"
    if has_answered:
        return "the broker answers, then ends the connection"
    if security.endswith("SSL"):
        return "the broker ends the connection after the TLS handshake, client_cert= may be missing"
    return f"the broker ends the connection, the port may be one for TLS, security={security} may be wrong"
