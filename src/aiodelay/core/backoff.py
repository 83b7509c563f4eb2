"""`pause_s`: the time that a loop waits after a failure, before it tries again."""

from __future__ import annotations

import random

__all__ = ["pause_s"]


def pause_s(failures: int, *, first_s: float = 0.05, longest_s: float = 5.0) -> float:
    """Return the seconds to wait after this many failures.

    The wait is `first_s`, doubled for each failure, and at most `longest_s`. Then a random part is taken off, up to
    half of the wait.
    """
    longest: float = min(first_s * 2 ** min(failures, 10), longest_s)
    return longest * random.uniform(0.5, 1)
