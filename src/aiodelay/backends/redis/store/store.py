"""`RedisStore`: the store on a Redis or Valkey server, on a cluster, or behind Sentinels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Self

import msgspec
from redis.credentials import CredentialProvider

from aiodelay.backends.redis.connection.checks import info_of
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.login import checked_provider
from aiodelay.backends.redis.connection.options import Options, read_url
from aiodelay.backends.redis.connection.wakeup_listener import WakeupListener, listening
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.backends.redis.records.reading import features_in
from aiodelay.core.features import check_known
from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.transitions import loads_of
from aiodelay.core.values import CONFLICT_MODES, Command, Lane, Outcome, Put, Refused, SourcePosition, Unknown
from aiodelay.core.version import __version__
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import StoreTraits, Work
from aiodelay.ports.clock import Clock

from .commands import Batch, former_of
from .journal_reader import RedisJournalReader, open_journal
from .pulse import RedisPulse
from .table_scan import Part, Scanner
from .transfer import Transfers
from .waiting import Waiter, first_dues
from .work import RedisWork

__all__ = ["RedisStore"]

LEAVE_S = 1.0
COMPARED = ("messages", "pauses", "positions of sources")
"""The data that the script `present` counts twice, in two keys. Different counts show that a key was deleted."""
NOTED_MS = 60_000
"""How long the note `vanished` in the key `meta` is valid, in ms.

