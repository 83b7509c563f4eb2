"""Writing the rows of one task into a store: composing, pacing, concurrent calls, and retries.

`writing.py` calls `load` in tasks. `ending.py` and `moving.py` use `Patience` and `opened`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pyarrow as pa
from msgspec import Struct

from aiodelay.core.durations import format_duration, from_epoch_ms
from aiodelay.core.values import Outcome, Put, Refused, Stored, Unknown
from aiodelay.errors import ConfigurationError, InputError, StoreError, StoreFullError, StoreUnavailableError
from aiodelay.ports import BulkLoad, Store
from aiodelay.ports.clock import SystemClock

from .composing import parts_of, puts_of
from .pacing import Pacer, rows_at_once
from .write_settings import WriteSettings, store_of

__all__ = ["Counts", "Patience", "load", "opened", "unanswered"]

CALLS_AT_ONCE = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Counts(Struct, frozen=True):
    """The number of rows by outcome.

    Attributes:
        stored: Rows that are new in the store.
        replaced: Rows that replaced an older version.
        known: Rows that changed nothing, because the store has the same or a higher version, or remembers that the
            version ended. If the answer for a stored row is lost, the row is sent again and counts as known.
    """

    stored: int = 0
    replaced: int = 0
    known: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.stored + other.stored, self.replaced + other.replaced, self.known + other.known)

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.stored + self.replaced + self.known


def load(settings: WriteSettings, batches: Iterator[pa.RecordBatch]) -> Counts:
    """Store the rows of the batches and return their counts. A repeated call changes nothing.

    Raises:
        InputError: A row cannot be a message.
        StoreUnavailableError: The store did not answer for `patience_ms`.
        StoreFullError: The store was full for `patience_ms`.
        ConfigurationError: The time `until_ms` has passed before all rows were sent.
    """
    return asyncio.run(_load(settings, batches))


async def _load(settings: WriteSettings, batches: Iterator[pa.RecordBatch]) -> Counts:
    async with opened(partial(store_of, settings), settings.patience_ms) as store:
        loader = _Loader(store, settings)
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                # wait for the next batch in a thread, so that this loop can read answers in the meantime
                while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                    await loader.load(batch, tasks)
        except ExceptionGroup as found:
            failure = found.exceptions[0]
        if failure is not None:
            raise failure
        return loader.counts


class _Loader:
    def __init__(self, store: Store, settings: WriteSettings) -> None:
        self.counts = Counts()
        self._store, self._settings = store, settings
        self._pacer = Pacer(settings.task_rate)
        self._room = asyncio.Semaphore(1 if settings.rate else CALLS_AT_ONCE)
        self._most_rows = rows_at_once(settings.task_rate, settings.batch_rows, store.traits)

    async def load(self, batch: pa.RecordBatch, tasks: asyncio.TaskGroup) -> None:
        for part in parts_of(batch, self._settings.batch_rows):
            puts = puts_of(part, self._settings, self._store.now_ms())
            for at in range(0, len(puts), self._most_rows):
                call = puts[at : at + self._most_rows]
                await self._pacer.take(len(call))
                await self._room.acquire()
                self._check_time()
                tasks.create_task(self._send(call), name="aiodelay spark load")
                await asyncio.sleep(0)  # let the call start before the next part is composed

    def _check_time(self) -> None:
        until_ms = self._settings.until_ms
        if until_ms is not None and SystemClock().now_ms() > until_ms:
            told = f"too slow: not all rows were written by {from_epoch_ms(until_ms):%Y-%m-%dT%H:%M:%SZ}"
            raise ConfigurationError("rate", told, "a higher rate, or fewer rows; you can safely run the job again")

    async def _send(self, puts: Sequence[Put]) -> None:
        try:
            patience = Patience(self._settings.patience_ms)
            left, why = await self._tried(puts)
            while why is not None:
                told = f"{len(left)} rows were sent for {format_duration(self._settings.patience_ms)} without success"
                await patience.pause(unanswered(self._store, why, told))
                self._check_time()
                left, why = await self._tried(left)
        finally:
            self._room.release()

    async def _tried(self, puts: Sequence[Put]) -> tuple[Sequence[Put], Refused | Unknown | None]:
        """Send puts once. Return the puts to send again, and an outcome that tells why; None if no put is left."""
        assert isinstance(self._store, BulkLoad)
        outcomes = await self._store.bulk_load(puts)
        self.counts += Counts(
            sum(type(each) is Stored and each.answer == "stored" for each in outcomes),
            sum(type(each) is Stored and each.answer == "replaced" for each in outcomes),
            sum(type(each) is Refused and each.reason == "outdated" for each in outcomes),
        )
        left = [(put, each) for put, each in zip(puts, outcomes, strict=True) if not _is_settled(each)]
        for put, each in left:
            if isinstance(each, Refused) and each.reason not in ("unavailable", "full"):
                raise InputError(
                    "row", f"refused as {each.reason}: {each.detail}", "a message that can be replaced", put.id
                )
        return [put for put, _ in left], next((each for _, each in left if isinstance(each, Refused | Unknown)), None)


def unanswered(store: Store, why: Refused | Unknown, told: str) -> StoreError:
    """Return the error for a store that did not answer or was full."""
    kind = StoreFullError if isinstance(why, Refused) and why.reason == "full" else StoreUnavailableError
    return kind(store.name, f"{why.detail}; {told}")


def _is_settled(outcome: Outcome) -> bool:
    return isinstance(outcome, Stored) or (isinstance(outcome, Refused) and outcome.reason == "outdated")


class Patience:
    """Pauses between tries, each longer than the last. After a total time, no more tries follow."""

    def __init__(self, most_ms: int) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._end_s, self._pause_s = self._now_s() + most_ms / 1000, FIRST_PAUSE_S

    async def pause(self, error: Exception) -> None:
        """Wait before the next try. If the time is over, raise the error instead."""
        if self._now_s() + self._pause_s > self._end_s:
            raise error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


@asynccontextmanager
async def opened(make: Callable[[], Store], patience_ms: int) -> AsyncIterator[Store]:
    """Open a store, and try again while it does not answer.

    Raises:
        StoreUnavailableError: The store did not answer for `patience_ms`.
    """
    patience = Patience(patience_ms)
    async with AsyncExitStack() as stack:
        while True:
            try:
                store = await stack.enter_async_context(make())
                break
            except StoreUnavailableError as error:
                await patience.pause(error)
        yield store
