"""`SqliteStore`: the durable store of `sqlite:///file`. It needs no server.

The store follows the rules of `core/rules.py`, as the memory store does, and carries them out in SQL.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Self
from urllib.parse import unquote

from aiodelay.core import transitions as t
from aiodelay.core.table_scan import Columns, Scan
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import (
    CONFLICT_MODES,
    MAX_CLAIM_MESSAGES,
    Command,
    DeadKey,
    JournalEntry,
    Lane,
    Outcome,
    Put,
    PutBack,
    Refused,
    SourcePosition,
    Stored,
    Unknown,
)
from aiodelay.errors import (
    ConfigurationError,
    StoreUnavailableError,
    UnsupportedByStoreError,
)
from aiodelay.ports import StoreTraits, Work
from aiodelay.ports.clock import Clock, SystemClock

from . import upkeep
from .commands import apply
from .connection import Failure
from .file_identity import note_of
from .handle import Handle
from .journal_reader import SqliteJournalReader, open_journal
from .limit_control import LimitControl
from .pulse import SqlitePulse
from .reading import Reader
from .settling import HeldClaims
from .table_scan import File, Part, scan_part, scan_parts
from .tables import Tables
from .work import STEP_SIZE, SqliteWork
from .writer import Job

__all__ = ["SqliteStore", "open_store"]

_TRAITS = StoreTraits(
    durable=True,
    conflicts=CONFLICT_MODES,
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=2_000,
    open_over_fork=False,
)
FORMS = "sqlite:///relative/file.db, sqlite:////absolute/file.db; option journal=<entries>"
MAX_JOURNAL = 10_000_000


class SqliteStore(LimitControl):
    """Keeps messages in a file, for any number of processes on this machine.

    The object may be opened again after a close.

    Args:
        path: The path of the file. The store creates the file if it does not exist, but not its directory.
        namespace: The namespace of the messages in the file.
        clock: The clock of the store. With None, the store uses the system clock. The store's threads read the clock
            too.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
        name: The name of the store in error messages. With None, the name is the store's URL.
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
        self.path: str = os.path.abspath(path)
        self.name: str = name or f"sqlite:///{self.path}"
        super().__init__(Handle(self.path, self.name, namespace, journal, clock or SystemClock()))

    def now_ms(self) -> int:
        return self._handle.clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until an instant of the store's clock."""
        return self._handle.clock.seconds_until(at_ms)

    async def __aenter__(self) -> Self:
        await self._handle.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._handle.close()

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order. Return one outcome for each command.

        If somebody has deleted or replaced the file, the store refuses all commands.
        """
        opened = self._handle.checked()
        if loss := opened.loss():  # Other processes would not see messages that this process stores now.
            return [Refused("unavailable", loss)] * len(commands)
        return await opened.writer.do(
            Job(
                lambda tables: apply(tables, commands, source),
                lambda failure: [_outcome_of(failure)] * len(commands),
                size=len(commands),
            )
        )

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store versioned messages, in transactions of up to `MAX_CLAIM_MESSAGES` messages.

        Return their outcomes in order.
        """
        loads = t.loads_of(puts)
        outcomes: list[Outcome] = []
        for at in range(0, len(loads), MAX_CLAIM_MESSAGES):
            outcomes += await self.apply(loads[at : at + MAX_CLAIM_MESSAGES])
        return outcomes

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Register a worker, and yield the object with which it claims and settles messages."""
        opened, held = self._handle.checked(), HeldClaims()
        write_apart = partial(self._handle.write_apart, opened.writer)

        def serve(tables: Tables) -> int:
            tables.check_features()
            upkeep.serve(tables, worker, lanes)
            return tables.ns

        ns = await self._handle.write(serve, is_durable=False)
        pulse = SqlitePulse(self.path, ns, write_apart, held)
        work = SqliteWork(
            self._handle.write,
            write_apart,
            worker,
            self._handle.clock,
            opened.counter,
            pulse=pulse,
            held=held,
            poll_ms=self.traits.safety_poll_ms,
        )
        opened.add(work.wakeup, pulse.changed)
        try:
            await opened.writer.join(pulse.take_lock)
            yield work
        finally:
            pulse.leave()
            await opened.remove(work.wakeup)
            if self._handle.opened is opened:
                with suppress(StoreUnavailableError):  # If this fails, the worker's row expires.
                    await self._handle.write(lambda tables: upkeep.leave(tables, worker), is_durable=False)

    # --- features -----------------------------------------------------------------------------------------

    async def features(self) -> Mapping[str, str]:
        """Return the features that the namespace uses: a map from each name to the version that switched it on."""
        return await self._handle.read(Reader.features)

    async def switch_on(self, names: Collection[str]) -> None:
        """Switch features on: record in the namespace that it uses these features from now on."""
        await self._handle.write(lambda tables: tables.switch_on(names))

    async def vanished(self) -> str:
        """Describe how the opened file was lost, or return "" if the path still leads to the opened file."""
        return self._handle.checked().vanished()

    async def vanished_elsewhere(self) -> str:
        """Describe a loss of the file that another process noted within the last minute.

        Return "" if no process noted a loss.
        """
        return note_of(self.path)

    # --- pauses -------------------------------------------------------------------------------------------

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        return await self._handle.write(lambda tables: upkeep.pause(tables, lane, address))

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        if not await self._handle.write(lambda tables: upkeep.resume(tables, lane, address)):
            return False
        # Return parked messages in steps, so that other writes run between the steps. If this process ends here, `tidy`
        # returns the rest.
        while address is not None and await self._handle.write(
            lambda tables: upkeep.unpark(tables, lane, address), size=STEP_SIZE
        ):
            pass
        return True

    # --- the journal --------------------------------------------------------------------------------------

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        self._check_journal()
        return await self._handle.read(lambda reader: reader.journal(message_id, after, limit))

    def journal_reader(self) -> AbstractAsyncContextManager[SqliteJournalReader]:
        """Open a reader of the journal. The store need not be open."""
        self._check_journal()
        return open_journal(self.path, self._handle.namespace, self.name)

    def _check_journal(self) -> None:
        if not self._handle.journal:
            raise UnsupportedByStoreError(
                "journal", "off", "SqliteStore(journal=1000) or 'sqlite:///file.db?journal=1000'"
            )

    # --- dead letters -------------------------------------------------------------------------------------

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        return await self._handle.write(lambda tables: upkeep.redrive(tables, keys), size=len(keys))

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        return await self._handle.write(lambda tables: upkeep.purge(tables, keys), size=len(keys))

    # --- whole tables -------------------------------------------------------------------------------------

    def scan_parts(self, scan: Scan) -> Sequence[Part]:
        return scan_parts(File(self.path, self.name, self._handle.namespace), scan)

    def scan_part(self, scan: Scan, part: Part) -> Iterator[Columns]:
        return scan_part(File(self.path, self.name, self._handle.namespace), scan, part, self.now_ms())

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        if loss := self._handle.checked().loss():  # Raise an error, so that the source keeps the messages.
            raise StoreUnavailableError(self.name, loss)
        return await self._handle.write(lambda tables: upkeep.put_back(tables, messages), size=len(messages))


def _outcome_of(failure: Failure) -> Outcome:
    if failure.is_in_doubt:
        return Unknown(failure.reason)
    return Refused("full" if failure.is_full else "unavailable", failure.reason)


def open_store(url: str, *, namespace: str, clock: Clock | None) -> SqliteStore:
    """Return a store for a URL: `sqlite:///delay.db` (a relative path) or `sqlite:////var/lib/delay.db` (absolute).

    The URL may end with the option `?journal=1000`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown.
    """
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, MAX_JOURNAL)
    options.finish()
    path = unquote(options.parts.path).removeprefix("/")
    is_other_url = bool(options.parts.netloc or options.parts.fragment)
    if is_other_url or not path or path.endswith("/") or path == ":memory:" or not _is_file_name(path):
        raise ConfigurationError("url", options.masked, FORMS)
    return SqliteStore(path, namespace=namespace, clock=clock, journal=journal, name=options.masked)


def _is_file_name(path: str) -> bool:
    """Return True if a file can have this name.

    The name must contain no lone surrogate, and no NUL, because SQLite cuts a name at a NUL.
    """
    return "\0" not in path and path == path.encode(errors="ignore").decode()
