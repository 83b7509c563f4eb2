"""The worker threads of a plain handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["Threads"]


class Threads:
    """As many threads as runs go on at once, and no more.

    Args:
        name: What each is called, with a number behind it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pools: list[ThreadPoolExecutor] = []
        self._size = 0
        self._is_left = False

    def call(self, function: Callable[..., Any], *args: object, most: int) -> asyncio.Future[Any]:
        """Call a function in a thread; at most `most` calls may be under way, this one included.

        Cancelled, the future leaves the call to itself.
        """
        if most > self._size:
            for pool in self._pools:
                pool.shutdown(wait=False)
            self._pools.append(ThreadPoolExecutor(most, self._name))
            self._size = most
        call = asyncio.get_running_loop().run_in_executor(self._pools[-1], function, *args)
        call.add_done_callback(self._note_end)
        return call

    def _note_end(self, call: asyncio.Future[Any]) -> None:
        self._is_left = self._is_left or call.cancelled()

    def close(self) -> None:
        """End the threads: idle ones at once, the others when the calls that were left to themselves return."""
        for pool in self._pools:
            pool.shutdown(wait=not self._is_left)
