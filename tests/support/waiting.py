"""Wait for a condition that sends no signal, such as the state of a server, a file or another process."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

__all__ = ["PATIENCE_S", "until", "until_sync"]

PATIENCE_S = 60.0
"""The longest wait. It is a safety net: a busy machine needs far less."""
_PAUSE_S = 0.01

T = TypeVar("T")


@overload
async def until(condition: Callable[[], Awaitable[T]], what: str, timeout_s: float = PATIENCE_S) -> T: ...


@overload
async def until(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T: ...


async def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Check a condition again and again until it is true, and return its value.

    Args:
        condition: A function or a coroutine function without arguments.
        what: The awaited state, for the error.
        timeout_s: The longest wait, in the time of the running loop.

    Raises:
        AssertionError: The condition did not come true in time.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + timeout_s
    while True:
        answer = condition()
        assert not inspect.isasyncgen(answer), "an asynchronous generator is always true"
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert clock() < ends, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(_PAUSE_S)


def until_sync(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Check a condition again and again until it is true, and return its value. This is `until` without a loop.

    Args:
        condition: A function without arguments.
        what: The awaited state, for the error.
        timeout_s: The longest wait.

    Raises:
        AssertionError: The condition did not come true in time.
    """
    ends = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends, f"not within {timeout_s:g} s: {what}"
        time.sleep(_PAUSE_S)
    return found
