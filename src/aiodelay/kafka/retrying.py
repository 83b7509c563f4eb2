"""How long a loop that must not end waits before it tries again."""

from __future__ import annotations

import asyncio
import random

__all__ = ["pause"]

LONGEST_S = 5.0


async def pause(failures: int, first_s: float = 0.05) -> None:
    """Wait after so many failures in a row: twice as long after each, up to 5 s, and up to half of it less."""
    await asyncio.sleep(min(first_s * 2 ** min(failures, 10), LONGEST_S) * random.uniform(0.5, 1))
