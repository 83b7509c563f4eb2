"""SQLite stores on a simulated loop: their threads are simulated too, and their transactions fail as a seed says.

The files are real. What a thread does takes no time, but begins at a time that the seed chooses.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, TypeVarTuple, Unpack
from unittest.mock import patch

from aiodelay.backends.sqlite import claims, opened, writer
from aiodelay.backends.sqlite.connection import Database
from aiodelay.testing.storms import SeededLoop

__all__ = ["SimulatedSqlite", "ThreadlessLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
WATCH_S = 0.05
"""The longest time until a store notices the write of another one."""
NOT_BEGUN = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR)
NOT_COMMITTED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR_WRITE)
IN_DOUBT = sqlite3.SQLITE_IOERR_FSYNC


class _Thread(Executor):
    """An executor with one thread, which `ThreadlessLoop` simulates."""

    def __init__(self, *_: object) -> None:
        self.is_shut_down = False
        self.free_at_s = 0.0

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_shut_down = True


class ThreadlessLoop(SeededLoop):
    """A seeded loop that makes the calls of a `_Thread` itself, in order, at times that the seed chooses."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._delays = random.Random(seed)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call `callback` soon. No thread calls this, so no socket has to wake the loop."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        if not isinstance(executor, _Thread):
            return super().run_in_executor(executor, func, *args)
        if executor.is_shut_down:
            raise RuntimeError("the executor was shut down")
        answer: asyncio.Future[T] = self.create_future()
        executor.free_at_s = max(executor.free_at_s, self.time()) + self._delays.choice((1e-6, 1e-3, 0.02))
        self.call_at(executor.free_at_s, _call, answer, func, args)
        return answer


def _call(answer: asyncio.Future[T], func: Callable[[Unpack[Ts]], T], args: tuple[*Ts]) -> None:
    if answer.cancelled():
        return
    try:
        result = func(*args)
    except BaseException as error:  # noqa: BLE001 - for the caller, as with a thread
        answer.set_exception(error)
    else:
        answer.set_result(result)


class SimulatedSqlite:
    """Simulates the threads of all SQLite stores while `installed`, and lets their transactions fail.

    Args:
        loop: The loop of the stores.
        chance: Chooses the failures.

    Attributes:
        probability: The probability that a transaction fails.
    """

    def __init__(self, loop: ThreadlessLoop, chance: random.Random) -> None:
        self._loop, self._chance = loop, chance
        self._watchers: list[_Watcher] = []
        self.probability = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Simulate threads during the block."""
        begin, commit = Database.begin, Database.commit

        def simulated_begin(database: Database, *, is_durable: bool) -> None:
            self._may_fail(NOT_BEGUN)
            begin(database, is_durable=False)  # A simulated machine loses no power, and a sync takes real time.

        def simulated_commit(database: Database) -> None:
            self._may_fail((*NOT_COMMITTED, IN_DOUBT))
            commit(database)
            for watcher in self._watchers:
                self._loop.call_later(self._chance.uniform(0, WATCH_S), watcher.look)
            self._may_fail((IN_DOUBT,))

        with (
            patch.object(Database, "begin", simulated_begin),
            patch.object(Database, "commit", simulated_commit),
            patch.object(writer, "ThreadPoolExecutor", _Thread),
            patch.object(opened, "ThreadPoolExecutor", _Thread),
            patch.object(opened, "Watcher", self._watcher),
            patch.object(claims, "os", SimpleNamespace(urandom=self._chance.randbytes)),
        ):
            yield

    def _may_fail(self, codes: tuple[int, ...]) -> None:
        if self._chance.random() < self.probability:
            error = sqlite3.OperationalError("as the seed says")
            error.sqlite_errorcode, error.sqlite_errorname = self._chance.choice(codes), "SIMULATED"
            raise error

    def _watcher(self, path: Path, changed: Callable[[], object]) -> _Watcher:
        watcher = _Watcher(changed, self._watchers)
        self._watchers.append(watcher)
        return watcher


class _Watcher:
    """A simulated `Watcher`."""

    def __init__(self, changed: Callable[[], object], watchers: list[_Watcher]) -> None:
        self._changed, self._watchers = changed, watchers

    def look(self) -> None:
        if self in self._watchers:
            self._changed()

    def stop(self) -> None:
        self._watchers.remove(self)

    def join(self) -> None: ...
