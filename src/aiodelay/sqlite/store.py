"""`sqlite:///file`: the durable store that needs no server. Its rules are those of `memory`, carried out in SQL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

from ..clock import Clock, SystemClock
from ..errors import ClosedError, ConfigurationError, StoreUnavailableError, UnsupportedByStoreError, WrongLoopError
from ..model import (
    Claim,
    Claimed,
    Command,
    DeadKey,
    DeadLetter,
    Demand,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    Query,
    Refused,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Snapshot,
    SourcePosition,
    Tidied,
    Unknown,
    WorkStatus,
)
from ..ports import StoreTraits
from ..urls import UrlOptions
from ..wakeup import WakeUp
from . import claims, commands, settling, upkeep
from .connection import Database, Failure, failure_of
from .reading import Reader
from .tables import Entry, Tables
from .watcher import Watcher
from .writer import Job, Writer

__all__ = ["SqliteStore", "open_store"]

T = TypeVar("T")

_TRAITS = StoreTraits(
    durable=True,
    conflicts=frozenset({"replace", "keep", "newer", "error"}),
    cancel="verdict",
    lookup="anywhere",
    order_per_group=True,
    safety_poll_ms=2_000,
    wakes_other_processes=True,
)
FORMS = "sqlite:///relative/file.db, sqlite:////absolute/file.db; option journal=<entries>"
ALL_IS_WELL = None
MAX_JOURNAL = 10_000_000
STEP_SIZE = 500
"""What housekeeping counts for in a batch."""


class SqliteStore:
    """Keeps messages in a file, for any number of processes of this machine. May be closed and opened again.

    Args:
        path: The file; made if it is not there, its directory is not.
        namespace: Which messages of the file.
        clock: Where the store reads the time; also read in its threads.
        journal: Most entries of the journal to keep; 0 = keep none.
        name: What error messages call it.
    """

    traits = _TRAITS

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "default",
        clock: Clock | None = None,
        journal: int = 0,
        name: str | None = None,
    ) -> None:
        self._path = os.path.abspath(path)
        self.name = name or f"sqlite:///{self._path}"
        self._namespace, self._journal = namespace, journal
        self._clock = clock or SystemClock()
        self._opened: _Opened | None = None

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return how long until an instant of the store's clock, for timers."""
        return self._clock.seconds_until(at_ms)

    async def __aenter__(self) -> SqliteStore:
        if self._opened is not None:
            self._checked()
            raise ConfigurationError("store", "open already", "one 'async with' block at a time")
        self.now_ms()  # a clock that binds itself to the loop does so here, not in a thread
        opened = _Opened(self._path, self._namespace, self._journal, self._clock)
        await opened.writer.open()
        self._opened = opened
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._opened is None:
            return
        opened = self._checked()
        self._opened = None
        await opened.close()

    def _checked(self) -> _Opened:
        """Return what is open.

        Raises:
            ClosedError: Nothing is.
            WrongLoopError: It was opened elsewhere.
        """
        opened = self._opened
        if opened is None:
            raise ClosedError("store", "closed")
        if opened.pid != os.getpid():
            raise WrongLoopError("store", "process (this one was forked)")
        if opened.loop is not _running_loop():
            raise WrongLoopError("store", "event loop or thread")
        return opened

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands_: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        return await self._checked().writer.do(
            Job(
                lambda tables: commands.apply(tables, commands_, source),
                lambda failure: [_outcome_of(failure)] * len(commands_),
                size=len(commands_),
                wakes=True,
            )
        )

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[_SqliteWork]:
        opened = self._checked()
        work = _SqliteWork(self, worker)
        await self.write(lambda tables: upkeep.serve(tables, worker, lanes), is_durable=False)
        opened.add(work)
        try:
            yield work
        finally:
            await opened.remove(work)
            if self._opened is opened:
                await self._leave(worker)

    async def _leave(self, worker: str) -> None:
        try:
            await self.write(lambda tables: upkeep.leave(tables, worker), is_durable=False)
        except StoreUnavailableError:
            pass  # it is forgotten after its window

    async def write(
        self,
        run: Callable[[Tables], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        wakes: bool = False,
        committed: Callable[[T], object] | None = None,
        failed: Callable[[Failure], object] | None = None,
    ) -> T:
        """Run something in a transaction.

        Args:
            run: May run twice, if the first time is undone.
            size: Messages it is about.
            is_durable: Return when the disk has it.
            wakes: It may have given a lane an earlier head.
            committed: Called in the writer's thread with the answer.
            failed: Called there when nothing was written.

        Raises:
            StoreUnavailableError: Nothing was written, or it is not known.
        """

        def refuse(failure: Failure) -> NoReturn:
            if failed is not None:
                failed(failure)
            raise StoreUnavailableError(self.name, failure.reason)

        job = Job(run, refuse, size=size, is_durable=is_durable, wakes=wakes, committed=committed)
        return await self._checked().writer.do(job)

    # --- holds --------------------------------------------------------------------------------------------

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        return await self.write(lambda tables: upkeep.hold(tables, lane, address))

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        if not await self.write(lambda tables: upkeep.release(tables, lane, address), wakes=address is None):
            return False
        # In steps, so that others are served in between; what a crash leaves parked, `tidy` returns.
        while address is not None and await self.write(
            lambda tables: upkeep.unpark(tables, lane, address), size=STEP_SIZE, wakes=True
        ):
            pass
        return True

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        return await self._read(Reader.holds)

    # --- looking in ---------------------------------------------------------------------------------------

    async def _read(self, read: Callable[[Reader], T]) -> T:
        opened = self._checked()
        try:
            return await opened.read(read)
        except sqlite3.Error as error:
            raise StoreUnavailableError(self.name, failure_of(error, self._path).reason) from error

    async def get(self, message_id: str) -> Snapshot | None:
        now = self.now_ms()
        return await self._read(lambda reader: reader.get(message_id, now))

    async def search(self, query: Query) -> Sequence[Snapshot]:
        now = self.now_ms()
        return await self._read(lambda reader: reader.search(query, now))

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        now = self.now_ms()
        return await self._read(lambda reader: reader.counts(now))

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        now = self.now_ms()
        return await self._read(lambda reader: reader.load(bucket_ms, buckets, now))

    async def position(self, source: str) -> int | None:
        return await self._read(lambda reader: reader.position(source))

    async def journal(self, *, message_id: str | None = None, after: int = 0, limit: int = 100) -> Sequence[JournalEntry]:
        if not self._journal:
            raise UnsupportedByStoreError("journal", "off", "SqliteStore(journal=1000) or 'sqlite:///file.db?journal=1000'")
        return await self._read(lambda reader: reader.journal(message_id, after, limit))

    # --- dead letters -------------------------------------------------------------------------------------

    async def dead_letters(
        self, *, lane: Lane | None = None, after: tuple[int, str, int] | None = None, limit: int = 100
    ) -> Sequence[DeadLetter]:
        return await self._read(lambda reader: reader.dead_letters(lane, after, limit))

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        return await self.write(lambda tables: upkeep.redrive(tables, keys), size=len(keys), wakes=True)

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        return await self.write(lambda tables: upkeep.purge(tables, keys), size=len(keys))


class _Opened:
    """What is open between `__aenter__` and `__aexit__`."""

    def __init__(self, path: str, namespace: str, journal: int, clock: Clock) -> None:
        self.loop, self.pid = asyncio.get_running_loop(), os.getpid()
        self.counter = claims.LeaseCounter()
        self.writer = Writer(path, namespace, journal, clock, self._wake)
        self._path, self._namespace = path, namespace
        self._works: set[_SqliteWork] = set()
        self._watcher: Watcher | None = None
        self._reading: ThreadPoolExecutor | None = None
        self._database: Database | None = None

    def add(self, work: _SqliteWork) -> None:
        self._works.add(work)
        if self._watcher is None:
            self._watcher = Watcher(self._path, self._changed)

    async def remove(self, work: _SqliteWork) -> None:
        self._works.discard(work)
        if not self._works and self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            await self.loop.run_in_executor(None, watcher.stop)

    def _wake(self) -> None:
        for work in self._works:
            work.wake()

    def _changed(self) -> None:
        """Wake the loop, from the watcher's thread."""
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop has been closed

    async def read(self, read: Callable[[Reader], T]) -> T:
        """Run a function on the reading connection, in one snapshot."""
        if self._reading is None:
            self._reading = ThreadPoolExecutor(1, "aiodelay-sqlite-reader")
        return await self.loop.run_in_executor(self._reading, self._read, read)

    def _read(self, read: Callable[[Reader], T]) -> T:
        if self._database is None:
            self._database = Database(self._path, query_only=True)
        connection = self._database.connection
        connection.execute("BEGIN")
        try:
            return read(Reader(connection, self._namespace))
        finally:
            self._database.rollback()

    async def close(self) -> None:
        """Stop reading, let the writer finish, and close both connections."""
        try:
            if self._reading is not None:
                if self._database is not None:
                    self._database.connection.interrupt()
                await self.loop.run_in_executor(self._reading, self._close_reader)
                self._reading.shutdown()
        finally:
            await self.writer.close()

    def _close_reader(self) -> None:
        if self._database is not None:
            self._database.close()


class _SqliteWork:
    """One worker's side of the store."""

    def __init__(self, store: SqliteStore, worker: str) -> None:
        self._store, self._worker = store, worker
        self._wakeup = WakeUp()
        self._held = settling.HeldClaims()
        self._given: _Given | None = None
        self._rotation = 0
        self.wake, self.clear = self._wakeup.set, self._wakeup.clear

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        counter = self._store._checked().counter
        given = _Given(request)
        wanted = dict(demand)

        def run(tables: Tables) -> Claimed:
            before = self._given
            if before is not None and before.request == request:
                left = claims.still_leased(tables, before.claims, before.entries)
                if left.claims or before.is_certain:
                    given.keep(before.claims, before.entries)
                    return left
            claimed, entries = claims.claim(
                tables, wanted, lease_ms=lease_ms, rotation=self._rotation + 1, counter=counter
            )
            given.keep(claimed.claims, entries)
            return claimed

        def committed(claimed: Claimed) -> None:
            self._rotation += 1
            self._given = given
            self._held.add(given.claims, given.entries)

        def failed(failure: Failure) -> None:
            if failure.is_in_doubt:
                given.is_certain = False
                self._given = given

        return await self._store.write(run, size=STEP_SIZE, is_durable=False, committed=committed, failed=failed)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._store.write(
            lambda tables: settling.settle(tables, settlements, self._held),
            size=len(settlements),
            committed=lambda _: self._held.drop(settlements),
        )

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._store.write(
            lambda tables: settling.renew(tables, renewals),
            size=len(renewals),
            is_durable=False,
            committed=lambda outcomes: self._held.renewed(renewals, outcomes),
        )

    async def wait(self, *, until_ms: int | None) -> None:
        poll_s = _TRAITS.safety_poll_ms / 1000
        await self._wakeup.wait(poll_s if until_ms is None else min(poll_s, self._store.seconds_until(until_ms)))

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._store.write(
            lambda tables: upkeep.tidy(tables, self._worker, lanes, limit), size=STEP_SIZE, is_durable=False
        )

    def status(self) -> WorkStatus:
        return WorkStatus("ready")


class _Given:
    """The last claim's answer, for a repeat of its request; `is_certain` False: its commit failed in doubt."""

    __slots__ = ("claims", "entries", "is_certain", "request")

    def __init__(self, request: str) -> None:
        self.request, self.is_certain = request, True
        self.claims: Sequence[Claim] = ()
        self.entries: Sequence[Entry] = ()

    def keep(self, given: Sequence[Claim], entries: Sequence[Entry]) -> None:
        self.claims, self.entries = given, entries


def _outcome_of(failure: Failure) -> Outcome:
    if failure.is_in_doubt:
        return Unknown(failure.reason)
    return Refused("full" if failure.is_full else "unavailable", failure.reason)


def _running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def open_store(url: str, *, namespace: str, clock: Clock | None) -> SqliteStore:
    """Open `sqlite:///delay.db` (relative) or `sqlite:////var/lib/delay.db` (absolute), `?journal=1000`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown.
    """
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, MAX_JOURNAL)
    options.finish()
    path = unquote(options.parts.path).removeprefix("/")
    if options.parts.netloc or options.parts.fragment or not path or path.endswith("/") or path == ":memory:":
        raise ConfigurationError("url", options.masked, FORMS)
    return SqliteStore(path, namespace=namespace, clock=clock, journal=journal, name=options.masked)
