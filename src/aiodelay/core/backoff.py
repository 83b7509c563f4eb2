"""How long a loop that must not end waits before it tries again."""

from __future__ import annotations

import random

__all__ = ["pause_s"]


def pause_s(failures: int, *, first_s: float = 0.05, longest_s: float = 5.0) -> float:
    """Return how long to wait after so many failures: twice as long after each, and up to half of it less by chance."""
    longest: float = min(first_s * 2 ** min(failures, 10), longest_s)
    return longest * random.uniform(0.5, 1)
