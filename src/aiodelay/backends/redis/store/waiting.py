"""How loops of this process wait for messages, and what of its own writing ends their waiting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from aiodelay.core.values import Command, Lane, Outcome, Put, Stored, Unknown
from aiodelay.core.wakeup import WakeUp

__all__ = ["Waiter", "Waiters", "first_dues"]

ANY: Lane = ""


class Waiter:
    """One loop's waiting.

    While it waits it is known until when, and what comes due later does not end the wait. What is signalled while it
    does not wait ends the next one, however late it comes due: the loop may have looked before.
    """

    def __init__(self) -> None:
        self._wakeup = WakeUp()
        self._until_ms = math.inf  # while it does not wait: everything is news

    async def wait(self, seconds: float, until_ms: int | None) -> bool:
        """Return True once woken, or False after so many seconds.

        Args:
            seconds: Longest wait.
            until_ms: When the loop will look again, on the store's clock; None = nothing is due as far as it knows.
        """
        self._until_ms = math.inf if until_ms is None else until_ms
        try:
            return await self._wakeup.wait(seconds)
        finally:
            self._until_ms = math.inf

    def comes_due(self, due_ms: int) -> None:
        """End the current wait if it would last longer, or the next one."""
        if due_ms < self._until_ms:
            self._wakeup.set()

    def wake(self) -> None:
        """End the current or the next wait."""
        self._wakeup.set()

    def clear(self) -> None:
        """Forget signals so far."""
        self._wakeup.clear()


class Waiters:
    """All loops of this process that wait for one store's messages: those that move one lane, and those that claim."""

    def __init__(self) -> None:
        self._lanes: dict[Waiter, Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, waiter: Waiter, lane: Lane = ANY) -> None:
        """Wake it too; `lane` is the one that it moves, if it does not claim."""
        self._lanes[waiter] = lane

    def discard(self, waiter: Waiter) -> None:
        """Wake it no more."""
        self._lanes.pop(waiter, None)

    def wake(self) -> None:
        """Wake all."""
        for waiter in self._lanes:
            waiter.wake()

    def come_due(self, dues: Mapping[Lane, int]) -> None:
        """Wake those that what comes due concerns; it is given by lane, `""` = of any."""
        moved = {lane for lane in self._lanes.values() if lane != ANY}
        for waiter, own in self._lanes.items():
            concerns = [due for lane, due in dues.items() if lane in (own, ANY) or (own == ANY and lane not in moved)]
            if concerns:
                waiter.comes_due(min(concerns))


def first_dues(commands: Iterable[Command], outcomes: Iterable[Outcome]) -> dict[Lane, int] | None:
    """Return when what was written first comes due, by lane, `""` = of any; None if that cannot be told."""
    dues: dict[Lane, int] = {}
    for command, outcome in zip(commands, outcomes, strict=True):
        if isinstance(outcome, Unknown):
            return None
        if isinstance(outcome, Stored):
            lane = command.envelope.lane if isinstance(command, Put) else ANY
            dues[lane] = min(dues.get(lane, outcome.due_ms), outcome.due_ms)
    return dues
