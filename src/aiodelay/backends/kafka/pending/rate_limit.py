"""How fast a process catches up with what has been overdue for long, whatever it was that held it up."""

from __future__ import annotations

__all__ = ["OVERDUE_MS", "RateLimit"]

OVERDUE_MS = 10_000
"""Messages later than this leave at the pace; others are never held up by it."""
PAUSE_MS = 50
_MOST_MS = 100


class RateLimit:
    """So many messages a second, in steps; what is not used within `_MOST_MS` is not made up for.

    Args:
        rate: Messages a second; 0 = as many as are asked for.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._at_ms, self._left = 0, 0.0

    def take(self, now_ms: int) -> int:
        """Return how many may leave now; they count as gone."""
        passed_ms = min(max(now_ms - self._at_ms, 0), _MOST_MS)
        self._left = min(self._left + passed_ms * self.rate / 1000, max(1.0, _MOST_MS * self.rate / 1000))
        self._at_ms = now_ms
        n = int(self._left)
        self._left -= n
        return n

    def give_back(self, n: int) -> None:
        """Return what was not used."""
        self._left += n
