"""`BlockingScheduler`, for code that is not asynchronous: scripts, Django, worker threads."""

from __future__ import annotations

import asyncio
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from threading import Lock, Thread
from typing import Final, Literal, Self, TypeVar

from anyio.from_thread import BlockingPortal

from .core.durations import Duration
from .core.recurrence import Cron, Every
from .core.values import (
    NO_HEADERS,
    Blocked,
    CancelOutcome,
    Conflict,
    DeadKey,
    DeadLetter,
    FireOutcome,
    JournalEntry,
    Lane,
    LaneCounts,
    Late,
    Limit,
    LimitedKey,
    LoadBucket,
    Message,
    Outcome,
    PartlyScheduledError,
    Rejected,
    RescheduleOutcome,
    Scheduled,
    Snapshot,
)
from .engine.control import PAGE
from .errors import BlockingCallError, ClosedError, ConfigurationError, InputError, kind_of
from .ports import Sink
from .scheduler import Scheduler

__all__ = ["BlockingScheduler"]

T = TypeVar("T")
FORK_WAIT_S: Final = 1.0
"""How long a fork waits for another thread that connects."""
CHUNK: Final = 2_000
"""The number of messages that `schedule_many` reads and then stores together, in four concurrent round trips."""


class _Control(ABC):
    """The operators' methods of `BlockingScheduler`."""

    @abstractmethod
    def call(self, function: Callable[[Scheduler], Awaitable[T]], /) -> T:
        """Call a method of the scheduler."""

    def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages by lane and state, as `Scheduler.counts`."""
        return self.call(lambda scheduler: scheduler.counts())

    def load(self, *, bucket: Duration, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due in each of the next spans of time, as `Scheduler.load`."""
        return self.call(lambda scheduler: scheduler.load(bucket=bucket, buckets=buckets))

    def pause(self, what: type | str) -> bool:
        """Pause a lane or one destination, as `Scheduler.pause`."""
        return self.call(lambda scheduler: scheduler.pause(what))

    def resume(self, what: type | str) -> bool:
        """Resume a paused lane or destination, as `Scheduler.resume`."""
        return self.call(lambda scheduler: scheduler.resume(what))

    def paused(self) -> Sequence[str]:
        """List the paused lanes and destinations, as `Scheduler.paused`."""
        return self.call(lambda scheduler: scheduler.paused())

    def blocked(self) -> Sequence[Blocked]:
        """List the blocked destinations, as `Scheduler.blocked`."""
        return self.call(lambda scheduler: scheduler.blocked())

    def set_limits(self, what: type | str, *limits: Limit) -> None:
        """Set the limits of a handler's messages or of a sink, as `Scheduler.set_limits`."""
        self.call(lambda scheduler: scheduler.set_limits(what, *limits))

    def limits(self) -> Mapping[Lane, Sequence[Limit]]:
        """Return the limits of all handlers and sinks, as `Scheduler.limits`."""
        return self.call(lambda scheduler: scheduler.limits())

    def limited_keys(self, what: type | str, *, limit: int = 100) -> Sequence[LimitedKey]:
        """List keys in flight or waiting because of a limit, as `Scheduler.limited_keys`."""
        return self.call(lambda scheduler: scheduler.limited_keys(what, limit=limit))


