"""`ClaimAhead`: how many messages a handler claims before it has room to run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import attrgetter

from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES

from .lease_book import Held

__all__ = ["MOST_AHEAD", "ClaimAhead"]

AHEAD_S = 0.02
"""A handler claims ahead what it runs in this time, by its throughput so far."""
MOST_AHEAD = 2 * MAX_CLAIM_MESSAGES
"""Most messages that wait for their runs."""
GROWTH = 4
"""Most messages that are claimed ahead for each run that has ended since the last measurement."""
CHECK_S = 0.1
"""While messages wait for their runs, their number is compared with the throughput at this interval."""
SCARCE_S = 0.1
"""If limits let a claim bring fewer messages than requested, the handler claims nothing ahead for this time."""
SAMPLE = 20
"""The number of messages whose average size is measured."""
_MAY_KILL = attrgetter("may_kill_until_ms")


class ClaimAhead:
    """Measures a handler's throughput. The number of messages to claim ahead follows from it.

    The handler runs messages that were claimed ahead while the next claim is on its way to the store and back. A
    handler that ends fewer than 50 runs a second claims nothing ahead.

    In a lane with limits, a message that waits here uses up room that another process could use. So the handler claims
    ahead only while its claims bring all that it requests. If its code declares a rate, it claims nothing ahead: a rate
    counts a message when it is claimed, and the runs could be closer together than the rate allows.

    Create the object in the event loop.

    Args:
        give_back: A function that gives messages back until only as many wait as its argument says. It returns whether
            messages still wait.
        has_rate: Whether the code declares a rate for the handler.

    Attributes:
        ended: The number of runs that have ended so far. The handler's subscription counts them here.
    """

    __slots__ = (
        "_ended_before",
        "_give_back",
        "_messages",
        "_most",
        "_now_s",
        "_pause_ends_s",
        "_since_s",
        "_timer",
        "ended",
    )

    def __init__(self, give_back: Callable[[int], bool], *, has_rate: bool) -> None:
        self._give_back = give_back
        self._now_s = asyncio.get_running_loop().time
        self._most = 0 if has_rate else MOST_AHEAD
        self.ended: int = 0
        self._messages = self._ended_before = 0
        self._since_s = self._pause_ends_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def wanted(self, waiting: int) -> int:
        """Return how many messages to claim ahead now: none while more than half of that number still wait.

        Any thread may call this.
        """
        if 2 * waiting > self._messages or self._now_s() < self._pause_ends_s:
            return 0
        return self._messages

    def pause(self) -> None:
        """Claim nothing ahead for a while: another process may need the room that is left."""
        self._pause_ends_s = self._now_s() + SCARCE_S

    def arrived(self, messages: Sequence[Held]) -> None:
        """Give back messages that have lapsed before and have no room, and measure the throughput.

        Messages that have lapsed may end this process. If they waited here, an innocent one could become a suspect
        without a run.
        """
        if any(map(_MAY_KILL, messages)):
            self._messages = 0
            self._give_back(0)
            return
        self._measure(messages)
        if self._give_back(self._most) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def stop(self) -> None:
        """Claim nothing ahead until the throughput is measured again, and do not check any more."""
        self._messages = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Give back messages that would wait too long, because the runs last longer than before."""
        self._timer = None
        self._measure(())
        if self._give_back(self._messages):
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _measure(self, arrived: Sequence[Held]) -> None:
        """Set the number of messages to claim ahead, from the runs that have ended since the last measurement.

        Less than 20 ms after the last measurement, the number may grow but not shrink. If messages have just arrived,
        the number is at most as many messages of their average size as fit into `MAX_CLAIM_BYTES`. About `SAMPLE` of
        them stand for all.
        """
        now_s = self._now_s()
        elapsed_s, ended = now_s - self._since_s, self.ended - self._ended_before
        messages = min(int(ended * AHEAD_S / max(elapsed_s, 0.001)), GROWTH * ended, self._most)
        if arrived:
            some = arrived[:: len(arrived) // SAMPLE + 1]
            size = sum(held.claim.record.envelope.size for held in some)
            messages = min(messages, len(some) * MAX_CLAIM_BYTES // max(size, 1))
        if messages > self._messages or elapsed_s >= AHEAD_S:
            self._messages, self._ended_before, self._since_s = messages, self.ended, now_s
