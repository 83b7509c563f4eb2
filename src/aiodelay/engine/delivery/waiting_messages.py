"""`WaitingMessages`: the messages that a handler has got and whose runs have not begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .lease_book import Held
from .snapshots import snapshot

__all__ = ["WaitingMessages"]


class WaitingMessages(deque[Held]):
    """Messages in the order of their runs.

    The event loop and the thread of the pulse may take messages out at the same time. The side that has taken a message
    out decides alone what happens to it. Each method of a `deque` is one step, and so is each removal here.
    """

    def next(self) -> Held | None:
        """Take out the first message; None if no message waits."""
        try:
            return self.popleft()
        except IndexError:
            return None

    def first(self) -> Held | None:
        """Return the first message; None if no message waits."""
        try:
            return self[0]
        except IndexError:
            return None

    def take(self, is_wanted: Callable[[Held], bool]) -> list[Held]:
        """Take out the wanted messages, in order."""
        taken: list[Held] = []
        for held in [each for each in snapshot(self) if is_wanted(each)]:
            with suppress(ValueError):  # the other thread has just taken it out
                self.remove(held)
                taken.append(held)
        return taken

    def take_last(self, room: int) -> list[Held]:
        """Take out the last messages, in order, until only `room` messages are left."""
        taken: deque[Held] = deque()
        with suppress(IndexError):  # the other thread has just taken out the last message
            while len(self) > room:
                taken.appendleft(self.pop())
        return list(taken)
