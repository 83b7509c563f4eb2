"""`pause_s`: the wait of a loop that must not end, before it tries again."""

from __future__ import annotations

import random

__all__ = ["pause_s"]


def pause_s(failures: int, *, first_s: float = 0.05, longest_s: float = 5.0) -> float:
    """Return the seconds to wait after this many failures: doubled by each failure, minus a random part, up to half."""
    longest: float = min(first_s * 2 ** min(failures, 10), longest_s)
    return longest * random.uniform(0.5, 1)