A process that finds that its data are gone writes the note, and renews it every 5 s.
"""

_TRAITS = StoreTraits(
    durable=True,
    conflicts=CONFLICT_MODES,
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=2_000,
    paced_rows=100,  # 1 to 2 ms
)


class RedisStore(Transfers):
    """Keeps messages in one Redis or Valkey server. Any number of processes may open the same store.

    It is the store of a namespace with one shard, and each shard of a `ShardedStore`.

    Args:
        url: `redis://user:password@host:6379/0`, `rediss://`, `unix:///path`, `valkey://`, `valkeys://`, with options;
            `redis+cluster://node1,node2` or `redis+sentinel://sentinel1,sentinel2/primary`, and their variants.
            or the options that were read from it.
        namespace: The namespace of the messages. It separates the applications that share a server. Or the keys of one
            shard of a namespace.
        clock: The clock of the store. With None, the store uses the server's TIME.
        credential_provider: An object that returns the user and the password for each new connection, such as a token
            that expires. The token must be valid for 5 minutes or longer. None = the user and the password in the URL.

    Raises:
        ConfigurationError: The URL, the namespace or the credential provider is not allowed.
    """

    traits = _TRAITS

    def __init__(
        self,
        url: str | Options,
        *,
        namespace: str | Keys = DEFAULT_NAMESPACE,
        clock: Clock | None = None,
        credential_provider: CredentialProvider | None = None,
    ) -> None:
        options = read_url(url) if isinstance(url, str) else url
        if credential_provider is not None:
            options = options.with_provider(checked_provider(credential_provider))
        super().__init__(options, namespace if isinstance(namespace, Keys) else keys_of(namespace), clock)
        self._calls = 0

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order. Return one outcome for each command."""
        move = None
        if source is not None:
            move = (source.source, former_of(f"{source.first}", is_stored=source.is_stored), source.position)
        batch = Batch(commands, move)
        await self._send(batch, commands)
        return batch.outcomes

    async def apply_part(
        self, commands: Sequence[Command], *, source: str, former: str, later: str, is_stored: bool
    ) -> tuple[Sequence[Outcome], Refused | Unknown | None]:
        """Carry out this shard's part of the commands of an intake, and move the shard's position, in one step.

        Args:
            commands: The commands of this shard, in order.
            source: The name of the source.
            former: The position that the shard must have, as text.
            later: The position after the commands, as text.
            is_stored: Whether the shard must have a position. If not, it may also have none.

        Returns:
            One outcome for each command, in order. Then the reason if no command was carried out and the position did
            not move; `Unknown` if that may have happened; or None.
        """
        batch = Batch(commands, (source, former_of(former, is_stored=is_stored), later))
        await self._send(batch, commands)
        return batch.outcomes, batch.failure

    async def _send(self, batch: Batch, commands: Sequence[Command]) -> None:
        opened = self._checked()
        while batch.is_open:
            self._calls += 1
            asked_s = asyncio.get_running_loop().time()
            replies = await self._run_parts("apply", batch.parts(f"{opened.writer}-{self._calls}"))
            for reply in replies:
                if not isinstance(reply, Fault):
                    self.heard(reply[0], asked_s)
            batch.take(replies)
        dues = (
            first_dues(commands, batch.outcomes) if self.waiters else {}
        )  # A process that only writes has no waiters.
        if dues is None:
            self.waiters.wake()
        else:
            self.waiters.come_due(dues)

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store versioned messages. Return one outcome for each message, in order."""
        return await self.apply(loads_of(puts))

    async def fill(self) -> float | None:
        """Return the used share of `maxmemory`, from 0 to 1.

        Return None if the server has no such limit, or forbids INFO.
        """
        try:
            info = info_of(await self._checked().client.command("INFO", "memory"))
        except Fault as fault:
            if fault.is_refused:
                return None
            raise self.unavailable(fault) from fault
        most = int(info.get("maxmemory", 0))
        used = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
        return used / most if most else None

    async def vanished(self) -> str:
        """Describe which data of the namespace have disappeared since this store opened, or return "" if none have."""
        opened = self._checked()
        if await self.glance.is_whole():
            return ""
        _, uuid, *counts, marks, counted = await self.run("present", [opened.uuid])
        missing = self._missing(opened.uuid, uuid, counts)
        if missing:
            self.glance.found_damaged()
        else:
            self.glance.found_whole(marks, counted)
        return missing

    def _missing(self, opened_uuid: bytes, uuid: bytes, counts: Sequence[int]) -> str:
        keys = f"{self._keys.tag}*"
        if not uuid:
            return f"the keys {keys} of this store are gone: somebody deleted them, or the server lost its data"
        if uuid != opened_uuid:
            return f"the keys {keys} of this store are gone, and other keys have taken their place"
        for what, stored, listed in zip(COMPARED, counts[::2], counts[1::2], strict=True):
            if stored != listed:
                return f"{stored} {what} are stored under {keys}, but {listed} are listed there: somebody deleted a key"
        return ""

    async def vanished_elsewhere(self) -> str:
        """Describe a loss of data that another process noted within the last minute.

        Return "" if no process noted a loss.
        """
        noted = await self.command("HGET", self._keys.key("meta"), "vanished")
        if noted is None or self.now_ms() - int(noted) > NOTED_MS:
            return ""
        return f"another process has {self.name} open, and reports that the keys {self._keys.tag}* are gone"

    async def features(self) -> Mapping[str, str]:
        """Return the features that the namespace uses: a map from each name to the version that switched it on."""
        return features_in(await self.command("HGET", self._keys.key("meta"), "features"))

    async def switch_on(self, names: Collection[str]) -> None:
        """Switch features on: record in the namespace that it uses these features from now on."""
        await self.run("switch_on", [__version__, *sorted(names)], durable=True)

    def journal_reader(self) -> AbstractAsyncContextManager[RedisJournalReader]:
        """Open a reader of the journal. The store need not be open."""
        self.check_journal()
        return open_journal(self._options, self._keys)

    # --- whole tables -------------------------------------------------------------------------------------

    def scan_parts(self, scan: Scan) -> Sequence[Part]:
        """Split a table into parts for `scan_part`."""
        return Scanner(self._options, self._keys).parts(scan)

    def scan_part(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Yield the rows of one part of a table, as columns."""
        return Scanner(self._options, self._keys).read(scan, part)

    # --- dispatching --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def work(
        self, worker: str, lanes: Collection[Lane], waiter: Waiter | None = None, pulse: RedisPulse | None = None
    ) -> AsyncIterator[Work]:
        """Register a worker, and yield the object with which it claims and settles messages.

        Args:
            worker: The worker id.
            lanes: The lanes that the worker serves.
            waiter: The wait of the worker's loop; None = a new one.
            pulse: The worker's sign of life; None = a new one.
        """
        async with self.registered_work(worker, lanes, waiter or Waiter(), pulse) as work:
            listener = self.wakeup_listener()
            async with listening(listener, "aiodelay redis wake-ups"):
                await listener.ready()
                yield work

    def wakeup_listener(self, others: Sequence[RedisStore] = ()) -> WakeupListener:
        """Return a listener for the wake-ups of other processes.

        Args:
            others: Other shards on the same server, whose wake-ups the listener reads too.
        """
        streams = {each.keys.key("wake"): (each.writer, each.waiters.wake) for each in (self, *others)}
        return WakeupListener(self._checked().client, streams)

    @asynccontextmanager
    async def registered_work(
        self, worker: str, lanes: Collection[Lane], waiter: Waiter, pulse: RedisPulse | None = None
    ) -> AsyncIterator[RedisWork]:
        """Register a worker, and yield its object as `work` does, without a listener for wake-ups of other processes.

        Args:
            worker: The worker id.
            lanes: The lanes that the worker serves.
            waiter: The wait of the worker's loop.
            pulse: The worker's sign of life in this shard; None = a new one.
        """
        opened, workers = self._checked(), self._keys.key("workers")
        check_known(self.name, await self.features())
        work = RedisWork(self, worker, waiter, pulse)
        serves = msgspec.msgpack.encode([self.now_ms(), *sorted(lanes)])
        try:
            await opened.client.command("HSET", workers, worker, serves)
        except Fault as fault:
            if fault.kind != "full":  # A full server refuses this write. `tidy` frees memory and writes it again.
                await self._examine(opened.client, fault)
                raise self.unavailable(fault) from fault
        self.waiters.add(waiter)
        try:
            yield work
        finally:
            self.waiters.discard(waiter)
            if self._opened is opened:
                with suppress(StoreUnavailableError, TimeoutError):  # If this fails, the worker's entry expires.
                    async with asyncio.timeout(LEAVE_S):
                        await self.command("HDEL", workers, worker)
