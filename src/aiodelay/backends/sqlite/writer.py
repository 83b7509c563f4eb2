"""`Writer`: the thread that runs all write transactions of an open store.

Jobs that arrive during a transaction share the next transaction, and so one fsync. This module creates no task. On the
event loop, it runs only the callbacks of futures from `run_in_executor`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from aiodelay.core.pulse import ANSWER_MS
from aiodelay.errors import ClosedError, StoreTooNewError
from aiodelay.ports.clock import Clock

from .connection import BAD_VALUE, Database, Failure, bad_value, failure_of, open_error
from .tables import Tables

__all__ = ["Job", "Writer"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiodelay.sqlite")

MOST_JOBS = 500
MOST_MESSAGES = 2_000


class Job(Generic[T]):
    """One write call of the store.

    Args:
        run: The function to run in a transaction. If the shared transaction of a batch fails, `run` runs again in a
            transaction of its own, in which `Tables.careful` is set.
        failed: A function for a failure. It returns the answer for the caller, or raises an error for the caller.
        size: The number of messages that the job handles.
        is_durable: True if the answer must wait until the disk has the data.
        committed: A function to call with the answer after the commit. It runs in the writer's thread, even if the
            caller was cancelled meanwhile.
    """

    __slots__ = ("answer", "committed", "error", "failed", "future", "is_durable", "run", "size")

    run: Callable[[Tables], T]
    failed: Callable[[Failure], T]
    size: int
    is_durable: bool
    committed: Callable[[T], object] | None

    def __init__(
        self,
        run: Callable[[Tables], T],
        failed: Callable[[Failure], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        committed: Callable[[T], object] | None = None,
    ) -> None:
        self.run, self.failed, self.size = run, failed, size
        self.is_durable, self.committed = is_durable, committed
        self.future: asyncio.Future[T] | None = None
        self.answer: T | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Give the answer or the error to the caller. Only the event loop calls this method."""
        if self.future is None or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.answer)  # type: ignore[arg-type]

    def give_up(self, failure: Failure, cause: BaseException) -> None:
        """Set the answer or the error of this job after its transaction failed."""
        if not isinstance(cause, (sqlite3.Error, StoreTooNewError, *BAD_VALUE)):
            self.error = cause  # This is a bug in aiodelay. The caller gets the error unchanged.
            return
        try:
            self.answer = self.failed(failure)
        except Exception as error:  # noqa: BLE001 - `finish` raises it for the caller
            error.__cause__ = cause
            self.error = error


