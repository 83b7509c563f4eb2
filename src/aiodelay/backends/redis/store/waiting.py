"""`Waiter` and `Waiters`: the waits of this process's loops for due messages, and the wake-ups that end these waits.

After a write, this process wakes only the loops whose wait would end later than the due time of the message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from aiodelay.core.values import Command, Lane, Outcome, Put, Stored, Unknown
from aiodelay.core.wakeup import WakeUp

__all__ = ["Waiter", "Waiters", "first_dues"]

ANY: Lane = ""


class Waiter:
    """The wait of one loop for due messages.

    A loop waits for the next due time that it knows of. A message that it hears of meanwhile ends the wait if the
    message is due before this time, or if the loop knows of no due time. Any other message does not end the wait.

    Race: a message may be written after the loop's claim and before its wait. So the loop remembers the earliest of
    these messages, and compares it with the due time that the claim returned.
    """

    def __init__(self) -> None:
        self._wakeup = WakeUp()
        self._until_ms: float | None = None  # None: the loop is not in a wait.
        self._heard_ms = math.inf  # The earliest due time of the messages outside a wait.

    async def wait(self, seconds: float, until_ms: int | None) -> bool:
        """Wait for a wake-up. Return True after a wake-up, or False after `seconds`.

        Args:
            seconds: The longest duration of the wait.
            until_ms: The time on the store's clock at which the loop will inspect the store again. None if the loop
                knows of no due time.
        """
        self._until_ms = math.inf if until_ms is None else until_ms
        if self._heard_ms < self._until_ms:
            self._wakeup.set()
        try:
            return await self._wakeup.wait(seconds)
        finally:
            self._until_ms = None

    def comes_due(self, due_ms: int) -> None:
        """Tell the loop of a message that is due at `due_ms`. It may end the current or the next wait of the loop."""
        if self._until_ms is None:
            self._heard_ms = min(self._heard_ms, due_ms)
        elif due_ms < self._until_ms:
            self._wakeup.set()

    def wake(self) -> None:
        """End the current or the next wait."""
        self._wakeup.set()

    def clear(self) -> None:
        """Forget all earlier signals."""
        self._wakeup.clear()
        self._heard_ms = math.inf


class Waiters:
    """All loops of this process that wait for messages of one store.

    A transfer loop waits for the messages of one lane. A claiming loop waits for the messages of all other lanes, and
    of shared lanes.
    """

    def __init__(self) -> None:
        self._lanes: dict[Waiter, Lane] = {}
        self._shared: set[Waiter] = set()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, waiter: Waiter, lane: Lane = ANY, *, is_shared: bool = False) -> None:
        """Add a loop to wake.

        Args:
            waiter: The wait of the loop.
            lane: The lane that the loop transfers. `ANY` for a loop that claims.
            is_shared: True if claims take some of the messages of this lane.
        """
        self._lanes[waiter] = lane
        if is_shared:
            self._shared.add(waiter)

    def discard(self, waiter: Waiter) -> None:
        """Remove a loop."""
        self._lanes.pop(waiter, None)
        self._shared.discard(waiter)

    def wake(self) -> None:
        """Wake all loops."""
        for waiter in self._lanes:
            waiter.wake()

    def come_due(self, dues: Mapping[Lane, int]) -> None:
        """Tell the loops of messages in their lanes. `Waiter.comes_due` decides whether a loop wakes.

        Args:
            dues: The earliest due time for each lane. The entry `ANY` is for messages of an unknown lane.
        """
        moved = {lane for waiter, lane in self._lanes.items() if lane != ANY and waiter not in self._shared}
        for waiter, own in self._lanes.items():
            concerns = [due for lane, due in dues.items() if lane in (own, ANY) or (own == ANY and lane not in moved)]
            if concerns:
                waiter.comes_due(min(concerns))


def first_dues(commands: Iterable[Command], outcomes: Iterable[Outcome]) -> dict[Lane, int] | None:
    """Return the earliest due time of the written messages for each lane.

    Messages of an unknown lane count under `ANY`.

    If the outcome of a command is unknown, return None. The caller then wakes all loops.
    """
    dues: dict[Lane, int] = {}
    for command, outcome in zip(commands, outcomes, strict=True):
        if isinstance(outcome, Unknown):
            return None
        if isinstance(outcome, Stored):
            lane = command.envelope.lane if isinstance(command, Put) else ANY
            dues[lane] = min(dues.get(lane, outcome.due_ms), outcome.due_ms)
    return dues