class BlockingScheduler(_Control):
    """Schedules messages from code that is not asynchronous. Each call returns when it is done.

    The scheduler connects at the first call, on an event loop in a thread of its own. It stays connected until
    `close()` or the end of its `with` block. A later call connects again. A process may also end without closing: a
    message is in the store once its call has returned. A forked process makes its own connection at its first call.
    With SQLite, a fork first closes the connection, because SQLite cannot open a file again that was open at the fork.
    If a call of another thread is under way at that moment, the calls of the forked process raise `WrongLoopError`.

    Any number of threads may use the scheduler at once; calls at the same time share a round trip. A blocking scheduler
    has no handlers and delivers nothing. Delivery needs a process with a `Scheduler`, such as
    `aiodelay run module:scheduler`.

    Args:
        store: A URL.
        namespace: The namespace of the `Scheduler` that delivers. All other settings must match that scheduler's too.
        sinks: The sinks that `to=` may name. This scheduler does not connect to them.
        encoding: The encoding for typed events.
        check_events: Whether typed events are decoded again before they are stored.
        max_payload: Most bytes of an encoded event.
        allowed_targets: The destinations that `to=` may name; None = all.
        store_timeout: How long a command waits to be sent, and then for the answer, before it fails.
        open_timeout: How long connecting tries again while the store does not answer; None = one attempt.

    Raises:
        ConfigurationError: A setting is wrong. The error names the setting, its value and the allowed values.
    """

    def __init__(
        self,
        store: str,
        *,
        namespace: str = "default",
        sinks: Collection[Sink | str] = (),
        encoding: Literal["json", "msgpack"] = "json",
        check_events: bool = True,
        max_payload: int = 262_144,
        allowed_targets: Collection[str] | None = None,
        store_timeout: Duration = "10s",
        open_timeout: Duration | None = None,
    ) -> None:
        if not isinstance(store, str):
            raise ConfigurationError("store", kind_of(store), "a URL: each connection makes a store of its own")
        make = partial(
            Scheduler,
            store,
            namespace=namespace,
            sinks=sinks,
            dispatch=False,
            encoding=encoding,
            check_events=check_events,
            max_payload=max_payload,
            allowed_targets=allowed_targets,
            store_timeout=store_timeout,
            open_timeout=open_timeout,
        )
        self._shown = repr(make())  # makes a scheduler to check all settings here, not at the first call
        self._shared = _SharedConnection(make)

    def __repr__(self) -> str:
        return f"<Blocking{self._shown[1:].rpartition(' ')[0]} {'open' if self._shared.is_open else 'closed'}>"

    # --- open and closed ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Connect to the store.

        Raises:
            StoreUnavailableError: The store cannot be reached.
            StoreMismatchError: This version cannot use the store's data.
            BlockingCallError: An event loop is running in this thread.
        """
        _refuse_in_a_loop()
        self._shared.get()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Disconnect."""
        self.close()

    def close(self) -> None:
        """Wait until the calls of other threads have returned, and disconnect. A repeated call does nothing."""
        self._shared.close()

    def call(self, function: Callable[[Scheduler], Awaitable[T]], /) -> T:
        """Call any other method of a scheduler: `blocking.call(lambda scheduler: scheduler.reaches("redis-list"))`.

        If Ctrl-C interrupts the wait, the call is cancelled. A message that was already sent may be stored.

        Args:
            function: A function that takes the scheduler. It is called on the scheduler's event loop, which then awaits
                the result.

        Raises:
            BlockingCallError: An event loop is running in this thread.
            StoreUnavailableError, StoreMismatchError: The scheduler cannot connect.
        """
        _refuse_in_a_loop()
        connection = self._shared.get()
        while (answer := connection.start(function)) is None:  # another thread has closed the connection meanwhile
            connection = self._shared.get()
        try:
            return answer.result()
        finally:
            answer.cancel()

    # --- schedule and change ------------------------------------------------------------------------------

    def schedule(
        self,
        event: object,
        /,
        *,
        at: datetime | None = None,
        delay: Duration | None = None,
        every: Every | Cron | None = None,
        id: str | None = None,  # noqa: A002 - the word users look for
        to: str | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] = NO_HEADERS,
        conflict: Conflict = Conflict.replace(),  # noqa: B008 - immutable
        late: Late = Late.deliver(),  # noqa: B008 - immutable
        spread: Duration | None = None,
    ) -> Scheduled:
        """Store a message until it is due. Arguments, answers and errors are those of `Scheduler.schedule`.

        After an `OutcomeUnknownError`, `blocking.call(lambda _: error.retry())` safely finds out the outcome.
        """
        return self.call(
            lambda scheduler: scheduler.schedule(
                event,
                at=at,
                delay=delay,
                every=every,
                id=id,
                to=to,
                key=key,
                headers=headers,
                conflict=conflict,
                late=late,
                spread=spread,
            )
        )

    def schedule_many(self, messages: Iterable[Message], *, progress: Callable[[int], object] | None = None) -> int:
        """Store many messages, as `Scheduler.schedule_many`, from a plain iterable of any length.

        This thread reads the iterable, and calls `progress` after each 2,000 messages.
        """
        if not isinstance(messages, Iterable):
            raise InputError("messages", kind_of(messages), "an iterable of Message")
        stored, position = 0, 0
        rejected: list[Rejected] = []
        try:
            for chunk in filter(None, _chunks(messages)):
                try:
                    stored += self._schedule_chunk(chunk)
                except PartlyScheduledError as error:
                    stored += error.stored
                    rejected += [Rejected(position + each.position, each.error) for each in error.rejected]
                position += len(chunk)
                if progress is not None:
                    progress(stored)
        except Exception as error:
            if rejected:
                error.add_note(f"schedule_many: {PartlyScheduledError(stored, rejected)}")
            raise
        if rejected:
            raise PartlyScheduledError(stored, rejected)
        return stored

    def _schedule_chunk(self, chunk: list[Message]) -> int:
        return self.call(lambda scheduler: scheduler.schedule_many(chunk))

    def cancel(self, message_id: str, *, if_revision: int | None = None) -> CancelOutcome:
        """End a message, as `Scheduler.cancel`."""
        return self.call(lambda scheduler: scheduler.cancel(message_id, if_revision=if_revision))

    def reschedule(
        self, message_id: str, *, at: datetime | None = None, delay: Duration | None = None
    ) -> RescheduleOutcome:
        """Move a pending message to another time, as `Scheduler.reschedule`."""
        return self.call(lambda scheduler: scheduler.reschedule(message_id, at=at, delay=delay))

    def fire(self, message_id: str) -> FireOutcome:
        """Make a pending message due now, as `Scheduler.fire`."""
        return self.call(lambda scheduler: scheduler.fire(message_id))

    def get(self, message_id: str) -> Snapshot | None:
        """Return the current state of a message, as `Scheduler.get`."""
        return self.call(lambda scheduler: scheduler.get(message_id))

    # --- operate ------------------------------------------------------------------------------------------

    def pending(
        self,
        of: type | str | None = None,
        *,
        since: datetime | None = None,
        before: datetime | None = None,
        limit: int | None = None,
    ) -> Iterator[Snapshot]:
        """Yield messages that are pending or in flight, as `Scheduler.pending`.

        Raises:
            ClosedError: The connection was closed meanwhile, by `close()` or by a fork. Some messages are missing.
        """
        return self._each(lambda scheduler: scheduler.pending(of, since=since, before=before, limit=limit))

    def dead_letters(
        self, of: type | str | None = None, *, message_id: str | None = None, limit: int | None = None
    ) -> Iterator[DeadLetter]:
        """Yield dead letters, oldest first, as `Scheduler.dead_letters`. It raises the same errors as `pending`."""
        return self._each(lambda scheduler: scheduler.dead_letters(of, message_id=message_id, limit=limit))

    def redrive(self, *letters: DeadLetter | DeadKey) -> Sequence[Outcome]:
        """Schedule dead letters again, due now, as `Scheduler.redrive`."""
        return self.call(lambda scheduler: scheduler.redrive(*letters))

    def purge(self, *letters: DeadLetter | DeadKey) -> int:
        """Delete dead letters, as `Scheduler.purge`."""
        return self.call(lambda scheduler: scheduler.purge(*letters))

    def journal(self, message_id: str | None = None, *, after: int = 0, limit: int = 100) -> Sequence[JournalEntry]:
        """List journal entries, in order, as `Scheduler.journal`."""
        return self.call(lambda scheduler: scheduler.journal(message_id, after=after, limit=limit))

    def _each(self, start: Callable[[Scheduler], AsyncIterator[T]]) -> Iterator[T]:
        """Yield the items of a scheduler's asynchronous generator, page by page.

        Raises:
            ClosedError: The connection was closed between two pages, also by a fork. The generator ended with it.
        """
        begun: tuple[Scheduler, AsyncIterator[T]] | None = None

        async def page(scheduler: Scheduler) -> list[T]:
            nonlocal begun
            begun = (scheduler, start(scheduler)) if begun is None else begun
            if begun[0] is not scheduler:
                raise ClosedError("the connection of this iteration", "closed", "begin the iteration again")
            read: list[T] = []
            async for each in begun[1]:
                read.append(each)
                if len(read) == PAGE:
                    break
            return read

        while read := self.call(page):
            yield from read
            if len(read) < PAGE:
                return


