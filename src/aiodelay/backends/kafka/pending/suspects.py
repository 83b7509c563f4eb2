"""`Suspects`: changes that a topic may refuse for good. They get transactions apart from all other changes.

These suspects are changes, not the suspect messages of the glossary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence

from .changes import Change

__all__ = ["Suspects"]


class Suspects:
    """Groups of suspect changes. Each group gets its own transaction, in turn with a transaction of other changes."""

    def __init__(self) -> None:
        self._groups: deque[deque[Change]] = deque()
        self._had_turn = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Change]:
        return (change for group in self._groups for change in group)

    def add(self, changes: Collection[Change]) -> None:
        """Add a group of changes for one transaction."""
        if changes:
            self._groups.append(deque(changes))

    def halve(self, changes: Sequence[Change]) -> None:
        """Add two groups, each with one half of the changes of a transaction that was refused."""
        half = len(changes) // 2
        self.add(changes[:half])
        self.add(changes[half:])

    def discard(self, changes: Container[Change]) -> None:
        """Remove changes from all groups."""
        left = (deque(change for change in group if change not in changes) for group in self._groups)
        self._groups = deque(filter(None, left))

    def take_turn(self, others: deque[Change]) -> deque[Change]:
        """Return the changes for the next transaction: a group of suspects, or `others`. If both exist, take turns."""
        self._had_turn = bool(self._groups) and not (self._had_turn and others)
        return self._groups.popleft() if self._had_turn else others

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
