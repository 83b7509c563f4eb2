"""The dispatch rate of a lane, measured while messages waited.

How many messages a lane can start in a second shows only while it has a backlog. Without a backlog, a lane starts as
many messages as come due. A lane delivers the message with the earliest due time first. So if a message that starts
late was already due when the previous message started, the lane had a backlog all the time between the two.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

__all__ = ["BEHIND_MS", "LEAST_MS", "LEAST_STARTS", "DispatchRate", "RateMeter"]

BEHIND_MS = 1_000
"""A first attempt that starts this much after its due time shows a backlog, in ms."""
LEAST_STARTS = 20
LEAST_MS = 1_000
MOST_BACKLOGS = 100


class DispatchRate(Struct, frozen=True):
    """The rate at which the lane started messages while it had a backlog.

    Attributes:
        starts: The number of first attempts that started during the backlogs.
        busy_ms: The length of the backlogs, in ms.
        until_ms: The end of the latest backlog, epoch ms.
    """

    starts: int
    busy_ms: int
    until_ms: int

    @property
    def per_s(self) -> float:
        """Messages a second."""
        return self.starts * 1000 / self.busy_ms


class _Backlog:
    """A time in which messages waited: it begins and ends with the start of a late message."""

    def __init__(self, at_ms: int) -> None:
        self.from_ms = self.until_ms = at_ms
        self.starts = 0

    def add(self, at_ms: int) -> None:
        if at_ms > self.from_ms:  # a claim takes many messages at once: the first claim begins the measurement
            self.starts += 1
        self.until_ms = max(self.until_ms, at_ms)


class RateMeter:
    """Measures the dispatch rate of one lane from its first attempts. It keeps the latest 100 backlogs."""

    def __init__(self) -> None:
        self._backlogs: deque[_Backlog] = deque(maxlen=MOST_BACKLOGS)
        self._is_behind = False

    def note(self, at_ms: int, due_ms: int) -> None:
        """Count a first attempt.

        Args:
            at_ms: When the attempt started, epoch ms. The caller gives the attempts in the order of these times.
            due_ms: When the message was due, epoch ms.
        """
        was_behind, self._is_behind = self._is_behind, at_ms - due_ms >= BEHIND_MS
        if not self._is_behind:
            return
        if was_behind and due_ms <= self._backlogs[-1].until_ms:
            self._backlogs[-1].add(at_ms)
        else:
            self._backlogs.append(_Backlog(at_ms))

    def skip(self) -> None:
        """Begin a new backlog with the next late message, because the attempts before it are not known."""
        self._is_behind = False

    def rate(self) -> DispatchRate | None:
        """Return the rate; None if the backlogs so far were too short to measure it."""
        starts = sum(each.starts for each in self._backlogs)
        busy_ms = sum(each.until_ms - each.from_ms for each in self._backlogs)
        if starts < LEAST_STARTS or busy_ms < LEAST_MS:
            return None
        return DispatchRate(starts, busy_ms, self._backlogs[-1].until_ms)
