"""`RateLimit`: how fast a process delivers messages that have been overdue for long, for example after an outage."""

from __future__ import annotations

__all__ = ["OVERDUE_MS", "RateLimit"]

OVERDUE_MS = 10_000
"""Messages that are overdue for longer than this leave at the limited rate. The rate delays no other messages."""
PAUSE_MS = 50
_MOST_MS = 100


class RateLimit:
    """Allows a number of messages a second. Allowance that is not used within `_MOST_MS` is lost.

    Args:
        rate: Messages a second; 0 = no limit.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._at_ms, self._left = 0, 0.0

    def take(self, now_ms: int) -> int:
        """Return how many messages may leave now, and count them as gone."""
        passed_ms = min(max(now_ms - self._at_ms, 0), _MOST_MS)
        self._left = min(self._left + passed_ms * self.rate / 1000, max(1.0, _MOST_MS * self.rate / 1000))
        self._at_ms = now_ms
        n = int(self._left)
        self._left -= n
        return n

    def give_back(self, n: int) -> None:
        """Return allowance that was not used."""
        self._left += n
