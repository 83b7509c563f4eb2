"""`log:///folder`: a store for one process, kept in one file: the log of all calls, carried out again at start."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from io import BytesIO, FileIO
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from msgspec.structs import replace

import aiodelay
from aiodelay.core import values
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import (
    Claimed,
    Command,
    DeadKey,
    Demand,
    Lane,
    Outcome,
    PutBack,
    Refused,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Stored,
    Tidied,
    Unknown,
    WorkStatus,
)
from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreUnavailableError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.ports.clock import Clock, SystemClock

HEADER = f"aiodelay {aiodelay.__version__}"
"""Another version might decide otherwise: its logs are not carried out."""


class LogStore(MemoryStore):
    """The memory store, whose calls are written down before they are answered.

    What the memory store does depends on nothing but its calls, their order and their time: the same calls at the
    same times make the same store again. The file grows with each call.

    Args:
        path: The file.
        clock: Where the store reads the time.
        journal: Most entries of the journal to keep; 0 = keep none.
    """

    traits = replace(MemoryStore.traits, durable=True)

    def __init__(self, path: Path, *, clock: Clock | None = None, journal: int = 0) -> None:
        self.path, self.name = path, f"log {path}"
        self._settings: dict[str, Any] = {"clock": StandingClock(clock or SystemClock()), "journal": journal}
        super().__init__(**self._settings)

    async def __aenter__(self) -> Self:
        super().__init__(**self._settings)  # empty: the log tells the rest
        self._time: StandingClock = self._settings["clock"]
        self._order, self._workers_opened = asyncio.Lock(), count()
        self._file = self._opened()
        try:
            await self._replay()
        except BaseException:
            self._file.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._file.close()

    def _opened(self) -> FileIO:
        try:
            file = self.path.open("a+b", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StoreUnavailableError(self.name, "another process has it open") from None
        except OSError as error:
            raise StoreUnavailableError(self.name, str(error)) from error
        return file

    # --- the log ------------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Carry out again what the file tells; cut off a last entry that was not written to its end."""
        self._file.seek(0)
        log = BytesIO(self._file.read())
        whole, works = 0, dict[int, Work]()
        async with AsyncExitStack() as opened:
            while (entry := _read(log)) is not None:
                match entry:
                    case str():  # an opening: no worker of the one before is left
                        await opened.aclose()
                        if entry != HEADER:
                            raise StoreMismatchError(
                                self.name, f"of {entry}", f"of {HEADER}: empty it with that version"
                            )
                    case (worker, name, arguments, at_ms):
                        self._time.at_ms = at_ms
                        if name == "work":
                            works[worker] = await opened.enter_async_context(super().work(*arguments))
                            next(self._workers_opened)
                        elif name == "beat":
                            works[worker].beat(*arguments[0])
                        elif worker is None:
                            await getattr(super(), name)(*arguments[0], **arguments[1])
                        else:
                            await getattr(works[worker], name)(*arguments[0], **arguments[1])
                whole = log.tell()
        self._time.at_ms = None
        self._file.truncate(whole)
        self._write(HEADER)

    async def log(
        self, do: Callable[..., Coroutine[Any, Any, Any]], *args: object, worker: int | None = None, **options: object
    ) -> Any:  # noqa: ANN401 - what the call returns
        """Carry out a call, write it down, and return its answer: one call at a time, all of it at one instant.

        Raises:
            StoreUnavailableError: The file takes nothing, now or before. It may have been written down.
        """
        async with self._order:
            if self._file.closed:
                raise StoreUnavailableError(self.name, "a write failed; open it again")
            try:
                at_ms = self._time.stand()
                answer = await do(*args, **options)
            finally:
                self._time.at_ms = None
            self._write((worker, do.__name__, (args, options), at_ms), is_durable=do.__name__ not in UNDURABLE)
            return answer

    def _write(self, entry: object, *, is_durable: bool = True) -> None:
        """Write; the loop waits for the disk, as it would not in a store for many users."""
        buffer = BytesIO()
        Pickler(buffer).dump(entry)
        try:
            left = buffer.getvalue()
            while left:  # a disk that becomes full takes a part of it first
                left = left[self._file.write(left) :]
            if is_durable:
                os.fsync(self._file.fileno())
        except OSError as error:  # what is in memory is ahead of the file: nothing more is answered
            self._file.close()
            raise StoreUnavailableError(self.name, str(error)) from error

    # --- what changes the store ---------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        if self._file.closed:
            return [Refused("unavailable", "a write failed; open it again")] * len(commands)
        try:
            return await self.log(super().apply, commands, source=source)  # type: ignore[no-any-return]
        except StoreUnavailableError as error:
            return [Unknown(error.reason)] * len(commands)

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        return await self.log(super().put_back, messages)  # type: ignore[no-any-return]

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        return await self.log(super().redrive, keys)  # type: ignore[no-any-return]

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        return await self.log(super().purge, keys)  # type: ignore[no-any-return]

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        return await self.log(super().pause, lane, address)  # type: ignore[no-any-return]

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        return await self.log(super().resume, lane, address)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        number = next(self._workers_opened)
        async with super().work(worker, lanes) as work:
            self._write((number, "work", (worker, list(lanes)), self._time.now_ms()))
            yield LogWork(self, work, number)


