"""`GroupCommit`: sends the commands of concurrent calls in one round trip.

Commands that arrive while one batch is under way form the next batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence

from msgspec import Struct

from aiodelay.core.durations import format_duration
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    Cancel,
    Command,
    Fire,
    Outcome,
    Put,
    Reschedule,
    Unknown,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.engine.backoff import is_stray
from aiodelay.errors import ClosedError, OutcomeUnknownError, StoreBusyError
from aiodelay.ports import Store
from aiodelay.ports.clock import Clock

__all__ = ["ACTIONS", "GroupCommit"]

log: logging.Logger = logging.getLogger("aiodelay.group_commit")

MAX_WAITING_BYTES = 64 * 1024 * 1024
ACTIONS: Mapping[type[Command], str] = {Put: "stored", Cancel: "cancelled", Reschedule: "rescheduled", Fire: "fired"}
"""The verb that error texts use for each command."""
COMMAND_BYTES = 100
"""The size that is counted for a command, in addition to its payload."""


class _Waiting(Struct, gc=False):
    """The commands of one caller, with the future for their outcomes."""

    commands: Sequence[Command]
    size: int
    since_ms: int
    latest_ms: int | None
    future: asyncio.Future[Sequence[Outcome]]


class GroupCommit:
    """Sends commands in batches, one batch at a time, in the order of the calls.

    Args:
        store: The store that carries the commands out.
        clock: Measures intervals.
        timeout_ms: Longest wait before a command is sent, and then for its outcome.
    """

    def __init__(self, store: Store, clock: Clock, timeout_ms: int) -> None:
        self._store, self._clock, self._timeout_ms = store, clock, timeout_ms
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._room: deque[_Waiting] = deque()
        self._wakeup = WakeUp()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = self._is_closed = False

    def submit(
        self, commands: Sequence[Command], size: int, *, latest_ms: int | None = None
    ) -> Awaitable[Sequence[Outcome]]:
        """Send commands. Return an awaitable that gives one outcome per command, in order.

        If a caller is cancelled before its batch is sent, its commands are withdrawn. If a caller is cancelled later,
        the batch goes on without the caller. This is a plain function so that each of many callers awaits its future
        directly.

        Args:
            commands: At most `MAX_CLAIM_MESSAGES` commands.
            size: The sum of the bytes of their payloads.
            latest_ms: The monotonic time after which the commands must not be sent; None = no limit.

        Raises:
            StoreBusyError: The commands waited longer than the time limit, or `latest_ms` has passed. Nothing was sent.
            ClosedError: The scheduler is closed and sends nothing.
        """
        if self._is_closed:
            raise ClosedError("scheduler", "closed")
        size += COMMAND_BYTES * len(commands)
        future: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(commands, size, self._clock.monotonic_ms(), latest_ms, future)
        if self._room or (self._queue and self._bytes + size > MAX_WAITING_BYTES):
            self._room.append(waiting)
        else:
            self._enqueue(waiting)
        return future

    def _enqueue(self, waiting: _Waiting) -> None:
        if not self._queue:
            self._wakeup.set()
            self._set_timer(waiting)
        self._queue.append(waiting)
        self._bytes += waiting.size

    def _refuse_old(self) -> None:
        """Refuse commands that have waited too long. A batch that was sent stays under way."""
        self._timer = None
        now = self._clock.monotonic_ms()
        while (oldest := self._oldest()) is not None and oldest.since_ms + self._timeout_ms <= now:
            self._refuse(self._take(), now)
        if oldest is not None:
            self._set_timer(oldest)

    def _refuse(self, waiting: _Waiting, now: int) -> None:
        if not waiting.future.done():
            waiting_bytes = waiting.size + self._bytes + sum(each.size for each in self._room)
            waiting.future.set_exception(StoreBusyError(waiting.commands[0].id, now - waiting.since_ms, waiting_bytes))

    def _set_timer(self, oldest: _Waiting) -> None:
        if self._timer is None:
            delay_ms = oldest.since_ms + self._timeout_ms - self._clock.monotonic_ms()
            self._timer = asyncio.get_running_loop().call_later(max(delay_ms, 0) / 1000, self._refuse_old)

    def _oldest(self) -> _Waiting | None:
        if not self._queue:
            self._give_room()
        return self._queue[0] if self._queue else None

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
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Refuse all waiting and later commands: nothing will be sent any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in (*self._queue, *self._room):
            if not waiting.future.done():
                waiting.future.set_exception(ClosedError("scheduler", "closed"))
        self._queue.clear()
        self._room.clear()

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        messages = size = 0
        now, most = self._clock.monotonic_ms(), self._store.traits.commands_at_once
        while (first := self._oldest()) is not None:
            if batch and (messages + len(first.commands) > most or size + first.size > MAX_CLAIM_BYTES):
                break
            waiting = self._take()
            if waiting.latest_ms is not None and waiting.latest_ms < now:
                self._refuse(waiting, now)
            elif not waiting.future.done():  # a done future here means that its caller withdrew the commands
                batch.append(waiting)
                messages += len(waiting.commands)
                size += waiting.size
        self._give_room()
        return batch

    def _give_room(self) -> None:
        while self._room and self._bytes <= MAX_WAITING_BYTES // 2:
            waiting = self._room.popleft()
            if not waiting.future.done():
                self._enqueue(waiting)

    async def _send(self, batch: list[_Waiting]) -> None:
        commands = [command for waiting in batch for command in waiting.commands]
        silence = asyncio.get_running_loop().call_later(self._timeout_ms / 1000, self._give_up, batch)
        try:
            answer = await self._store.apply(commands)
            outcomes = [outcome for _, outcome in zip(commands, answer, strict=True)]
        except BaseException as error:
            if not isinstance(error, Exception) and not is_stray(error):
                for waiting in batch:
                    if not waiting.future.done():
                        first, reason = waiting.commands[0], "the scheduler was closed before the store answered"
                        waiting.future.set_exception(OutcomeUnknownError(first.id, reason, action=ACTIONS[type(first)]))
                raise
            log.exception("the store did not answer as it must; the outcome of %d commands is unknown", len(commands))
            outcomes = [Unknown(type(error).__name__)] * len(commands)
        finally:
            silence.cancel()
        at = 0
        for waiting in batch:
            if not waiting.future.done():
                waiting.future.set_result(outcomes[at : at + len(waiting.commands)])
            at += len(waiting.commands)

    def _give_up(self, batch: list[_Waiting]) -> None:
        """Tell callers that the store did not answer. The batch stays under way: no later batch may overtake it."""
        for waiting in batch:
            if not waiting.future.done():
                silent = Unknown(f"no answer within {format_duration(self._timeout_ms)}")
                waiting.future.set_result([silent] * len(waiting.commands))
