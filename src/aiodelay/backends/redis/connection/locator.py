"""Locators find the server that holds a key: the node of a cluster, or the primary that Sentinels watch.

A locator asks the servers of its `Topology`. It remembers the answer until its client reports the address as lost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AuthenticationError, MovedError, RedisError, ResponseError

from aiodelay.errors import StoreMismatchError

from .faults import Fault, fault_of, reply_of
from .scripts import Arg, packed
from .topology import Address, Topology

__all__ = ["ClusterLocator", "Locator", "NewConnection", "SentinelLocator", "slot_of"]

NewConnection = Callable[..., Any]
"""Makes a connection of redis-py from its arguments."""
ASK_S = 1.0
"""Longest wait for the answer of one server about the topology, in seconds."""
LOOK_S = 0.1
"""Least time between two looks at the announcements of the Sentinels, in seconds."""


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

    def lost(self, slot: int, address: Address, error: BaseException | None = None) -> None:
        """Forget the address of a slot, because a call to it failed. A MOVED error names the next address."""
        slot = self._place(slot)
        if self._known.get(slot) != address:  # Another call has found the new address already.
            return
        del self._known[slot]
        if isinstance(error, MovedError):
            self._known[slot] = self._mapped(Address(error.host or address.host, error.port))

    def is_current(self, slot: int, address: Address) -> bool:
        """Return False if a call has found that another address serves the slot."""
        return self._known.get(self._place(slot), address) == address

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

    async def _ask(self, slot: int) -> Address:
        problems: list[str] = []
        for node in tuple(self._nodes):
            try:
                (slots,) = await self._answers(node, ["CLUSTER", "SLOTS"])
            except AuthenticationError as error:
                raise fault_of(error, sent=False) from error
            except (RedisError, OSError, TimeoutError) as error:
                problems.append(_problem(node, error))
                self._nodes.rotate(-1)
                continue
            if isinstance(slots, ResponseError):
                raise self._refused(node, slots)
            self._nodes.rotate(-1)  # A node that is cut off gives an old answer. So ask another node the next time.
            owner = self._owner(node, slots, slot)
            if owner is not None:
                return owner
            problems.append(f"{node}: no node serves slot {slot}")
        reason = f"no node of the cluster names the owner of slot {slot}: {'; '.join(problems)}"
        raise Fault("unavailable", reason, is_connection=True, is_moving=True)

    def _owner(self, node: Address, slots: Sequence[Any], slot: int) -> Address | None:
        owner: Address | None = None
        for first, last, *servers in slots:
            found = [self._mapped(Address(_host(server[0], node), int(server[1]))) for server in servers]
            self._nodes.extend(each for each in found if each not in self._nodes)
            if first <= slot <= last:
                owner = found[0]
        return owner

    def _refused(self, node: Address, error: ResponseError) -> Fault:
        if "cluster support disabled" in str(error):
            scheme = self._name.partition("://")[0].replace("+cluster", "")
            value = f"{self._name.partition('://')[0]}, but {node} is a single server"
            mismatch = StoreMismatchError(f"scheme of {self._name}", value, f"{scheme}://{node}")
            return Fault("unavailable", str(mismatch), mismatch=mismatch)
        return fault_of(error, sent=False)


class SentinelLocator(Locator):
    """Asks Sentinels for the address of the primary, and hears when they choose another primary."""

    def __init__(self, name: str, topology: Topology, connect: NewConnection) -> None:
        super().__init__(name, topology, connect)
        self._login: dict[str, Any] = {"username": None, "password": None, **dict(topology.login)}
        self._login |= {"db": 0, "protocol": 2}
        self._announcements: Any = None
        self._looks_s = 0.0
        self.silent: list[str] = []

    def _place(self, slot: int) -> int:
        return 0

    async def aclose(self) -> None:
        announcements, self._announcements = self._announcements, None
        if announcements is not None:
            await announcements.disconnect(nowait=True)

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._announcements is None or now_s < self._looks_s:
            return
        self._looks_s = now_s + LOOK_S
        try:
            if not await self._announcements.can_read():
                return
        except (RedisError, OSError):
            pass
        # Either there is another primary, or the connection has ended. In both cases, ask.
        await self.aclose()
        self._known.clear()

    async def _ask(self, slot: int) -> Address:
        asked = [self._state(each) for each in self._topology.seeds]
        found = await asyncio.gather(*asked, return_exceptions=True)
        states: list[tuple[int, Address, Address]] = []
        self.silent = []
        for sentinel, each in zip(self._topology.seeds, found, strict=True):
            if isinstance(each, tuple):
                states.append((*each, sentinel))
            elif isinstance(each, RedisError | OSError | TimeoutError):
                self.silent.append(_problem(sentinel, each))
            else:
                raise each
        if not states:
            reason = f"no Sentinel answers: {'; '.join(self.silent)}"
            raise Fault("unavailable", reason, is_connection=True, is_moving=True)
        _, primary, sentinel = max(states)  # the highest configuration epoch counts
        await self._check_role(primary)
        await self._listen(sentinel)
        return primary

    async def _state(self, sentinel: Address) -> tuple[int, Address]:
        """Return the configuration epoch of the primary, and its address."""
        name = self._topology.primary
        state, others = await self._answers(
            sentinel, ["SENTINEL", "MASTER", name], ["SENTINEL", "MASTERS"], **self._login
        )
        if not isinstance(state, ResponseError):
            fields = _fields(state)
            return int(fields["config-epoch"]), self._mapped(Address(fields["ip"], int(fields["port"])))
        if "No such master" in str(state) and not isinstance(others, ResponseError):
            known = ", ".join(sorted(_fields(each)["name"] for each in others)) or "none: it watches no primary"
            raise self._misfit(f"primary in {self._name}", f"{name!r}, which {sentinel} does not know", known)
        if "unknown command" in str(state).lower():
            scheme = self._name.partition("://")[0].replace("+sentinel", "")
            value = f"{sentinel}, which is no Sentinel"
            raise self._misfit(f"Sentinels of {self._name}", value, f"Sentinels, or {scheme}://{sentinel}")
        raise fault_of(state, sent=False)

    def _misfit(self, setting: str, value: str, allowed: str) -> Fault:
        mismatch = StoreMismatchError(setting, value, allowed)
        return Fault("unavailable", str(mismatch), mismatch=mismatch)

    async def _check_role(self, primary: Address) -> None:
        try:
            (info,) = await self._answers(primary, ["INFO", "replication"])
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, AuthenticationError):
                raise fault_of(error, sent=False) from error
            away = f"; {len(self.silent)} of {len(self._topology.seeds)} Sentinels do not answer" if self.silent else ""
            reason = f"{_problem(primary, error)}; the Sentinels name it as the primary{away}"
            raise Fault("unavailable", reason, is_connection=True, is_moving=True) from error
        if isinstance(info, bytes) and b"role:master" not in info:
            reason = f"{primary} is a replica; the Sentinels name it as the primary, so a failover is under way"
            raise Fault("unavailable", reason, is_connection=True, is_moving=True)

    async def _listen(self, sentinel: Address) -> None:
        """Subscribe to the announcements of a Sentinel. Without them, a failed call still finds the next primary."""
        await self.aclose()
        connection = self._connect(host=sentinel.host, port=sentinel.port, **self._login)
        try:
            async with asyncio.timeout(ASK_S):
                await connection.connect()
                await connection.send_packed_command([packed(["SUBSCRIBE", "+switch-master"])], check_health=False)
                await connection.read_response()
        except (RedisError, OSError, TimeoutError):
            await connection.disconnect(nowait=True)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        else:
            self._announcements = connection


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
