"""Concurrent calls share a round trip: what gathered while the last batch was under way leaves as the next."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Sequence

from aiodelay.clock import Clock
from aiodelay.errors import StoreBusyError
from aiodelay.model import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, Command, Outcome, Unknown
from aiodelay.ports import Store
from aiodelay.wakeup import WakeUp

__all__ = ["GroupCommit"]

log = logging.getLogger("aiodelay.group_commit")

MAX_WAITING_BYTES = 64 * 1024 * 1024
COMMAND_BYTES = 100
"""What a command counts beside its payload."""


class _Waiting:
    """Commands of one caller, with where their outcomes go."""

    __slots__ = ("commands", "future", "since_ms", "size")

    def __init__(
        self, commands: Sequence[Command], size: int, since_ms: int, future: asyncio.Future[Sequence[Outcome]]
    ) -> None:
        self.commands, self.size, self.since_ms, self.future = commands, size, since_ms, future


class GroupCommit:
    """Sends commands in batches, one batch at a time, in the order in which they were given.

    Args:
        store: Where they go.
        clock: For intervals.
        timeout_ms: Longest wait before a command is sent.
    """

    def __init__(self, store: Store, clock: Clock, timeout_ms: int) -> None:
        self._store, self._clock, self._timeout_ms = store, clock, timeout_ms
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._wakeup = WakeUp()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    def submit(self, commands: Sequence[Command], size: int) -> Awaitable[Sequence[Outcome]]:
        """Send commands; await it for an outcome each, in order.

        Cancelled before its batch left, the caller withdraws them; later, the batch goes on without the caller. A plain
        function, so that each of many concurrent callers waits for its future, with no coroutine between.

        Args:
            commands: At most `MAX_CLAIM_MESSAGES`.
            size: Their payload bytes.

        Raises:
            StoreBusyError: They waited longer than the time limit; nothing was sent.
        """
        size += COMMAND_BYTES * len(commands)
        since_ms = self._clock.monotonic_ms()
        if self._room or (self._queue and self._bytes + size > MAX_WAITING_BYTES):
            return self._submit_when_there_is_room(commands, size, since_ms)
        return self._enqueue(commands, size, since_ms)

    def _enqueue(self, commands: Sequence[Command], size: int, since_ms: int) -> asyncio.Future[Sequence[Outcome]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Outcome]] = loop.create_future()
        if not self._queue:
            self._wakeup.set()
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_ms / 1000, self._refuse_old)
        self._queue.append(_Waiting(commands, size, since_ms, future))
        self._bytes += size
        return future

    async def _submit_when_there_is_room(
        self, commands: Sequence[Command], size: int, since_ms: int
    ) -> Sequence[Outcome]:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room.append(room)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await room
        except TimeoutError:
            raise self._busy(commands, since_ms) from None
        finally:
            if not room.done():
                room.cancel()
        return await self._enqueue(commands, size, since_ms)

    def _busy(self, commands: Sequence[Command], since_ms: int) -> StoreBusyError:
        return StoreBusyError(commands[0].id, self._clock.monotonic_ms() - since_ms, self._bytes)

    def _refuse_old(self) -> None:
        """Refuse what has waited too long; a batch under way has left and is not touched."""
        self._timer = None
        now = self._clock.monotonic_ms()
        while self._queue and self._queue[0].since_ms + self._timeout_ms <= now:
            waiting = self._take()
            if not waiting.future.done():
                waiting.future.set_exception(self._busy(waiting.commands, waiting.since_ms))
        if self._queue:
            delay = self._queue[0].since_ms + self._timeout_ms - now
            self._timer = asyncio.get_running_loop().call_later(delay / 1000, self._refuse_old)

    def _take(self) -> _Waiting:
        waiting = self._queue.popleft()
        self._bytes -= waiting.size
        return waiting

    def close(self) -> None:
        """Let `run` return once the queue is empty."""
        self._is_closing = True
        self._wakeup.set()

    async def run(self) -> None:
        """Send batches until closed and empty."""
        try:
            while True:
                self._wakeup.clear()
                batch = self._next_batch()
                if batch:
                    await self._send(batch)
                elif self._is_closing:
                    return
                else:
                    await self._wakeup.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        messages = size = 0
        while self._queue:
            first = self._queue[0]
            if batch and (messages + len(first.commands) > MAX_CLAIM_MESSAGES or size + first.size > MAX_CLAIM_BYTES):
                break
            waiting = self._take()
            if not waiting.future.done():  # else its caller has withdrawn it
                batch.append(waiting)
                messages += len(waiting.commands)
                size += waiting.size
        self._give_room()
        return batch

    def _give_room(self) -> None:
        while self._room and (self._room[0].done() or self._bytes <= MAX_WAITING_BYTES // 2):
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)

    async def _send(self, batch: list[_Waiting]) -> None:
        commands = [command for waiting in batch for command in waiting.commands]
        try:
            outcomes = await self._store.apply(commands)
        except Exception as error:
            log.exception("the store raised instead of answering; the outcome of %d commands is unknown", len(commands))
            outcomes = [Unknown(type(error).__name__)] * len(commands)
        except BaseException:
            for waiting in batch:
                waiting.future.cancel()
            raise
        at = 0
        for waiting in batch:
            if not waiting.future.done():
                waiting.future.set_result(outcomes[at : at + len(waiting.commands)])
            at += len(waiting.commands)