class _Connection:
    """An open scheduler on an event loop of its own, in a daemon thread, which does not keep the process alive.

    Raises:
        AiodelayError: The scheduler could not be opened.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._calls: set[object] = set()
        self._opening: Future[BlockingPortal] = Future()
        self._thread = Thread(target=self._run, name="aiodelay blocking", daemon=True)
        try:
            self._thread.start()  # waits until the thread runs; Ctrl-C can interrupt this wait
            self._portal = self._opening.result()
        finally:
            self._opening.cancel()  # after an interruption: end the opening, or close what has just been opened

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            if not self._opening.cancelled():
                raise
        except Exception as error:
            if self._opening.done():
                raise
            self._opening.set_exception(error)

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._opening.add_done_callback(partial(_cancel_too, task))
        async with self._scheduler, BlockingPortal() as portal:
            if self._opening.set_running_or_notify_cancel():
                self._opening.set_result(portal)
                await portal.sleep_until_stopped()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open. It also closes if the scheduler fails."""
        return self._thread.is_alive()

    def start(self, function: Callable[[Scheduler], Awaitable[T]]) -> Future[T] | None:
        """Call a function on the loop; return None if the connection is closed or being closed."""
        under_way = object()
        self._calls.add(under_way)  # first: the call may already run when `start_task_soon` returns
        try:
            call = self._portal.start_task_soon(function, self._scheduler)
        except RuntimeError:
            self._calls.discard(under_way)
            self._thread.join()
            return None
        call.add_done_callback(lambda _: self._calls.discard(under_way))
        return call

    @property
    def must_close_before_fork(self) -> bool:
        """Whether a fork must close the connection, and can: no call is under way."""
        return not self._scheduler.store.traits.open_over_fork and self.is_open and not self._calls

    def close(self) -> None:
        stopped = self.start(lambda _: self._portal.stop())
        if stopped is not None:
            stopped.result()
        self._thread.join()


