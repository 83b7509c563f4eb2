"""`Demands`: the demand of one claim, and its division between shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from aiodelay.core.transitions import SUSPECT_LAPSES
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, Claim, Demand, Lane

__all__ = ["Demands"]

_Asks: TypeAlias = Callable[[int, Sequence[Lane]], bool]
"""Answers a question about a shard and some lanes."""
ROUND_GROWTH = 4


class Demands:
    """The part of a claim's demand that is not met yet.

    A lane whose bytes are limited is asked of one shard only, with its whole demand: the first message of an answer may
    be larger than the limit, and several answers could exceed it together.

    A call asks for all lanes that may have something in its shard. So the shard itself divides its bytes between them.

    Args:
        demand: Most messages and bytes wanted per lane.
        shards: The number of shards.
        turn: The number of the claim. It decides which lane comes first.
        first: The shard that comes first.

    Attributes:
        next_shard: The shard that comes first in the next claim.
    """

    def __init__(self, demand: Mapping[Lane, Demand], shards: int, turn: int, first: int) -> None:
        self._wanted = [lane for lane, each in demand.items() if each.messages > 0]
        self._left = {lane: demand[lane] for lane in _rotated(self._wanted, turn)}
        self._owners = {alias: lane for lane in self._wanted for alias in (lane, *demand[lane].aliases)}
        self._shards = _rotated(range(shards), first)
        self.next_shard: int = first
        self._rounds = 0
        self._given: Counter[Lane] = Counter()
        self._exhausted: set[tuple[int, Lane]] = set()  # shards that have given all that they have of a lane
        self._messages, self._bytes = MAX_CLAIM_MESSAGES, MAX_CLAIM_BYTES
        self.lanes: frozenset[Lane] = frozenset(self._owners)
        max_lapses = min((each.max_lapses for each in self._left.values()), default=0)
        self.may_try: bool = max_lapses >= SUSPECT_LAPSES
        """Whether the claim may take suspects."""
        self.max_lapses: int = min(max_lapses, SUSPECT_LAPSES - 1)
        """The most lapses of the messages that are divided between shards: no suspects."""

    def whole(self) -> dict[Lane, Demand]:
        """Return all that is left, for one shard."""
        return dict(self._left) if self._messages > 0 and self._bytes > 0 else {}

    def divided(self, is_due: _Asks, has_more: _Asks) -> dict[int, dict[Lane, Demand]]:
        """Return a part for each shard to ask now, without suspects.

        Each call has a cost of its own. So if shards surely have more, only few of them are asked: one or two in the
        first round, one in the second round, and four times as many in each further round. So a claim ends soon.

        Args:
            is_due: Returns whether a shard may have something due in one of some lanes.
            has_more: Returns whether a shard had more due messages in one of some lanes than it was asked for.
        """
        among = {lane: self._asked(lane, is_due, has_more) for lane in self._left}
        self._rounds += 1
        shares = self._shares([lane for lane, each in among.items() if each]) if self._bytes > 0 else {}
        asked = {shard for lane in shares for shard in among[lane]}
        if asked and self._rounds == 1:
            self.next_shard = (next(each for each in self._shards if each in asked) + 1) % len(self._shards)
        parts: dict[int, dict[Lane, Demand]] = {shard: {} for shard in asked}
        for lane, messages in shares.items():
            each = self._left[lane]
            own = [shard for shard in self._shards if shard in asked and self._may_have(shard, lane, is_due)]
            if each.max_bytes < MAX_CLAIM_BYTES:
                own = own[:1]
            most_bytes = min(each.max_bytes, max(self._bytes // len(own), 1))
            share, more = divmod(messages, len(own))
            for i, shard in enumerate(own):
                if part := share + (i < more):
                    parts[shard][lane] = replace(each, messages=part, max_bytes=most_bytes, max_lapses=self.max_lapses)
        return {shard: self._ordered(shard, part) for shard, part in parts.items() if part}

    def _asked(self, lane: Lane, is_due: _Asks, has_more: _Asks) -> list[int]:
        """Return the shards to ask because of a lane. The first shard in turn is always among the first."""
        due = [shard for shard in self._shards if self._may_have(shard, lane, is_due)]
        full = [shard for shard in due if has_more(shard, self._names(lane))]
        if not full:
            return due
        return full[: ROUND_GROWTH ** (self._rounds - 1)] if self._rounds else sorted({due[0], full[0]})

    def _may_have(self, shard: int, lane: Lane, is_due: _Asks) -> bool:
        return (shard, lane) not in self._exhausted and is_due(shard, self._names(lane))

    def _names(self, lane: Lane) -> Sequence[Lane]:
        return (lane, *self._left[lane].aliases)

    def _ordered(self, shard: int, part: Mapping[Lane, Demand]) -> dict[Lane, Demand]:
        """Return a part with its lanes in their order for a shard. The shard serves another lane first in each call."""
        return {lane: part[lane] for lane in _rotated(self._wanted, shard) if lane in part}

    def took(self, shard: int, part: Mapping[Lane, Demand], claims: Sequence[Claim]) -> None:
        """Note the claims with which a shard has met its part of the demand."""
        counts = Counter(self._owners[claim.record.envelope.lane] for claim in claims)
        self._messages -= len(claims)
        self._bytes -= sum(claim.record.envelope.size for claim in claims)
        self._given += counts
        for lane, asked in part.items():
            if counts[lane] < asked.messages:
                self._exhausted.add((shard, lane))
            if not counts[lane]:
                continue
            left = self._left[lane].messages - counts[lane]
            if left > 0 and self._left[lane].max_bytes >= MAX_CLAIM_BYTES:
                self._left[lane] = replace(self._left[lane], messages=left)
            else:
                del self._left[lane]

    def _shares(self, lanes: Sequence[Lane]) -> dict[Lane, int]:
        """Return how many messages to ask of each lane: first up to an equal share, then the rest of the claim."""
        left = max(self._messages, 0)
        equal = MAX_CLAIM_MESSAGES // max(len(self._given.keys() | set(lanes)), 1)
        shares = dict.fromkeys(lanes, 0)
        for most in (equal, MAX_CLAIM_MESSAGES):
            for lane in lanes:
                wanted = min(self._left[lane].messages, most - self._given[lane]) - shares[lane]
                more = min(max(wanted, 0), left)
                shares[lane] += more
                left -= more
        return {lane: share for lane, share in shares.items() if share}


T = TypeVar("T")


def _rotated(items: Sequence[T], first: int) -> list[T]:
    at = first % len(items) if items else 0
    return [*items[at:], *items[:at]]
