"""`snapshot`: the items of a deque that the event loop and the thread of the pulse change at the same time."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TypeVar

__all__ = ["snapshot"]

T = TypeVar("T")


def snapshot(items: deque[T]) -> list[T]:
    """Return the items of a deque, in order, as they were at one moment. Any thread may call this."""
    while True:
        # Race: without the GIL, another thread may change the deque meanwhile. Then read again.
        with suppress(RuntimeError):
            return list(items)
