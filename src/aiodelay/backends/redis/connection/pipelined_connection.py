"""`PipelinedConnection`: a blocking connection for long reads.

A caller can send a command before it reads an answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError
from redis.retry import Retry

from aiodelay.backends.redis.records.keys import Keys, guard_of
from aiodelay.errors import StoreUnavailableError

from .client import Client
from .driver import quiet_options
from .faults import Fault, fault_of
from .locator import slot_of
from .login import is_stale, login_blocking
from .options import Options
from .scripts import Arg, packed, script

__all__ = ["PipelinedConnection"]

READ_BYTES = 262_144


class PipelinedConnection:
    """Sends commands to one server, and reads the answers in the same order. One thread uses it, without an event loop.

    Args:
        options: The server, the credentials and the time limit.
        keys: The keys of the namespace.
    """

    def __init__(self, options: Options, keys: Keys) -> None:
        self._options, self._keys = options, keys
        kwargs: dict[str, Any] = {
            **options.connection,
            "protocol": 2,
            "socket_timeout": options.timeout_ms / 1000,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "socket_read_size": READ_BYTES,
            "redis_connect_func": login_blocking,
        }
        kind: Any = SSLConnection if options.secure else Connection
        if options.socket:
            kind, kwargs["path"] = UnixDomainSocketConnection, options.socket
        kwargs |= quiet_options(kind)
        self._new_connection: Callable[..., Any] = lambda **given: kind(**(kwargs | given))
        self._connection: Any = None
        self._unread = 0
        self._answers: deque[Any] = deque()
        """Answers that were read before the connection logged in again, oldest first."""

    def __enter__(self) -> Self:
        """Connect to the server.

        Raises:
            StoreUnavailableError: The server cannot be reached.
        """
        try:
            place = {} if self._options.topology is None else asyncio.run(self._place())
            self._connection = self._new_connection(**place)
            self._connection.connect()
        except Fault as fault:
            raise StoreUnavailableError(self._options.name, fault.reason) from fault
        except (RedisError, OSError) as error:
            raise self._unavailable(error, sent=False) from error
        return self

    async def _place(self) -> dict[str, Any]:
        """Return the address of the namespace's server in a cluster or behind Sentinels."""
        client = Client(self._options, self._keys)
        try:
            assert client.locator is not None
            await client.command("TIME")  # It waits for the end of a failover, and checks the role of the server.
            address = await client.locator.locate(slot_of(self._keys.tag))
        finally:
            await client.aclose()
        return address._asdict()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.disconnect()

    def ask(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        """Send one command and return its answer.

        Raises:
            StoreUnavailableError: The server did not answer, or it refused the command.
        """
        self.send(packed(arguments))
        return self.answer()

    def ask_all(self, commands: list[tuple[Arg, ...]]) -> list[Any]:
        """Send all commands. Return their answers in the same order.

        Raises:
            StoreUnavailableError: The server did not answer, or it refused a command.
        """
        self.send(*(packed(each) for each in commands))
        return [self.answer() for _ in commands]

    def send(self, *commands: bytes) -> None:
        """Send commands, and read no answer. The caller then calls `answer` once for each command."""
        try:
            if is_stale(self._connection):
                self._log_in_again()
            self._connection.send_packed_command(commands, check_health=False)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        self._unread += len(commands)

    def answer(self) -> Any:  # noqa: ANN401 - any reply
        """Return the answer to the oldest command that has no answer yet."""
        if self._answers:
            return self._answers.popleft()
        try:
            return self._read()
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _read(self) -> Any:  # noqa: ANN401 - any reply
        self._unread -= 1
        return self._connection.read_response()

    def _log_in_again(self) -> None:
        """Open a new connection, because the token of this one may expire soon. Read the answers under way first."""
        while self._unread:
            self._answers.append(self._read())
        self._connection.disconnect()
        self._connection.connect()

    def run(self, name: str, *arguments: Arg) -> Any:  # noqa: ANN401 - what the script returns
        """Run a script of the store, and return its reply. The call sends the text of the script.

        Raises:
            StoreUnavailableError: The server did not answer, or it refused the script.
        """
        fixed = [*self._keys.fixed, guard_of(self._keys.tag)] if self._options.is_cluster else self._keys.fixed
        return self.ask("EVAL", script(name).text, len(fixed), *fixed, "", 0, "", *arguments)

    def _unavailable(self, error: Exception, *, sent: bool = True) -> StoreUnavailableError:
        fault = fault_of(error, sent=sent, timeout_ms=self._options.timeout_ms)
        return StoreUnavailableError(self._options.name, fault.reason)
