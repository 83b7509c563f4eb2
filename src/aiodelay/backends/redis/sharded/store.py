"""`ShardedStore`: the store of `redis://`, `valkey://` and their variants, over the shards of a namespace.

A namespace of one shard, which is the default, has one `RedisStore`, and the sharded store hands all calls on to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Self

from redis.credentials import CredentialProvider

from aiodelay.backends.redis.connection.login import checked_provider
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.connection.wakeup_listener import listening
from aiodelay.backends.redis.lists.sink import RedisListSink
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, keys_of
from aiodelay.backends.redis.records.shards import ShardLayout
from aiodelay.backends.redis.store.pulse import RedisPulse
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.transitions import loads_of
from aiodelay.core.values import (
    Blocked,
    Command,
    Lane,
    Outcome,
    Promise,
    Put,
    PutBack,
    Reach,
    Registered,
    SourcePosition,
    Stored,
)
from aiodelay.errors import UnsupportedByStoreError
from aiodelay.ports import Sink, Source, Transferring, Work
from aiodelay.ports.clock import Clock

from .calls import all_of
from .dues import ShardDues, ShardWaiter
from .following import following
from .following_commands import applied, applied_from_intake
from .following_pulse import FollowingPulse
from .following_work import FollowingTransfer, FollowingWork
from .inspection import ShardedInspection
from .journal import ShardedJournalReader, open_journals
from .scan import ShardedScanner, ShardPart
from .transfer import ShardedTransfer
from .work import ShardedWork

__all__ = ["ShardedStore", "open_store"]


class ShardedStore(ShardedInspection):
    """Keeps the messages of a namespace in its shards. Any number of processes may open the same store.

    Each message has one shard, by a fixed hash of its id. The number of shards belongs to the namespace.

    Args:
        url: The URL of a `RedisStore`. Its option `shards` counts for a new namespace only.
        namespace: The namespace of the messages. It separates the applications that share a server.
        clock: The clock of the store. With None, the store uses the server's TIME.
        credential_provider: As for a `RedisStore`.

    Raises:
        ConfigurationError: The URL, the namespace or the credential provider is not allowed.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        clock: Clock | None = None,
        credential_provider: CredentialProvider | None = None,
    ) -> None:
        options = read_url(url)
        if credential_provider is not None:
            options = options.with_provider(checked_provider(credential_provider))
        super().__init__(options, keys_of(namespace).namespace, clock)
        self._closed = RedisStore(options, namespace=namespace, clock=clock)  # answers what needs no open store

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands: the commands for each shard in order. Return one outcome for each command."""
        if source is not None:
            return await applied_from_intake(self.follower, lambda: self._intakes.store(commands, source))

        async def once(part: Sequence[Command]) -> Sequence[Outcome]:
            shards = self.shards
            return await (shards[0].apply(part) if len(shards) == 1 else self._by_shard(part, _id_of, RedisStore.apply))

        return await applied(self.follower, commands, once)

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store versioned messages. Return one outcome for each message, in order."""
        return await self.apply(loads_of(puts))

    @following()
    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages that had left the store. Return one outcome for each message, in order."""
        return await self._by_shard(messages, lambda each: each.record.id, RedisStore.put_back)

    # --- data ---------------------------------------------------------------------------------------------

    @following()
    async def fill(self) -> float | None:
        """Return the used share of `maxmemory`, from 0 to 1, or None if the server has no such limit.

        On a cluster, it is the highest share of the nodes with shards.
        """
        asked = self.shards if self._options.is_cluster else [self._first]
        fills = await all_of([each.fill() for each in asked])
        return max((each for each in fills if each is not None), default=None)

    @following()
    async def vanished(self) -> str:
        """Describe which data of the namespace have disappeared since this store opened, or return "" if none have."""
        return next(filter(None, await self._of_all(lambda each: each.vanished())), "")

    @following()
    async def vanished_elsewhere(self) -> str:
        """Describe a loss of data that another process noted within the last minute; "" if no process noted one."""
        return next(filter(None, await self._of_all(lambda each: each.vanished_elsewhere())), "")

    @following()
    async def features(self) -> Mapping[str, str]:
        """Return the features that the namespace uses: a map from each name to the version that switched it on."""
        return {name: by for found in await self._of_all(lambda each: each.features()) for name, by in found.items()}

    @following()
    async def switch_on(self, names: Collection[str]) -> None:
        """Switch features on in all shards."""
        await self._of_all(lambda each: each.switch_on(names))

    def journal_reader(self) -> AbstractAsyncContextManager[ShardedJournalReader]:
        """Open a reader of the journals of all shards. The store may be closed."""
        self._closed.check_journal()
        return open_journals(self._options, self._namespace)

    def scan_parts(self, scan: Scan) -> Sequence[ShardPart]:
        """Split a table into parts for `scan_part`."""
        return ShardedScanner(self._options, self._namespace).parts(scan)

    def scan_part(self, scan: Scan, part: ShardPart) -> Iterator[Columns]:
        """Yield the rows of one part of a table, as columns."""
        return ShardedScanner(self._options, self._namespace).read(scan, part)

    # --- the store's own server ---------------------------------------------------------------------------

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks for the store's own server. A scheduler with this store has them without registration."""
        return self._closed.sinks

    @property
    def sources(self) -> Sequence[Source]:
        """The sources for the store's own server. A scheduler with this store has them without registration."""
        return self._closed.sources

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        """List the consumers of topics and of logs, with the lag of each consumer."""
        return await self._first.registered(topic)

    async def lengths(self, destinations: Collection[str]) -> Mapping[str, int]:
        """Return the number of elements of each list among the destinations. Leave out all other destinations."""
        return await self._first.lengths(destinations)

    def reaches(self, sink: Sink, address: str = "") -> Reach:
        """Return the delivery promise for messages that go from this store to a sink, and the reason for it."""
        reach, is_list = self._closed.reaches(sink, address), isinstance(sink, RedisListSink)
        if self._count <= 1 or reach.promise is Promise.AT_LEAST_ONCE or (is_list and not self._options.is_cluster):
            return reach
        where = "in one slot" if is_list else "in the first"
        reason = f"{sink.name} is {where} of {self._count} shards: messages are claimed, sent and settled"
        return Reach(Promise.AT_LEAST_ONCE, reason)

    @contextmanager
    def transferring(self, sink: Sink) -> Iterator[Transferring]:
        """Register the transfer of one sink's messages. Yield the object that moves the messages."""
        with FollowingTransfer(self.follower, lambda: self._transferring(sink)) as transfer:
            yield transfer

    @contextmanager
    def _transferring(self, sink: Sink) -> Iterator[Transferring]:
        shards, reach = self.shards, self.reaches(sink)
        if reach.promise is Promise.AT_LEAST_ONCE:
            raise UnsupportedByStoreError(f"transfer into {sink.name}", "no longer possible", reach.reason)
        with ExitStack() as stack:
            transfers = [stack.enter_context(each.transferring(sink)) for each in shards]
            if len(shards) == 1:
                yield transfers[0]
                return
            waiter, dues = Waiter(), self._new_dues()
            for shard, store in enumerate(shards):
                part = ShardWaiter(waiter, dues, shard)
                store.waiters.add(part, sink.name)
                stack.callback(store.waiters.discard, part)
            yield ShardedTransfer(shards, transfers, sink.name, waiter, dues)

    @following()
    async def blocked(self) -> Sequence[Blocked]:
        """List the blocked destinations, each with the reason and the number of messages that wait for it."""
        found: dict[tuple[Lane, str], Blocked] = {}
        for part in await self._of_all(lambda each: each.blocked()):
            for each in part:
                messages = found[each.lane, each.address].messages if (each.lane, each.address) in found else 0
                found[each.lane, each.address] = Blocked(each.lane, each.address, each.reason, messages + each.messages)
        return [found[place] for place in sorted(found)]

    # --- dispatching --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Register a worker in all shards, and yield the object with which it claims and settles messages."""

        def pulses_of(layout: ShardLayout) -> Sequence[RedisPulse]:
            return [self._store(layout, shard).new_pulse() for shard in range(layout.shards)]

        pulse = FollowingPulse(pulses_of, self.follower.present.layout)
        work = FollowingWork(self.follower, pulse, lambda waiter: self._work(worker, lanes, waiter, pulse))
        async with listening(work, "aiodelay redis shards"):
            await work.is_ready
            yield work

    @asynccontextmanager
    async def _work(
        self, worker: str, lanes: Collection[Lane], waiter: Waiter, pulse: FollowingPulse
    ) -> AsyncIterator[Work]:
        """Register a worker in the shards of the present layout."""
        shards, dues = self.shards, self._new_dues()
        pulses = pulse.shards_of(self.follower.present.layout)
        if len(shards) == 1:
            async with shards[0].work(worker, lanes, waiter, pulses[0]) as only:
                yield only
            return
        # A node of a cluster refuses to read streams of several slots in one command (CROSSSLOT).
        apart = [each.wakeup_listener() for each in shards] if self._options.is_cluster else []
        listeners = apart or [shards[0].wakeup_listener(shards[1:])]
        async with AsyncExitStack() as stack:
            works = [
                await stack.enter_async_context(
                    each.registered_work(worker, lanes, ShardWaiter(waiter, dues, shard), pulses[shard])
                )
                for shard, each in enumerate(shards)
            ]
            for each in listeners:
                await stack.enter_async_context(listening(each, "aiodelay redis wake-ups"))
            await all_of([each.ready() for each in listeners])
            yield ShardedWork(shards, works, waiter, dues)

    def _new_dues(self) -> ShardDues:
        return ShardDues(len(self.shards), self.traits.safety_poll_ms, self._ahead_ms)


def _id_of(command: Command) -> str:
    return command.envelope.id if isinstance(command, Put) else command.id


def open_store(url: str, *, namespace: str, clock: Clock | None) -> ShardedStore:
    """Return a store for a URL: `redis://localhost`, `rediss://user:password@host:6380/1`, `unix:///run/redis.sock`.

    `valkey://` and `valkeys://` mean the same as `redis://` and `rediss://`.

    Options: `durability=memory|replicated:<n>|fsynced`, `journal=<entries>`, `protocol=2|3`, `timeout_ms`,
    `connect_timeout_ms`, `connections`, `shards`. Options for TLS: `ca_certs`, `client_cert`, `client_key`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    return ShardedStore(url, namespace=namespace, clock=clock)
