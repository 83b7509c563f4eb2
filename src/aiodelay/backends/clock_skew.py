"""`warn_of_skew`: the warning that the clock of a server differs from the local clock."""

from __future__ import annotations

import logging

__all__ = ["warn_of_skew"]

MOST_SKEW_MS = 500
"""The greatest difference of two clocks without a warning."""


def warn_of_skew(log: logging.Logger, name: str, whose: str, skew_ms: float) -> bool:
    """Log a warning if the clock of a server and the local clock differ by more than `MOST_SKEW_MS`.

    Args:
        log: The log of the backend.
        name: The name of the server or store.
        whose: The word for the server, such as "broker".
        skew_ms: The time of the server's clock minus the time of the local clock.

    Returns:
        Whether there was a warning.
    """
    if abs(skew_ms) <= MOST_SKEW_MS:
        return False
    side = "ahead of" if skew_ms > 0 else "behind"
    log.warning("%s: the %s's clock is %.0f ms %s the local clock", name, whose, abs(skew_ms), side)
    return True