class Writer:
    """Runs jobs in batches on a thread, in the order in which the jobs arrive.

    Args:
        path: The absolute path of the file.
        namespace: The namespace that the jobs read and write.
        journal: The largest number of journal entries to keep.
        clock: The clock of the store. The thread may wait for the write lock for seconds, so it reads the clock only
            when it has the lock.
        woken: A function to call on the event loop when the earliest message of a lane may have changed. This happens
            after a batch that put messages into lanes, and after a write of another process.
    """

    def __init__(self, path: str, namespace: str, journal: int, clock: Clock, woken: Callable[[], object]) -> None:
        self._path, self._namespace, self._journal, self._clock, self._woken = path, namespace, journal, clock, woken
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, "aiodelay-sqlite-writer")
        self._waiting: deque[Job[Any]] = deque()
        self._is_running = False
        self._is_closed = False
        self._idle: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Open the file. If it does not exist, create it.

        Raises:
            StoreUnavailableError: The file cannot be opened.
            StoreMismatchError: The file belongs to another program, is damaged, or has a newer schema.
        """
        opening = self._loop.run_in_executor(self._executor, self._open)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_ignore_result)
            self._abandon()
            raise
        except Exception:
            self._executor.shutdown()
            raise

    def _open(self) -> None:
        self._database = Database(self._path)
        self._tables = Tables(self._database.connection, self._namespace, self._journal)
        try:
            self._database.begin(is_durable=True)
            self._tables.open()
            self._database.commit()
            self._data_version = -1
            self._has_foreign()
        except sqlite3.Error as error:
            self._database.close()
            raise open_error(error, self._path) from error
        except BaseException:
            self._database.close()
            raise

    async def do(self, job: Job[T]) -> T:
        """Queue a job, run it in a batch, and return its answer.

        If the caller is cancelled before the job starts, the job does not run. If the caller is cancelled later, the
        job still runs to its end.

        Raises:
            ClosedError: The store is closing.
        """
        if self._is_closed:
            raise ClosedError("store", "closed")
        future: asyncio.Future[T] = self._loop.create_future()
        job.future = future
        self._waiting.append(job)
        if not self._is_running:
            self._start()
        return await future

    def _start(self) -> None:
        jobs = self._next_batch()
        if not jobs:
            self._is_running = False
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            return
        self._is_running = True
        try:
            running = self._loop.run_in_executor(self._executor, self._run, jobs)
        except RuntimeError:  # Race: the executor was shut down since the job was queued, or the interpreter ends.
            self._refuse([*jobs, *self._waiting])
            return
        running.add_done_callback(lambda done: self._finished(jobs, done))

    def _refuse(self, jobs: Sequence[Job[Any]]) -> None:
        self._waiting.clear()
        self._is_running = False
        for job in jobs:
            job.error = ClosedError("store", "closed")
            job.finish()

    def _next_batch(self) -> list[Job[Any]]:
        jobs: list[Job[Any]] = []
        size = 0
        while self._waiting and len(jobs) < MOST_JOBS:
            job = self._waiting[0]
            if jobs and size + job.size > MOST_MESSAGES:
                break
            self._waiting.popleft()
            if job.future is not None and not job.future.done():  # If it is done, the caller was cancelled.
                jobs.append(job)
                size += job.size
        return jobs

    def _finished(self, jobs: Sequence[Job[Any]], done: asyncio.Future[bool]) -> None:
        error = ClosedError("store", "closed") if done.cancelled() else done.exception()
        for job in jobs:
            if error is not None and job.error is None:
                job.error = error
            job.finish()
        if error is None and done.result():
            self._woken()
        self._start()

    def do_apart(self, job: Job[T]) -> T:
        """Run a job in a transaction of its own, for a caller in a thread other than the event loop's.

        Block until the transaction has ended, also while the event loop is blocked.

        Raises:
            ClosedError: The store is closed.
            TimeoutError: The transaction has not ended within a second. It may still run later.
        """
        try:
            running = self._executor.submit(self._run, [job])
        except RuntimeError:  # The executor was shut down.
            raise ClosedError("store", "closed") from None
        running.add_done_callback(self._has_run_apart)
        running.result(ANSWER_MS / 1000)
        if job.error is not None:
            raise job.error
        return job.answer  # type: ignore[return-value]

    def _has_run_apart(self, done: Future[bool]) -> None:
        if not done.cancelled() and done.exception() is None and done.result():
            with suppress(RuntimeError):  # The event loop is closed.
                self._loop.call_soon_threadsafe(self._woken)

    def look_around(self) -> None:
        """Ask the thread whether another process has written to the file. If so, call `woken`.

        Do not wait for the answer.

        The thread asks on the writing connection, because the `data_version` of a connection does not count its own
        commits.
        """
        if not self._is_closed:
            self._loop.run_in_executor(self._executor, self._has_foreign).add_done_callback(self._looked)

    def _looked(self, done: asyncio.Future[bool]) -> None:
        if not done.cancelled() and (done.exception() is not None or done.result()):
            self._woken()

    def _has_foreign(self) -> bool:
        (version,) = self._database.connection.execute("PRAGMA data_version").fetchone()
        before, self._data_version = self._data_version, version
        return bool(before != version)

    async def join(self, end: Callable[[], object]) -> None:
        """Run a blocking function in the writer's thread, and wait for it."""
        await self._loop.run_in_executor(self._executor, end)

    async def close(self) -> None:
        """Wait for the queued jobs. Then close the file and end the thread."""
        self._is_closed = True
        try:
            while self._is_running:
                self._idle = self._loop.create_future()
                await self._idle
            await self._loop.run_in_executor(self._executor, self._close)
        except asyncio.CancelledError:
            self._abandon()
            raise
        self._executor.shutdown()

    def _abandon(self) -> None:
        """Make the thread close the file and end after its current work. Do not wait for the thread."""
        self._is_closed = True
        self._loop.run_in_executor(self._executor, self._close).add_done_callback(_ignore_result)
        self._executor.shutdown(wait=False)

    def _close(self) -> None:
        if hasattr(self, "_database"):
            self._database.close()

    # --- in the thread ------------------------------------------------------------------------------------

    def _run(self, jobs: Sequence[Job[Any]]) -> bool:
        """Run all jobs in one transaction. If it fails, run each job in a transaction of its own.

        So a job that fails does not make other jobs fail. If the failure would be the same for each job, do not run
        the jobs again: each job gets this failure.

        Returns:
            True if the jobs put messages into lanes, or if the outcome of the commit is unknown.
        """
        failed = self._attempt(jobs, careful=False)
        if failed is None:
            return self._tables.has_new
        if failed.failure.is_full:
            self._database.make_room()
        has_new = False
        for job in jobs:
            alone = failed if failed.is_common else self._attempt([job], careful=True)
            if alone is not None:
                job.give_up(alone.failure, alone.error)
            else:
                has_new |= self._tables.has_new
        return has_new or failed.failure.is_in_doubt

    def _attempt(self, jobs: Sequence[Job[Any]], *, careful: bool) -> _Failed | None:
        step = "begin"
        try:
            self._database.begin(is_durable=any(job.is_durable for job in jobs))
            step = "run"
            self._tables.begin(self._clock.now_ms(), careful=careful)
            for job in jobs:
                job.answer = job.run(self._tables)
            self._tables.end()
            step = "commit"
            self._database.commit()
        except Exception as error:  # noqa: BLE001 - every job of the batch gets this error
            self._database.rollback()
            self._tables.forget_caches()
            return self._judged(error, step, careful=careful)
        for job in jobs:
            if job.committed is not None:
                job.committed(job.answer)
        return None

    def _judged(self, error: Exception, step: str, *, careful: bool) -> _Failed:
        if isinstance(error, BAD_VALUE):
            return _Failed(bad_value(error), error, is_common=False)
        if isinstance(error, StoreTooNewError):
            return _Failed(Failure(str(error), too_new=error), error, is_common=step == "begin")
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError):
            failure = failure_of(error, self._path, at_commit=step == "commit")
            return _Failed(failure, error, is_common=step == "begin" or failure.is_in_doubt)
        if careful:
            log.error("a transaction failed because of a bug in aiodelay; the transaction was undone", exc_info=error)
        return _Failed(Failure(f"a bug in aiodelay raised {type(error).__name__}"), error, is_common=False)


class _Failed(NamedTuple):
    """A failed transaction. `is_common` is True if every single job would fail in a transaction of its own too."""

    failure: Failure
    error: Exception
    is_common: bool


def _ignore_result(done: asyncio.Future[None]) -> None:
    """Read the result of a future that nobody awaits. Otherwise asyncio logs an error of the future."""
    if not done.cancelled():
        done.exception()
