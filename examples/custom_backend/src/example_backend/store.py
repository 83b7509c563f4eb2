"""`LogStore`, for `log:///folder`: a store for one process in one file.

The file is a log of all calls. When the store opens, it carries out the logged calls again.
"""

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
    LaneLimits,
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
"""The first entry of each opening. A store refuses the log of another version, whose rules may differ."""


class LogStore(MemoryStore):
    """A memory store that writes each call to a log before it returns the answer.

    The state of a memory store depends only on its calls, their order and their times. So the same calls at the same
    times restore the state. The file grows with each call.

    Args:
        path: The path of the file.
        clock: The clock of the store.
        journal: The most journal entries to keep; 0 = keep none.
    """

    traits = replace(MemoryStore.traits, durable=True)

    def __init__(self, path: Path, *, clock: Clock | None = None, journal: int = 0) -> None:
        self.path, self.name = path, f"log {path}"
        self._settings: dict[str, Any] = {"clock": StandingClock(clock or SystemClock()), "journal": journal}
        super().__init__(**self._settings)

    async def __aenter__(self) -> Self:
        super().__init__(**self._settings)  # start empty; the replay of the log restores the state
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
        """Carry out the logged calls again. Truncate the file after the last complete entry."""
        self._file.seek(0)
        log = BytesIO(self._file.read())
        whole, works = 0, dict[int, Work]()
        async with AsyncExitStack() as opened:
            while (entry := _read(log)) is not None:
                match entry:
                    case str():  # the store was opened here: all workers before this entry have ended
                        await opened.aclose()
                        if entry != HEADER:
                            raise StoreMismatchError(
                                self.name, f"of {entry}", f"of {HEADER}; let the version that wrote this log empty it"
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
    ) -> Any:  # noqa: ANN401 - the answers have many types
        """Carry out a call, log it, and return its answer. Calls run one at a time; the clock stands still meanwhile.

        Raises:
            StoreUnavailableError: This write or an earlier write failed. This call may be in the log.
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
        """Write an entry. This blocks the event loop until the disk answers, which only an example may do."""
        buffer = BytesIO()
        Pickler(buffer).dump(entry)
        try:
            left = buffer.getvalue()
            while left:  # a disk that becomes full may take only a part of the entry
                left = left[self._file.write(left) :]
            if is_durable:
                os.fsync(self._file.fileno())
        except OSError as error:  # the memory is ahead of the file now: refuse all further calls
            self._file.close()
            raise StoreUnavailableError(self.name, str(error)) from error

    # --- calls that change the store ----------------------------------------------------------------------

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

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        await self.log(super().set_limits, lane, limits, is_declared=is_declared)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        number = next(self._workers_opened)
        async with super().work(worker, lanes) as work:
            self._write((number, "work", (worker, list(lanes)), self._time.now_ms()))
            yield LogWork(self, work, number)


class LogWork:
    """One worker's view of the store.

    Args:
        store: The store that logs the calls.
        work: The worker's view of the memory store, which carries out the calls.
        number: The number of the worker in the log.
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
        """Run the beat on the event loop. The caller, another thread, waits while a handler blocks the loop.

        This is safe: a store for one process has no other process that could take the message meanwhile.
        """

        async def beat(ids: Collection[str]) -> None:
            self._work.beat(ids)

        asyncio.run_coroutine_threadsafe(self._log(beat, list(ids)), self._loop).result()

    def status(self) -> WorkStatus:
        return self._work.status()


UNDURABLE = {"claim", "renew", "tidy", "beat"}
"""Calls that are not synced to disk. A power loss may undo them; then claimed messages can be claimed again."""


class StandingClock:
    """A clock that stands still while the store carries out a call."""

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
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - the signature of pickle
        if isinstance(value, Enum):  # versions of Python pickle enums in different ways
            return type(value), (value.value,)
        return (dict, (dict(value),)) if isinstance(value, MappingProxyType) else NotImplemented


class Unpickler(pickle.Unpickler):
    """An unpickler that creates only messages and commands. Other classes in a file could run any code."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - the signature of pickle
        if (module, name) == ("builtins", "dict"):
            return super().find_class(module, name)
        if module.startswith("aiodelay.") and name in values.__all__:  # the module differs in earlier versions
            return getattr(values, name)
        raise StoreMismatchError("log", f"with an object of {module}.{name}", "objects of aiodelay.core.values")


def _read(log: BytesIO) -> Any:  # noqa: ANN401 - a header or a call
    """Return the next entry; None at the end of the log and at an incomplete entry."""
    try:
        return Unpickler(log).load()
    except (EOFError, pickle.UnpicklingError):
        return None


def open_store(url: str, *, namespace: str, clock: Clock | None) -> LogStore:
    """Open `log:///relative/folder` or `log:////absolute/folder`. The option `journal=N` works as in other stores."""
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, 1_000_000)
    options.finish()
    folder = options.parts.path[1:]
    if options.parts.netloc or not folder:
        raise ConfigurationError("store", options.masked, "log:///relative/folder or log:////absolute/folder")
    return LogStore(Path(folder, f"{namespace}.log"), clock=clock, journal=journal)
