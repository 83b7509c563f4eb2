"""Changes of which a topic may refuse one for good: they are tried apart, so that it costs nobody else anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence

from .changes import Change

__all__ = ["Suspects"]


class Suspects:
    """Groups of changes, each for a transaction of its own, in turn with one for what is not suspect."""

    def __init__(self) -> None:
        self._groups: deque[deque[Change]] = deque()
        self._had_turn = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Change]:
        return (change for group in self._groups for change in group)

    def add(self, changes: Collection[Change]) -> None:
        """Have a group tried together."""
        if changes:
            self._groups.append(deque(changes))

    def halve(self, changes: Sequence[Change]) -> None:
        """Have two halves tried, as they were refused together."""
        half = len(changes) // 2
        self.add(changes[:half])
        self.add(changes[half:])

    def discard(self, changes: Container[Change]) -> None:
        """Suspect changes no longer."""
        left = (deque(change for change in group if change not in changes) for group in self._groups)
        self._groups = deque(filter(None, left))

    def take_turn(self, others: deque[Change]) -> deque[Change]:
        """Return what the next transaction is made of: a group, or the others, in turn where there are both."""
        self._had_turn = bool(self._groups) and not (self._had_turn and others)
        return self._groups.popleft() if self._had_turn else others

    def clear(self) -> None:
        """Forget all."""
        self._groups.clear()
