"""The calls of `@scheduler.on_dead_letter` functions: one at a time, each after its dead letter was stored."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from aiodelay.core.transitions import after_failure, as_occurrence
from aiodelay.core.values import Dead, DeadLetter, SettleOutcome
from aiodelay.core.wakeup import WakeUp

from .lease_book import Held

__all__ = ["DeadLetterHooks"]

log: logging.Logger = logging.getLogger("aiodelay")

MOST_WAITING = 1_000
"""Most dead letters that wait for the hooks. The hooks never get a dead letter that comes while this many wait."""


class DeadLetterHooks:
    """Calls a program's hooks with the messages that this process has given up.

    Args:
        hooks: Called with each dead letter, one after another.
        now_ms: The store's time.
        on_change: Called when no dead letter waits any more.
    """

    def __init__(
        self,
        hooks: Sequence[Callable[[DeadLetter], Awaitable[object]]],
        now_ms: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self._hooks, self._now_ms, self._on_change = hooks, now_ms, on_change
        self._letters: deque[DeadLetter] = deque()
        self._wakeup = WakeUp()
        self._is_closing = False

    @property
    def waiting(self) -> int:
        """The number of dead letters that wait for the hooks."""
        return len(self._letters)

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        """Queue the dead letter of a claim that has ended, if one was stored."""
        settlement = held.settlement
        if not isinstance(settlement, Dead) or outcome is not SettleOutcome.SETTLED:
            return
        if len(self._letters) >= MOST_WAITING:
            text = "on_dead_letter is not called for message %s: %d dead letters already wait"
            log.error(text, settlement.id, MOST_WAITING)
            return
        record = after_failure(held.claim.record, settlement)
        record = record if record.envelope.rule is None else as_occurrence(record)
        self._letters.append(DeadLetter(record, settlement.reason, self._now_ms()))
        self._wakeup.set()

    def close(self) -> None:
        """Let `run` return once no dead letter waits."""
        self._is_closing = True
        self._wakeup.set()

    async def run(self) -> None:
        """Call the hooks until closed."""
        while True:
            self._wakeup.clear()
            while self._letters:
                await self._tell(self._letters[0])
                self._letters.popleft()
            self._on_change()
            if self._is_closing:
                return
            await self._wakeup.wait()

    async def _tell(self, letter: DeadLetter) -> None:
        for hook in self._hooks:
            try:
                await hook(letter)
            except Exception:
                log.exception("on_dead_letter failed for message %s", letter.record.id)
