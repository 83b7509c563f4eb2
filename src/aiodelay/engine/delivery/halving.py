"""`Halving`: finds the messages that make a batch fail, by running halves of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Halving"]

T = TypeVar("T")

MOST_FAILURES = 16
"""After this number of failed runs without a successful run between them, the messages are not the cause."""


class Halving(Generic[T]):
    """The parts of one batch that have to run: first the whole batch, then the halves of each part that has failed.

    Parts run in the order of their messages. Three messages that always fail, among 500, cost at most 48 more runs.

    Args:
        batch: The messages in order, 1 or more.
    """

    def __init__(self, batch: Sequence[T]) -> None:
        self._parts = [batch]
        self._failures = 0

    def next(self) -> Sequence[T]:
        """Take out the part that runs next; empty if no part is left."""
        return self._parts.pop() if self._parts else ()

    def succeeded(self) -> None:
        """Note that the run of a part has succeeded."""
        self._failures = 0

    def failed(self, part: Sequence[T]) -> bool:
        """Note that the run of a part has failed. Return whether its halves will run."""
        self._failures += 1
        if len(part) == 1 or self._failures >= MOST_FAILURES:
            return False
        middle = len(part) // 2
        self._parts += [part[middle:], part[:middle]]
        return True

    def rest(self) -> list[T]:
        """Take out the messages of all parts that are left, in order."""
        left = [each for part in reversed(self._parts) for each in part]
        self._parts.clear()
        return left
