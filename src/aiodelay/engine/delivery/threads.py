"""The worker threads of a plain handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["Threads"]


class Threads:
    """The worker threads of one plain handler: as many as runs happen at once, and no more.

    Args:
        name: The prefix of the threads' names. A number follows it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pools: list[ThreadPoolExecutor] = []
        self._size = 0
        self._calls = 0

    def call(self, function: Callable[..., Any], *args: object, most: int) -> asyncio.Future[Any]:
        """Call a function in a thread.

        Cancelling the future does not stop the call.

        Args:
            function: The function to call.
            *args: The arguments of the function.
            most: Most calls under way, this call included.
        """
        if most > self._size:
            for pool in self._pools:
                pool.shutdown(wait=False)
            self._pools.append(ThreadPoolExecutor(most, self._name))
            self._size = most
        call = asyncio.get_running_loop().run_in_executor(self._pools[-1], function, *args)
        self._calls += 1
        call.add_done_callback(self._note_end)
        return call

    def _note_end(self, call: asyncio.Future[Any]) -> None:
        if not call.cancelled():
            self._calls -= 1

    def close(self) -> None:
        """End the threads. Idle threads end at once. The thread of a call under way ends when the call returns."""
        for pool in self._pools:
            pool.shutdown(wait=not self._calls)
