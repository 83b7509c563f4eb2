"""`FairShare`: chooses the next message of a claim, so that no lane starves another and suspects run apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, Protocol, TypeVar

from . import transitions as t
from .table import Row
from .values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, Demand, Lane, Record

__all__ = ["MOST_ASIDE", "FairShare", "Head", "Heads"]

MOST_ASIDE = 2_000
"""Most messages that one claim skips. A trial skips messages that are not suspects; other claims skip suspects."""

R = TypeVar("R", bound=Row)
R_co = TypeVar("R_co", bound=Row, covariant=True)


class Head(Protocol[R_co]):
    """The due messages of some lanes, read from the earliest on."""

    def first(self) -> R_co | None:
        """Return the first due message, without taking it; None if no message is due."""
        ...

    def take(self) -> None:
        """Take the message that `first` has just returned."""
        ...

    def step_over(self) -> None:
        """Skip the message that `first` has just returned. The next `first` returns the message after it."""
        ...


class Heads(Protocol[R_co]):
    """The lanes of one claim."""

    def of(self, lanes: Sequence[Lane]) -> Head[R_co]:
        """Return one head for all these lanes. Further calls with the same lanes go on at the same position."""
        ...


@dataclass(slots=True)
class _Group(Generic[R]):
    """The share of one demand: messages of its lane and of the lane's aliases."""

    lanes: tuple[Lane, ...]
    demand: Demand
    taken: list[R] = field(default_factory=list)
    bytes: int = 0


class FairShare(Generic[R]):
    """Chooses the messages of one claim. A claim takes only suspects (a trial), or no suspects.

    Args:
        demand: The demand by lane.
        heads: The due messages of the lanes.
        turn: The number of the claim. It decides which lane the claim serves first.
        most_tried: A function that returns the most suspects to try. It is called only if the first message is a
            suspect.
    """

    def __init__(
        self, demand: Mapping[Lane, Demand], heads: Heads[R], *, turn: int, most_tried: Callable[[], int]
    ) -> None:
        groups = [_Group[R]((lane, *each.aliases), each) for lane, each in demand.items() if each.messages > 0]
        first = turn % len(groups) if groups else 0
        self._groups = groups[first:] + groups[:first]
        self._heads, self._most_tried = heads, cache(most_tried)
        self._max_lapses = min((each.max_lapses for each in demand.values()), default=0)
        self._messages = self._bytes = self._stepped_over = self._most = 0
        self.is_trial: bool = False

    def take(self) -> list[R]:
        """Take the messages of the claim, and return them.

        Each demand has a group: the messages that meet this demand. First, each group takes up to its equal share of
        the claim. Then the groups, in their order, take messages until the claim is full.
        """
        for parts in (len(self._groups), 1):
            for group in self._groups:
                self._fill(group, parts)
        return [row for group in self._groups for row in group.taken]

    def _fill(self, group: _Group[R], parts: int) -> None:
        """Take a group's messages, up to a share of the claim: 1 / `parts` of its messages and of its bytes."""
        head, taken = self._heads.of(group.lanes), group.taken
        most, share = min(group.demand.messages, max(1, MAX_CLAIM_MESSAGES // parts)), MAX_CLAIM_BYTES // parts
        while len(taken) < most and self._messages < MAX_CLAIM_MESSAGES:
            row = head.first()
            if row is None:
                return
            if not self._takes(row.record):
                self._stepped_over += 1
                if self._stepped_over > MOST_ASIDE or (self.is_trial and self._messages == self._most > 0):
                    return
                head.step_over()
                continue
            size = row.record.envelope.size
            if self._messages and not self._fits(size, group, share):
                return
            head.take()
            taken.append(row)
            group.bytes += size
            self._messages += 1
            self._bytes += size

    def _takes(self, record: Record) -> bool:
        """Return whether the claim may take this message too.

        If a suspect has ended a process that tried it alone, the suspect is tried alone again.
        """
        is_suspect = t.is_suspect(record)
        if not self._messages:
            self.is_trial = is_suspect
            self._most = self._group_limit(record) if is_suspect else 0
        if not self.is_trial:
            return record.lapses <= self._max_lapses and not is_suspect
        return is_suspect and self._messages < self._most and not (self._messages and record.kills)

    def _group_limit(self, first: Record) -> int:
        if self._max_lapses < t.SUSPECT_LAPSES:
            return 0
        return min(self._most_tried(), 1 if first.kills else MAX_CLAIM_MESSAGES)

    def _fits(self, size: int, group: _Group[R], share: int) -> bool:
        """Return whether there is room for one more message. The first of a group may be larger than `max_bytes`."""
        if self._bytes + size > MAX_CLAIM_BYTES or group.bytes + size > share:
            return False
        return not group.taken or group.bytes + size <= group.demand.max_bytes
