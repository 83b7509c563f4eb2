"""`Client`: sends the scripts and commands of one store to its server. It sends each call at most once.

If a call fails, the client raises a `Fault`. The fault says whether the server may have carried out the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from aiodelay.backends.redis.records.keys import Keys, guard_of
from aiodelay.core.backoff import pause_s

from .driver import quiet_options
from .faults import Fault, fault_of, reply_of
from .locator import ClusterLocator, Locator, SentinelLocator, slot_of
from .login import login
from .options import Options
from .pool import ConnectionPool
from .scripts import NAMES, Arg, packed, script
from .topology import Address

__all__ = ["Client", "counted"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

RENEW_AFTER = 3
"""After this number of failed calls in a row, replace all connections and resolve host names again.

Only calls whose connection failed count.
"""
WAIT_GRACE_S = 0.5
"""Extra time for the answer to WAIT, because a server checks only ten times a second whether a WAIT has timed out."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
"""The pauses before a call is sent again because its key was moving to another server, in seconds."""
KEYLESS = frozenset({"CLUSTER", "CONFIG", "INFO", "SCAN", "SCRIPT", "TIME"})
KEY_PLACES = {"EVAL": 3, "MEMORY": 2}
"""The place of the key in a command, where it is not the first argument."""


class Client:
    """Sends scripts and commands to one server, or to the nodes of a cluster.

    On a cluster, each call goes to the node that owns the slot of its key. If a server has surely not carried out a
    call, because the slot or the role of the primary moves to another server, the client finds that server and sends
    the call again, until `timeout_ms` has passed.

    The retries of redis-py are off. A caller may repeat a failed command with the same op or request id. The server
    then recognises the repetition.

    Args:
        options: The server, the credentials and the limits of the connections.
        keys: The keys to pass to every script of a store. None for a client that serves no store.
        writer: The name of this process in the stream of wake-ups.

    Attributes:
        locator: Finds the server of a key; None = the server in the URL.
        place: The name of the server in messages: the URL without secrets, on a cluster after the address that `node`
            has found.
    """

    def __init__(self, options: Options, keys: Keys | None = None, writer: str = "") -> None:
        self._options = options
        self._failures, self._is_closed = 0, False
        self._timeout_s = self._patience_s = options.timeout_ms / 1000
        self._fixed: list[Arg] = [] if keys is None else counted(options, keys.fixed)
        self._home = 0 if keys is None else slot_of(keys.tag)
        self._writer = writer
        self.place: str = options.name
        self.locator: Locator | None = self._new_locator()
        self._pools: dict[Address, ConnectionPool] = {}
        self._pool = self._new_pool()

    def _new_locator(self) -> Locator | None:
        topology = self._options.topology
        if topology is None:
            return None
        kind, kwargs = _connection_of(self._options)
        known = ClusterLocator if topology.kind == "cluster" else SentinelLocator
        return known(self._options.name, topology, lambda **given: kind(**(kwargs | given)))

    def _new_pool(self, address: Address | None = None) -> ConnectionPool:
        kind, kwargs = _connection_of(self._options)
        if address is not None:
            kwargs |= {"host": address.host, "port": address.port, "redis_connect_func": self._enter}
        return ConnectionPool(lambda: kind(**kwargs), self._options.connections)

    def apart(self) -> Client:
        """Return a new client of the same server, for another event loop. It shares no connection with this client."""
        return Client(self._options)

    async def node(self) -> Address | None:
        """Return the address of the server that has the keys of the store; None = the server in the URL.

        Raises:
            Fault: The server did not answer.
        """
        if self.locator is None:
            return None
        await self.command("TIME")  # this call waits while the keys move to another server
        address = await self.locator.locate(self._home)
        if self._options.is_cluster:
            self.place = f"{address} of {self._options.name}"
        return address

    async def new_connection(self, key: str) -> Any:  # noqa: ANN401 - redis-py's connection
        """Return a new connection for reads of a key that block. It is not in the pool, and it is not connected yet.

        Raises:
            Fault: The server of the key was not found.
        """
        kind, kwargs = _connection_of(self._options)
        if self.locator is not None:
            kwargs["host"], kwargs["port"] = await self.locator.locate(slot_of(key))
            kwargs["redis_connect_func"] = self._enter
        return kind(**kwargs)

    async def _enter(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Log in on a new connection to a server that the locator has found."""
        assert self.locator is not None
        await login(connection)
        await self.locator.confirm(connection)

    def is_current(self, key: str, connection: Any) -> bool:  # noqa: ANN401 - redis-py's connection
        """Return False if a call has found the key on another server than the connection's."""
        if self.locator is None:
            return True
        return self.locator.is_current(slot_of(key), Address(connection.host, connection.port))

    def lost(self, key: str, connection: Any, error: BaseException) -> None:  # noqa: ANN401 - redis-py's connection
        """Look for the server of a key again, because a connection from `new_connection` failed."""
        if self.locator is not None:
            self.locator.lost(slot_of(key), Address(connection.host, connection.port), error)

    async def aclose(self) -> None:
        """Close all connections of the client. A second call does nothing."""
        self._is_closed = True
        try:
            for pool in (self._pool, *self._pools.values()):
                await pool.close()
        finally:
            if self.locator is not None:
                await self.locator.aclose()

    # --- calls --------------------------------------------------------------------------------------------

    async def run(self, name: str, arguments: Sequence[Arg], *, now_ms: int | None, durable: bool = False) -> Any:  # noqa: ANN401 - what the script returns
        """Run a script of the store, and return its reply. Send the script's text only if the server does not know it.

        Args:
            name: The name of the script.
            arguments: The arguments from ARGV[4] on.
            now_ms: The time that the script uses instead of the server's time. With None, it uses the server's time.
            durable: If True, wait until the call has reached the durability level of the options.

        Raises:
            Fault: The call failed.
        """
        return await self._evaluate(name, [*self._common(now_ms), *arguments], self._home, durable=durable)

    async def run_parts(
        self, name: str, parts: Sequence[Sequence[Arg]], *, now_ms: int | None, durable: bool = False
    ) -> list[Any]:
        """Run a script of the store once for each part, in order. Send all parts in one round trip.

        The server may serve other clients between two parts.

        Args:
            name: The name of the script.
            parts: The arguments of each part, from ARGV[4] on.
            now_ms: The time that the script uses instead of the server's time. With None, it uses the server's time.
            durable: If True, wait until all parts have reached the durability level of the options.

        Returns:
            The reply of each part, or a `Fault` if the server has refused the part.

        Raises:
            Fault: The server did not answer. It may have carried out any of the parts.
        """
        head = ["EVALSHA", script(name).sha, *self._common(now_ms)]
        replies = await self._exchange([packed([*head, *part]) for part in parts], self._home, durable=durable)
        for i, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                try:
                    replies[i] = await self.run(name, parts[i], now_ms=now_ms, durable=durable)
                except Fault as fault:
                    replies[i] = fault
        return replies

    def _common(self, now_ms: int | None) -> list[Arg]:
        """Return the keys, and the arguments up to ARGV[3], of every script of the store."""
        return [*self._fixed, "" if now_ms is None else now_ms, self._options.journal, self._writer]

    async def run_on(self, name: str, keys: Sequence[str], arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - what the script returns
        """Run a script of `STANDALONE` on the given keys, and return its reply. No other key is sent.

        Args:
            name: The name of the script.
            keys: The keys.
            arguments: The arguments from ARGV[1] on.
            durable: If True, wait until the call has reached the durability level of the options.

        Raises:
            Fault: The call failed.
            TargetError: The first key cannot be used on a cluster.
        """
        slot = slot_of(keys[0]) if self._options.is_cluster else 0
        return await self._evaluate(name, [*counted(self._options, keys), *arguments], slot, durable=durable)

    async def _evaluate(self, name: str, tail: Sequence[Arg], slot: int, *, durable: bool) -> Any:  # noqa: ANN401 - what the script returns
        source = script(name)
        try:
            return await self._call(packed(["EVALSHA", source.sha, *tail]), slot, durable=durable)
        except NoScriptError:
            pass
        try:
            return await self._call(packed(["EVAL", source.text, *tail]), slot, durable=durable)
        except NoScriptError as error:
            raise fault_of(error, sent=True) from error

    async def load_scripts(self) -> None:
        """Load the scripts that the server does not have yet. A later call then sends only the hash of its script.

        If the server forbids SCRIPT, this method loads nothing. The first call of each script then sends the script's
        text.

        Raises:
            Fault: The server did not answer.
        """
        try:
            known = await self.command("SCRIPT", "EXISTS", *(script(name).sha for name in NAMES))
            for name, is_known in zip(NAMES, known, strict=True):
                if not is_known:
                    await self.command("SCRIPT", "LOAD", script(name).text)
        except Fault as fault:
            if fault.is_connection:
                raise

    async def command(self, *arguments: Arg, durable: bool = False) -> Any:  # noqa: ANN401 - what the command returns
        """Send one command and return the reply.

        Args:
            arguments: The name of the command and its arguments.
            durable: If True, wait until the call has reached the durability level of the options.

        Raises:
            Fault: The command failed.
        """
        try:
            return await self._call(packed(arguments), _slot_of(self._options, self._home, arguments), durable=durable)
        except NoScriptError as error:
            raise fault_of(error, sent=True) from error

    async def commands(self, commands: Sequence[Sequence[Arg]], *, durable: bool = False) -> list[Any]:
        """Send commands in one round trip, and return their replies. The keys of all commands share a hash slot.

        Args:
            commands: The name of each command and its arguments.
            durable: If True, wait until the commands have reached the durability level of the options.

        Raises:
            Fault: A command failed.
        """
        replies = await self._exchange(
            [packed(each) for each in commands], _slot_of(self._options, self._home, commands[0]), durable=durable
        )
        for reply in replies:
            if isinstance(reply, Fault):
                raise reply
        return replies

    async def _call(self, command: bytes, slot: int, *, durable: bool) -> Any:  # noqa: ANN401 - any reply
        (reply,) = await self._exchange([command], slot, durable=durable)
        if isinstance(reply, Fault | NoScriptError):
            raise reply
        return reply

    async def _exchange(self, commands: Sequence[bytes], slot: int, *, durable: bool) -> list[Any]:
        """Send commands. Return the reply to each command, or a `Fault` or `NoScriptError` if the server refused it."""
        if self.locator is None:
            return await self._sent(self._pool, commands, durable=durable)
        ends_s = asyncio.get_running_loop().time() + self._patience_s
        replies: list[Any] = []
        try:
            for failures in count():
                replies = await self._sent_to_owner(self.locator, slot, commands, ends_s, durable=durable)
                if self._is_closed or not all(isinstance(each, Fault) and each.is_moving for each in replies):
                    return replies
                async with asyncio.timeout_at(ends_s):
                    await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
        except TimeoutError:
            if replies:
                return replies
            reason = f"no server was found within {self._patience_s * 1000:.0f} ms"
            raise Fault("unavailable", reason, is_connection=True, is_moving=True) from None
        finally:
            if self._is_closed:  # This call may have opened connections since.
                await self.aclose()
        raise AssertionError

    async def _sent_to_owner(
        self, locator: Locator, slot: int, commands: Sequence[bytes], ends_s: float, *, durable: bool
    ) -> list[Any]:
        """Send commands to the server of a slot. If the server has surely carried out none, return their faults.

        Raises:
            TimeoutError: The search for the server has lasted until `ends_s`, in the time of the event loop.
        """
        address = locator.known(slot)
        pool = None if address is None else self._pools.get(address)
        if address is None or pool is None:
            try:
                async with asyncio.timeout_at(ends_s):  # The call itself has a limit of its own.
                    address = await locator.locate(slot)
                    pool = await self._pool_at(address)
            except Fault as fault:
                if not fault.is_moving:
                    raise
                return [fault] * len(commands)
        try:
            replies = await self._sent(pool, commands, durable=durable)
        except Fault as fault:
            locator.lost(slot, address, fault.__cause__)
            if not fault.is_moving:
                raise
            if fault.__cause__ is not None:  # Otherwise the locator itself has refused the server.
                fault.reason = f"{address}, which {locator.role}, does not answer: {fault.reason}"
            return [fault] * len(commands)
        except asyncio.CancelledError:  # The caller has a shorter limit. The server may be silent, and replaced.
            locator.lost(slot, address)
            raise
        moved = [each for each in replies if isinstance(each, Fault) and each.is_moving]
        if moved:
            locator.lost(slot, address, moved[0].__cause__)
        return replies

    async def _pool_at(self, address: Address) -> ConnectionPool:
        pool = self._pools.get(address)
        if pool is None:
            if not self._options.is_cluster:  # Write no more to a server that is no longer the primary.
                former, self._pools = self._pools, {}
                self._pools[address] = pool = self._new_pool(address)
                for each in former.values():
                    await each.close()
            else:
                self._pools[address] = pool = self._new_pool(address)
                assert isinstance(self.locator, ClusterLocator)
                await _close_left(self._pools, self.locator, address)
        return pool

    async def _sent(self, pool: ConnectionPool, commands: Sequence[bytes], *, durable: bool) -> list[Any]:
        sent = False
        wait = _wait_command(self._options) if durable else b""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                connection = await pool.take()
                try:
                    sent = True
                    await connection.send_packed_command([*commands, wait] if wait else commands, check_health=False)
                    replies = [await reply_of(connection) for _ in commands]
                    if wait:
                        limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s + WAIT_GRACE_S)
                    confirmed = await reply_of(connection) if wait else None
                except BaseException:
                    # The connection still has an unread answer, which the next command would take for its own. So close
                    # it.
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    await pool.give_back(connection)
        except (RedisError, OSError, TimeoutError) as error:
            fault = fault_of(error, sent=sent, timeout_ms=self._options.timeout_ms)
            if sent and len(commands) > 1:  # The server refused one command, and may have carried out another.
                fault.kind = "unknown"
            await self._failed(fault, pool)
            raise fault from error
        if not any(isinstance(reply, ResponseError) for reply in replies):
            self._failures = 0
        unconfirmed = _unconfirmed(self._options, confirmed) if wait else None
        return [
            await self._refused(reply, pool) if isinstance(reply, ResponseError) else unconfirmed or reply
            for reply in replies
        ]

    async def _refused(self, error: ResponseError, pool: ConnectionPool) -> Fault | NoScriptError:
        if isinstance(error, NoScriptError):
            return error
        fault = fault_of(error, sent=True)
        fault.__cause__ = error
        await self._failed(fault, pool)
        return fault

    async def _failed(self, fault: Fault, pool: ConnectionPool) -> None:
        """Count failed connections. After `RENEW_AFTER` failures in a row, replace the pool by a new one."""
        if not fault.is_connection:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= RENEW_AFTER and pool is self._pool:
            log.warning(
                "%s: %d calls failed in a row (%s); connecting again", self._options.name, self._failures, fault.reason
            )
            self._failures = 0
            self._pool = self._new_pool()
            await pool.close()


async def _close_left(pools: dict[Address, ConnectionPool], locator: ClusterLocator, new: Address) -> None:
    """Close the connections to nodes that have left the cluster. A MOVED error may have named the new node."""
    left = [each for each in pools if each != new and not locator.names(each)]
    for address in left:
        pool = pools.get(address)
        if pool is not None and pool.is_idle:
            del pools[address]
            await pool.close_idle()


def counted(options: Options, keys: Sequence[str]) -> list[Arg]:
    """Return the keys of a script after their number. On a cluster, a key that never exists comes last."""
    given = [*keys, guard_of(keys[0])] if options.is_cluster else keys
    return [len(given), *given]


def _connection_of(options: Options) -> tuple[type[Any], dict[str, Any]]:
    kwargs = {
        **options.connection,
        # `_call` sets the time limits. redis-py's limits use asyncio.wait_for, which loses cancellations in Python
        # 3.11.
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "redis_connect_func": login,
    }
    kind: type[Any] = SSLConnection if options.secure else Connection
    if options.socket:
        kind, kwargs["path"] = UnixDomainSocketConnection, options.socket
    else:
        kwargs["socket_keepalive"] = True
    return kind, {**kwargs, **quiet_options(kind)}


def _wait_command(options: Options) -> bytes:
    level, replicas = options.durability
    if level == "replicated":
        return packed(["WAIT", replicas, options.timeout_ms])
    return packed(["WAITAOF", 1, 0, options.timeout_ms]) if level == "fsynced" else b""


def _unconfirmed(options: Options, confirmed: Any) -> Fault | None:  # noqa: ANN401 - WAIT's number or WAITAOF's two, or an error
    """Return the fault if the level of durability was not reached. A server may refuse to wait for it.

    An example is WAITAOF without an append-only file.
    """
    level, replicas = options.durability
    if level == "fsynced":
        if not isinstance(confirmed, list) or confirmed[0] < 1:
            reason = f"the call is done, but is not on disk after {options.timeout_ms} ms"
            return Fault("unknown", reason, is_unconfirmed=True)
    elif not isinstance(confirmed, int) or confirmed < replicas:
        reached = confirmed if isinstance(confirmed, int) else 0
        return Fault(
            "unknown",
            f"the call is done, but only {reached} of {replicas} replicas have it after {options.timeout_ms} ms",
            is_unconfirmed=True,
        )
    return None


def _slot_of(options: Options, home: int, command: Sequence[Arg]) -> int:
    """Return the hash slot of a command's key. `home` is the slot of the client's namespace."""
    name = str(command[0])
    if not options.is_cluster or name in KEYLESS:
        return home
    return slot_of(command[KEY_PLACES.get(name, 1)])
