"""`Base`: the common part of the Redis store's classes. It holds the open client, the time and the waiting loops."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from aiodelay.backends.clock_skew import warn_of_skew
from aiodelay.backends.redis.connection.checks import check_server, server_time_ms
from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.key_types import overwritten_key
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.connection.shard_client import ShardClient
from aiodelay.backends.redis.connection.topology import Address
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.reading import Lanes, lanes_in
from aiodelay.errors import (
    ClosedError,
    StoreDamagedError,
    StoreError,
    StoreTooNewError,
    StoreUnavailableError,
    WrongLoopError,
)
from aiodelay.ports.clock import Clock, SystemClock

from .glance import Glance
from .pulse import RedisPulse
from .waiting import Waiters

__all__ = ["Base"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

WAY_S = 0.0003
"""The least time from the end of a wait until the server runs the script that is then sent."""


class _ServerTime:
    """An estimate of the server's time that needs no call to the server.

    The object keeps the difference between the server's clock and the clock of the event loop. The server
    reads its clock between a question and its answer. So each answer limits the difference. If the estimate is outside
    these limits, it is corrected.
    """

    def __init__(self, server_ms: float) -> None:
        loop = asyncio.get_running_loop()
        self._local_s = loop.time
        self._ahead_ms = server_ms - self._local_s() * 1000

    def heard(self, now_ms: int, asked_s: float) -> None:
        """Correct the estimate with an answer. The server read its clock, `now_ms`, at some instant since `asked_s`."""
        least_ms, most_ms = now_ms - self._local_s() * 1000, now_ms + 1 - asked_s * 1000
        self._ahead_ms = min(max(self._ahead_ms, least_ms), most_ms)

    def now_ms(self) -> float:
        return self._local_s() * 1000 + self._ahead_ms


class _Opened:
    """The client and the clock estimate of an open store. Each opening of the store has its own object."""

    def __init__(self, options: Options, keys: Keys) -> None:
        self.loop, self.pid = asyncio.get_running_loop(), os.getpid()
        self.writer = uuid4().hex[:16]
        is_shard_of_cluster = options.is_cluster and keys.shards > 1
        self.client = (ShardClient if is_shard_of_cluster else Client)(options, keys, self.writer)
        self.time: _ServerTime | None = None
        self.uuid = b""


class Base:
    """The base class of the store. It opens the store, calls the server, and tells the time.

    Args:
        options: The options of the URL.
        keys: The keys of the namespace.
        clock: The clock of the store. With None, the store uses the server's TIME.

    Attributes:
        checked_servers: The servers that need no check at the next opening. The shards of a namespace share this set.
    """

    def __init__(self, options: Options, keys: Keys, clock: Clock | None) -> None:
        self._options, self._keys, self._clock = options, keys, clock
        self._opened: _Opened | None = None
        self.is_stale: bool = False
        """Whether a script was refused because the namespace was moved, or is being moved, to other shards."""
        self.waiters: Waiters = Waiters()
        self.glance: Glance = Glance(self._commands, keys)
        self.checked_servers: set[Address | None] = set()

    @property
    def name(self) -> str:
        """The name of the store in error messages: its URL without secrets."""
        return self._options.name

    @property
    def keys(self) -> Keys:
        """The keys of the namespace, or the keys of this shard."""
        return self._keys

    @property
    def writer(self) -> str:
        """The name of this opened store in the stream of wake-ups."""
        return self._checked().writer

    @property
    def keeps_journal(self) -> bool:
        """True if the store keeps a journal."""
        return self._options.journal > 0

    @property
    def is_away(self) -> bool:
        """True if this shard's node in a cluster does not answer, so that calls fail at once."""
        client = self._checked().client
        return isinstance(client, ShardClient) and client.is_away

    # --- opening ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._opened is not None:
            return
        opened = _Opened(self._options, self._keys)
        try:
            servers, local = len(self.checked_servers), SystemClock()
            opened.uuid = await check_server(opened.client, self._keys, self._options, self.checked_servers)
            asked_ms = local.now_ms()
            try:
                server_ms = await server_time_ms(opened.client)
            except Fault as fault:
                raise StoreUnavailableError(self.name, fault.reason) from fault
            opened.time = _ServerTime(server_ms)
            if self._clock is None and len(self.checked_servers) > servers:
                nearest_ms = min(max(server_ms, asked_ms), local.now_ms())
                warn_of_skew(log, opened.client.place, "server", server_ms - nearest_ms)
        except BaseException:
            self.checked_servers = set()
            await opened.client.aclose()
            raise
        self._opened = opened
        self.glance.found_damaged()

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        self.checked_servers = set()
        if opened is not None:
            await opened.client.aclose()

    async def watch(self) -> None:
        """On a cluster, let calls to this shard fail at once while its node is away, until cancelled."""
        client = self._checked().client
        if isinstance(client, ShardClient):
            await client.watch()

    def _checked(self) -> _Opened:
        opened = self._opened
        if opened is None:
            raise ClosedError("store", "not open")
        if os.getpid() != opened.pid:
            raise WrongLoopError("store", "process (this process was forked)")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not opened.loop:
            raise WrongLoopError("store", "event loop or thread")
        return opened

    # --- calls --------------------------------------------------------------------------------------------

    async def run(self, script: str, arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - what the script returns
        """Run a script and return its reply.

        Args:
            script: The name of the script.
            arguments: What the script gets, after what all scripts get.
            durable: If True, wait until the writes of the script have reached the durability level of the URL.

        Raises:
            StoreUnavailableError: The script may or may not have run. A repetition is safe.
            StoreDamagedError: Another program has written one of aiodelay's keys as another type.
            StoreTooNewError: The namespace uses a layout or features that this version does not know. The script has
                changed nothing.
        """
        try:
            return await self._run(script, arguments, durable=durable)
        except Fault as fault:
            raise self.unavailable(fault) from fault

    async def _run(self, script: str, arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - as run
        client = self._checked().client
        try:
            return await client.run(script, arguments, now_ms=self.script_time_ms(), durable=durable)
        except Fault as fault:
            await self._examine(client, fault)
            raise

    async def _run_parts(self, script: str, parts: Sequence[Sequence[Arg]]) -> list[Any]:
        """Run a script once for each part, durably. Return a reply or a `Fault` for each part."""
        client = self._checked().client
        replies: list[Any]
        try:
            replies = await client.run_parts(script, parts, now_ms=self.script_time_ms(), durable=True)
        except Fault as fault:
            replies = [fault] * len(parts)
        for reply in replies:
            if isinstance(reply, Fault):
                await self._examine(client, reply)
        return replies

    async def _examine(self, client: Client, fault: Fault) -> None:
        """Note a refusal of the layout. If a key of the wrong type caused the fault, name it in the fault's reason."""
        self.is_stale |= fault.layout is not None
        if fault.is_damage:
            with suppress(Fault):  # The server no longer answers: keep the reason that the fault has.
                fault.reason = await overwritten_key(client, self._keys) or fault.reason

    def unavailable(self, fault: Fault) -> StoreError:
        """Return the public error to raise for a fault."""
        if fault.too_new is not None:
            return StoreTooNewError(self.name, fault.too_new.value, fault.too_new.allowed)
        kind = StoreDamagedError if fault.is_damage else StoreUnavailableError
        return kind(self.name, fault.reason)

    async def run_apart(self, script: str, arguments: Sequence[Arg]) -> None:
        """Run a script on a separate connection. The caller runs in another event loop than the store.

        Raises:
            Fault: The script may or may not have run.
        """
        client = Client(self._options, self._keys)
        try:
            await client.run(script, arguments, now_ms=self.script_time_ms())
        finally:
            await client.aclose()

    def new_pulse(self) -> RedisPulse:
        """Return a pulse with a client of its own, which connects at the first step."""
        return RedisPulse(Client(self._options, self._keys), self._keys, self.name, self.script_time_ms)

    async def command(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        """Send one command and return its reply.

        Raises:
            StoreUnavailableError: The server may or may not have carried out the command.
            StoreDamagedError: Another program has written one of aiodelay's keys as another type.
        """
        client = self._checked().client
        try:
            return await client.command(*arguments)
        except Fault as fault:
            await self._examine(client, fault)
            raise self.unavailable(fault) from fault

    async def _commands(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send commands in one round trip, and return their replies.

        Raises:
            StoreUnavailableError: The server may or may not have carried out the commands.
        """
        try:
            return await self._checked().client.commands(commands)
        except Fault as fault:
            raise self.unavailable(fault) from fault

    async def lanes_of(self, values: Sequence[object]) -> Lanes:
        """Read the names of the lanes from the server.

        Args:
            values: The values that the caller decodes with the names. If there are none, the method does not call the
                server, and returns no names.

        Raises:
            StoreUnavailableError: The server did not return the names.
        """
        if not values:
            return Lanes({})
        return lanes_in(await self.command("HGETALL", self._keys.key("lanes")))

    @property
    def has_own_clock(self) -> bool:
        """True if the store does not use the server's time."""
        return self._clock is not None

    # --- time ---------------------------------------------------------------------------------------------

    def heard(self, now: bytes, asked_s: float) -> int:
        """Correct the estimate of the server's time from an answer. Return the time in the answer.

        The answer may be late: the network, a durability level or a busy event loop can delay it.

        Args:
            now: The server's time in the answer, in epoch ms.
            asked_s: The time of the event loop when this process sent the question.
        """
        now_ms = int(now)
        opened = self._opened
        if opened is not None and opened.time is not None and self._clock is None:
            opened.time.heard(now_ms, asked_s)
        return now_ms

    def now_ms(self) -> int:
        """Return the store's time in epoch ms. If the store has no clock of its own, estimate the server's time."""
        if self._clock is not None:
            return self._clock.now_ms()
        opened = self._opened or self._checked()
        assert opened.time is not None
        return int(opened.time.now_ms())

    def script_time_ms(self) -> int | None:
        """Return the time that scripts use, in epoch ms. None = the server's time."""
        return None if self._clock is None else self._clock.now_ms()

    def seconds_until_asking(self, at_ms: int) -> float:
        """Return the seconds until a script should be sent that runs at an instant of the store's time, or just after.

        The result is negative after that instant. If the script runs too early nevertheless, it finds no message that
        is due: the server's clock decides.
        """
        if self._clock is not None:
            return self._clock.seconds_until(at_ms)
        opened = self._checked()
        assert opened.time is not None
        return (at_ms - opened.time.now_ms()) / 1000 - WAY_S