class LogWork:
    """One worker's side of the store.

    Args:
        store: Writes its calls down.
        work: Carries them out.
        number: Names the worker in the log.
    """

    def __init__(self, store: LogStore, work: Work, number: int) -> None:
        self._store, self._work, self._number = store, work, number
        self._loop = asyncio.get_running_loop()

    async def _log(self, do: Callable[..., Coroutine[Any, Any, Any]], *args: object, **options: object) -> Any:  # noqa: ANN401
        return await self._store.log(do, *args, worker=self._number, **options)

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        return await self._log(self._work.claim, dict(demand), request=request, lease_ms=lease_ms)  # type: ignore[no-any-return]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._log(self._work.settle, settlements)  # type: ignore[no-any-return]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._log(self._work.renew, renewals)  # type: ignore[no-any-return]

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._log(self._work.tidy, list(lanes), limit=limit)  # type: ignore[no-any-return]

    async def wait(self, *, until_ms: int | None) -> None:
        await self._work.wait(until_ms=until_ms)

    def wake(self) -> None:
        self._work.wake()

    def clear(self) -> None:
        self._work.clear()

    def beat(self, ids: Collection[str]) -> None:
        """Have the loop carry it out: while a handler blocks that, nobody else can take anything."""

        async def beat(ids: Collection[str]) -> None:
            self._work.beat(ids)

        asyncio.run_coroutine_threadsafe(self._log(beat, list(ids)), self._loop).result()

    def status(self) -> WorkStatus:
        return self._work.status()


UNDURABLE = {"claim", "renew", "tidy", "beat"}
"""Calls that a power loss may undo: what was claimed is given out again."""


class StandingClock:
    """A clock that can be made to stand while a call is carried out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_ms: int | None = None

    def stand(self) -> int:
        self.at_ms = self._clock.now_ms()
        return self.at_ms

    def now_ms(self) -> int:
        return self._clock.now_ms() if self.at_ms is None else self.at_ms

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms()

    def seconds_until(self, at_ms: int) -> float:
        return self._clock.seconds_until(at_ms)


class Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - as pickle has it
        if isinstance(value, Enum):  # which Pythons write in ways of their own
            return type(value), (value.value,)
        return (dict, (dict(value),)) if isinstance(value, MappingProxyType) else NotImplemented


class Unpickler(pickle.Unpickler):
    """Makes messages and commands, and nothing that a file of somebody else's may ask for."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle has it
        if (module, name) == ("builtins", "dict"):
            return super().find_class(module, name)
        if module.startswith("aiodelay.") and name in values.__all__:  # earlier versions have them in other modules
            return getattr(values, name)
        raise StoreMismatchError("log", f"of {module}.{name}", "of what aiodelay.core.values has")


def _read(log: BytesIO) -> Any:  # noqa: ANN401 - a header or a call
    """Return the next entry; None where there is none, or not all of it."""
    try:
        return Unpickler(log).load()
    except (EOFError, pickle.UnpicklingError):
        return None


def open_store(url: str, *, namespace: str, clock: Clock | None) -> LogStore:
    """Open `log:///relative/folder` or `log:////absolute/folder`, with `journal=N` as other stores have it."""
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, 1_000_000)
    options.finish()
    folder = options.parts.path[1:]
    if options.parts.netloc or not folder:
        raise ConfigurationError("store", options.masked, "log:///relative/folder or log:////absolute/folder")
    return LogStore(Path(folder, f"{namespace}.log"), clock=clock, journal=journal)
