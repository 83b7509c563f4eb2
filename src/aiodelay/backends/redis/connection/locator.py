"""Locators find the server that holds a key: the node of a cluster, or the primary that Sentinels watch.

A locator asks the servers of its `Topology`. It remembers the answer until its client reports the address as lost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from redis.crc import key_slot
from redis.exceptions import AuthenticationError, MovedError, RedisError, ResponseError

from aiodelay.errors import StoreMismatchError

from .driver import has_ended_or_data, of_its_class
from .faults import Fault, fault_of, reply_of
from .pool import disconnect_all
from .scripts import Arg, packed
from .topology import Address, Topology

__all__ = ["ClusterLocator", "Locator", "NewConnection", "SentinelLocator", "slot_of"]

NewConnection = Callable[..., Any]
"""Makes a connection of redis-py from its arguments."""
ASK_S = 1.0
"""Longest wait for the answer of one server about the topology, in seconds."""
LAST_S = 0.1
"""Longest wait for the other Sentinels after a majority has answered, in seconds."""
LOOK_S = 0.1
"""Least time between two looks at the announcements of the Sentinels, in seconds."""

_State: TypeAlias = tuple[int, Address]
"""A configuration epoch, and the address of the primary since then. A failover raises the epoch."""


def slot_of(key: Arg) -> int:
    """Return the hash slot of a key."""
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))


class Locator(ABC):
    """Finds the server for a hash slot.

    Args:
        name: The URL without its secrets, for error texts.
        topology: The servers to ask.
        connect: Makes a connection with the arguments of the URL, and with the given host and port.
    """

    def __init__(self, name: str, topology: Topology, connect: NewConnection) -> None:
        self._name, self._topology, self._connect = name, topology, connect
        self._announced = dict(topology.announce)
        self._asking = asyncio.Lock()
        self._known: dict[int, Address] = {}

    async def locate(self, slot: int) -> Address:
        """Return the address of the server that serves a slot. Ask only if the address is not known.

        Raises:
            Fault: No server knows the address, or the URL does not fit the servers.
        """
        slot = self._place(slot)
        await self._look()
        if slot not in self._known:
            async with self._asking:
                if slot not in self._known:
                    self._known[slot] = await self._ask(slot)
        return self._known[slot]

    def known(self, slot: int) -> Address | None:
        """Return the address of the server that serves a slot; None if `locate` has to find it."""
        return self._known.get(self._place(slot))

    def lost(self, slot: int, address: Address, error: BaseException | None = None) -> None:
        """Forget the address of a slot, because a call to it failed. A MOVED error names the next address."""
        slot = self._place(slot)
        if self._known.get(slot) != address:  # Another call has found the new address already.
            return
        del self._known[slot]
        moved = None if error is None else of_its_class(error)
        if isinstance(moved, MovedError):
            self._known[slot] = self._mapped(Address(moved.host or address.host, moved.port))

    def is_current(self, slot: int, address: Address) -> bool:
        """Return False if a call has found that another address serves the slot."""
        return self._known.get(self._place(slot), address) == address

    @property
    @abstractmethod
    def role(self) -> str:
        """What the servers say of the address that they name, for error texts."""

    async def confirm(self, connection: Any) -> None:  # noqa: ANN401, B027 - a node of a cluster knows its role
        """Check that a new connection leads to the server of its keys.

        Raises:
            Fault: It leads to another server.
        """

    async def aclose(self) -> None:  # noqa: B027 - only some locators keep a connection
        """Close the connections of the locator."""

    def _place(self, slot: int) -> int:
        return slot

    async def _look(self) -> None:  # noqa: B027 - only some locators hear of changes
        """Forget the address if the servers have announced another one."""

    @abstractmethod
    async def _ask(self, slot: int) -> Address:
        """Ask the servers for the address of a slot."""

    def _mapped(self, address: Address) -> Address:
        return self._announced.get(address, address)

    async def _answers(self, address: Address, *commands: Sequence[Arg], **login: Any) -> list[Any]:  # noqa: ANN401 - redis-py's
        """Return the answers of one server, each of which may be a `ResponseError`."""
        connection = self._connect(host=address.host, port=address.port, **login)
        try:
            async with asyncio.timeout(ASK_S):
                await connection.connect()
                await connection.send_packed_command([packed(each) for each in commands], check_health=False)
                return [await reply_of(connection) for _ in commands]
        finally:
            await connection.disconnect(nowait=True)


class ClusterLocator(Locator):
    """Asks the nodes of a cluster which node owns a slot."""

    def __init__(self, name: str, topology: Topology, connect: NewConnection) -> None:
        super().__init__(name, topology, connect)
        self._nodes = deque(topology.seeds)

    @property
    def role(self) -> str:
        return "the cluster names as the owner of the slot"

    def lost(self, slot: int, address: Address, error: BaseException | None = None) -> None:
        """Forget the address of a slot, and ask this node after all others."""
        super().lost(slot, address, error)
        if address in self._nodes:
            self._nodes.remove(address)
            self._nodes.append(address)

    async def _ask(self, slot: int) -> Address:
        problems: list[str] = []
        for node in tuple(self._nodes):
            # Ask another node the next time: this one may be silent, and the caller may not wait for long. A node that
            # is cut off gives an old answer.
            self._nodes.rotate(-1)
            try:
                (slots,) = await self._answers(node, ["CLUSTER", "SLOTS"])
            except AuthenticationError as error:
                raise fault_of(error, sent=False) from error
            except (RedisError, OSError, TimeoutError) as error:
                problems.append(_problem(node, error))
                continue
            if isinstance(slots, ResponseError):
                raise self._refused(node, slots)
            owner = self._owner(node, slots, slot)
            if owner is not None:
                return owner
            problems.append(f"{node}: no node serves slot {slot}")
        reason = f"no node of the cluster names the owner of slot {slot}: {'; '.join(problems)}"
        raise Fault("unavailable", reason, is_connection=True, is_moving=True)

    def names(self, address: Address) -> bool:
        """Return whether the URL or the last answer of a node names a node."""
        return address in self._nodes

    def _owner(self, node: Address, slots: Sequence[Any], slot: int) -> Address | None:
        owner: Address | None = None
        named: dict[Address, None] = {}
        for first, last, *servers in slots:
            found = [self._mapped(Address(_host(server[0], node), int(server[1]))) for server in servers]
            named |= dict.fromkeys(found)
            if first <= slot <= last:
                owner = found[0]
        # Keep the order in which the nodes are asked. Nodes that are not named may be away, or have left the cluster.
        known = (each for each in self._nodes if each in named)
        self._nodes = deque(dict.fromkeys((*known, *named, *self._topology.seeds)))
        return owner

    def _refused(self, node: Address, error: ResponseError) -> Fault:
        if "cluster support disabled" in str(error):
            scheme = self._name.partition("://")[0].replace("+cluster", "")
            value = f"{self._name.partition('://')[0]}, but {node} is a single server"
            mismatch = StoreMismatchError(f"scheme of {self._name}", value, f"{scheme}://{node}")
            return Fault("unavailable", str(mismatch), mismatch=mismatch)
        return fault_of(error, sent=False)


class SentinelLocator(Locator):
    """Asks Sentinels for the address of the primary, and hears when they choose another primary.

    A primary may have been replaced without knowing it: it was cut off, or it was down and came back. So:

    - The locator subscribes to the announcements of each Sentinel before it asks the Sentinel. So it hears of each
      change after the answer.
    - The answer with the highest configuration epoch counts. The locator does not return to an earlier configuration.
    - A new connection is used once the Sentinels have named its server again (`confirm`).
    """

    def __init__(self, name: str, topology: Topology, connect: NewConnection) -> None:
        super().__init__(name, topology, connect)
        self._login: dict[str, Any] = {"username": None, "password": None, **dict(topology.login)}
        self._login |= {"db": 0, "protocol": 2, "credential_provider": None}
        self._announcements: dict[Address, Any] = {}
        self._looks_s = 0.0
        self._asks = 0
        self._newest: _State | None = None
        self.silent: list[str] = []

    @property
    def role(self) -> str:
        away = f" ({len(self.silent)} of {len(self._topology.seeds)} Sentinels do not answer)" if self.silent else ""
        return f"the Sentinels name as the primary{away}"

    def _place(self, slot: int) -> int:
        return 0

    async def aclose(self) -> None:
        announcements, self._announcements = self._announcements, {}
        await disconnect_all(announcements.values())

    async def confirm(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Check that a new connection leads to the primary. Ask the Sentinels after the connection was made.

        Otherwise the server could have been replaced before the connection, and have come back as a primary.

        Raises:
            Fault: The server is not the primary, or no Sentinel answers.
        """
        server, asks = Address(connection.host, connection.port), self._asks
        async with self._asking:
            if self._asks == asks:  # No other connection has asked meanwhile.
                self._known[0] = await self._ask(0)
        if self._newest is not None and self._newest[1] != server:
            raise self._moving(f"{server} is no longer the primary, which is now {self._newest[1]}")
        await connection.send_packed_command([packed(["INFO", "replication"])], check_health=False)
        info = await reply_of(connection)
        if isinstance(info, bytes) and b"role:master" not in info:
            raise self._moving(f"{server}, which {self.role}, is a replica, so a failover is under way")

    def known(self, slot: int) -> Address | None:
        """Return the address of the primary; None if `locate` has to find it, or to look at the announcements."""
        return super().known(slot) if asyncio.get_running_loop().time() < self._looks_s else None

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._looks_s:
            return
        self._looks_s = now_s + LOOK_S
        for sentinel, announcements in tuple(self._announcements.items()):
            with suppress(RedisError, OSError):
                if not await has_ended_or_data(announcements):
                    continue
            # Either there is another primary, or the connection has ended. In both cases, ask.
            del self._announcements[sentinel]
            await announcements.disconnect(nowait=True)
            self._known.clear()

    async def _ask(self, slot: int) -> Address:
        self._asks += 1
        states: list[_State] = []
        self.silent, is_refused = [], False
        for sentinel, state in (await self._states()).items():
            if isinstance(state, Fault):
                raise state
            if isinstance(state, Exception):
                is_refused |= isinstance(state, AuthenticationError)
                self.silent.append(_problem(sentinel, state))
            else:
                states.append(state)
        if not states:
            what = "no Sentinel accepts the login" if is_refused else "no Sentinel answers"
            raise self._moving(f"{what}: {'; '.join(self.silent)}", is_moving=not is_refused)
        if self.silent and self._newest is not None:  # The others may not have heard of the newest one yet.
            states.append(self._newest)
        self._newest = max(states)
        return self._newest[1]

    async def _states(self) -> dict[Address, _State | Exception]:
        """Ask all Sentinels at the same time. If a majority has answered, wait only `LAST_S` for the others."""
        seeds, clock = self._topology.seeds, asyncio.get_running_loop().time
        ends_s = clock() + ASK_S
        async with asyncio.TaskGroup() as tasks:
            asked = {each: tasks.create_task(self._state_or_problem(each)) for each in seeds}
            waiting = set(asked.values())
            while waiting and clock() < ends_s:
                _, waiting = await asyncio.wait(waiting, timeout=ends_s - clock(), return_when=asyncio.FIRST_COMPLETED)
                answered = sum(each.done() and isinstance(each.result(), tuple) for each in asked.values())
                if 2 * answered > len(seeds):
                    ends_s = min(ends_s, clock() + LAST_S)
            for task in waiting:
                task.cancel()
        return {each: TimeoutError() if task.cancelled() else task.result() for each, task in asked.items()}

    async def _state_or_problem(self, sentinel: Address) -> _State | Exception:
        try:
            async with asyncio.timeout(ASK_S):
                return await self._state(sentinel)
        except (RedisError, OSError, TimeoutError, Fault) as error:
            return error

    async def _state(self, sentinel: Address) -> _State:
        """Return the configuration epoch of the primary, and its address."""
        await self._listen(sentinel)
        name = self._topology.primary
        # The epoch comes first: a Sentinel that leads a failover raises both at once, and the fields of MASTER still
        # have the former address until the failover has ended.
        state, address, others = await self._answers(
            sentinel,
            ["SENTINEL", "MASTER", name],
            ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", name],
            ["SENTINEL", "MASTERS"],
            **self._login,
        )
        for each in (state, address):
            if isinstance(each, ResponseError):
                raise self._refused(sentinel, each, others)
        host, port = address
        return int(_fields(state)["config-epoch"]), self._mapped(Address(host.decode(), int(port)))

    def _refused(self, sentinel: Address, error: ResponseError, others: Any) -> Fault:  # noqa: ANN401 - redis-py's reply
        if "No such master" in str(error) and not isinstance(others, ResponseError):
            name = self._topology.primary
            known = ", ".join(sorted(_fields(each)["name"] for each in others)) or "none: it watches no primary"
            return self._misfit(f"primary in {self._name}", f"{name!r}, which {sentinel} does not know", known)
        if "unknown command" in str(error).lower():
            scheme = self._name.partition("://")[0].replace("+sentinel", "")
            value = f"{sentinel}, which is no Sentinel"
            return self._misfit(f"Sentinels of {self._name}", value, f"Sentinels, or {scheme}://{sentinel}")
        return fault_of(error, sent=False)

    def _misfit(self, setting: str, value: str, allowed: str) -> Fault:
        mismatch = StoreMismatchError(setting, value, allowed)
        return Fault("unavailable", str(mismatch), mismatch=mismatch)

    def _moving(self, reason: str, *, is_moving: bool = True) -> Fault:
        return Fault("unavailable", reason, is_connection=True, is_moving=is_moving)

    async def _listen(self, sentinel: Address) -> None:
        """Subscribe to the announcements of a Sentinel. If it refuses, only failed calls find a change."""
        if sentinel in self._announcements:
            return
        connection = self._connect(host=sentinel.host, port=sentinel.port, **self._login)
        try:
            await connection.connect()
            await connection.send_packed_command([packed(["SUBSCRIBE", "+switch-master"])], check_health=False)
            await reply_of(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._announcements[sentinel] = connection


def _problem(server: Address, error: BaseException) -> str:
    """Return the address of a server with the reason of its failure, on one line."""
    if type(error) is TimeoutError:
        return f"{server}: no answer within {ASK_S:g} s"
    return f"{server}: {' '.join(str(error).split()) or type(error).__name__}"


def _host(given: object, node: Address) -> str:
    """Return the host of a node. A node that does not know its host gives none, and has the host of the node asked."""
    text = given.decode() if isinstance(given, bytes) else ""
    return node.host if text in ("", "?") else text


def _fields(flat: Iterable[bytes]) -> dict[str, str]:
    values = [each.decode("utf-8", "backslashreplace") for each in flat]
    return dict(zip(values[::2], values[1::2], strict=True))
