"""`Glance`: finds out with two or three commands whether a store is as it was at the last full look.

A full look is a claim that took nothing, or the script `present`. It costs the server about 15 commands. Its answer has
the *marks* of the store: values that change whenever the look might find something new. While the marks stay the same,
a safety poll and a check of the data need no full look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import MARKS, Keys

__all__ = ["Glance", "Marks"]

Marks: TypeAlias = Sequence[bytes | None]
"""The values that the function `marks` in `base.lua` returns. Empty: the marks alone do not tell enough."""

KEYS_S, LONGEST_S = 3.0, 4.0
"""Ages of the last look for keys in seconds: from the first on, the next look includes the keys. From the second on, a
check of the data makes a look of its own."""


class Glance:
    """Finds out whether the marks of a store are the same as at the last full looks, and whether its keys still exist.

    Args:
        ask: Sends commands in one round trip, and returns their replies.
        keys: The keys of the namespace.
    """

    def __init__(self, ask: Callable[[Sequence[Sequence[Arg]]], Awaitable[list[Any]]], keys: Keys) -> None:
        self._ask, self._meta = ask, keys.key("meta")
        self._whole_marks: Marks = ()
        self._whole_keys: Sequence[bytes] = ()
        self._whole_s = 0.0

    def found_whole(self, marks: Marks, keys: Sequence[bytes]) -> None:
        """Note that all data were there at a full look.

        Args:
            marks: The marks at that look.
            keys: The keys that existed and must still exist while the marks are the same.
        """
        self._whole_marks, self._whole_keys = marks if keys else (), keys
        self._whole_s = asyncio.get_running_loop().time()

    def found_damaged(self) -> None:
        """Note that data were missing at a full look."""
        self._whole_marks = ()

    async def look(self) -> tuple[int, Marks]:
        """Return the server's time in epoch ms, and the marks. Look for the keys too, if the last look was long ago."""
        loop = asyncio.get_running_loop()
        commands: list[Sequence[Arg]] = [("TIME",), ("HMGET", self._meta, *MARKS)]
        has_keys = bool(self._whole_marks) and loop.time() - self._whole_s >= KEYS_S
        asked_keys = self._whole_keys
        if has_keys:
            commands.append(("EXISTS", *asked_keys))
        (seconds, micros), marks, *existing = await self._ask(commands)
        if has_keys and asked_keys is self._whole_keys:
            if list(marks) == list(self._whole_marks) and existing[0] == len(asked_keys):
                self._whole_s = loop.time()
            else:
                self._whole_marks = ()
        return int(seconds) * 1000 + int(micros) // 1000, marks

    async def is_whole(self) -> bool:
        """Return True if all data are surely still there: at most `LONGEST_S` ago, nothing was missing."""
        loop = asyncio.get_running_loop()
        if self._whole_marks and loop.time() - self._whole_s >= LONGEST_S:
            await self.look()
        return bool(self._whole_marks)