class _SharedConnection:
    """The connection that all threads of this process share. The first call makes it.

    Args:
        make: Makes a scheduler that is not open yet.
    """

    def __init__(self, make: Callable[[], Scheduler]) -> None:
        self._make = make
        self.forget()
        _ALL.add(self)

    def forget(self) -> None:
        """Drop the connection without closing it. After a fork, only the parent has the connection's thread."""
        self._lock = Lock()
        self._is_forking = False
        self._connection: _Connection | None = None

    def prepare_fork(self) -> None:
        """Close a connection that must not be open at a fork, and make none until the fork is over."""
        self._is_forking = self._lock.acquire(timeout=FORK_WAIT_S)
        if self._is_forking and self._connection is not None and self._connection.must_close_before_fork:
            connection, self._connection = self._connection, None
            connection.close()

    def end_fork(self) -> None:
        """Allow connections again."""
        if self._is_forking:
            self._is_forking = False
            self._lock.release()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def get(self) -> _Connection:
        """Return the connection. If there is none, or if it has ended, make a new connection."""
        with self._lock:
            if self._connection is None or not self._connection.is_open:
                self._connection = _Connection(self._make())
            return self._connection

    def close(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _cancel_too(task: asyncio.Task[object], opening: Future[BlockingPortal]) -> None:
    """If the opening was cancelled, cancel the task that opens the scheduler. Any thread may call this."""
    if opening.cancelled():
        with suppress(RuntimeError):  # the task's loop has already ended
            task.get_loop().call_soon_threadsafe(task.cancel)


def _chunks(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Read messages in chunks. If reading fails, yield the messages that were read until then, and raise the error."""
    chunk: list[Message] = []
    try:
        for message in messages:
            chunk.append(message)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
    except Exception:
        yield chunk
        raise
    yield chunk


def _refuse_in_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCallError("BlockingScheduler")


_ALL: weakref.WeakSet[_SharedConnection] = weakref.WeakSet()


def _prepare_fork() -> None:
    for each in list(_ALL):
        each.prepare_fork()


def _end_fork_in_parent() -> None:
    for each in list(_ALL):
        each.end_fork()


def _forget_in_child() -> None:
    for each in list(_ALL):
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_parent=_end_fork_in_parent, after_in_child=_forget_in_child)
