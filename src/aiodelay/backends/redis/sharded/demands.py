"""`Demands`: the demand of one claim, and its division between shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from aiodelay.core.transitions import SUSPECT_LAPSES
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, Claim, Demand, Lane

__all__ = ["Demands"]


class Demands:
    """The part of a claim's demand that is not met yet.

    A lane whose bytes are limited is asked of one shard only, with its whole demand: the first message of an answer may
    be larger than the limit, and several answers could exceed it together.

    Args:
        demand: Most messages and bytes wanted per lane.
        shards: The number of shards.
        turn: The number of the claim. It decides which shard and which lane come first.
    """

    def __init__(self, demand: Mapping[Lane, Demand], shards: int, turn: int) -> None:
        wanted = [lane for lane, each in demand.items() if each.messages > 0]
        first = turn % len(wanted) if wanted else 0
        self._left = {lane: demand[lane] for lane in wanted[first:] + wanted[:first]}
        self._owners = {alias: lane for lane in wanted for alias in (lane, *demand[lane].aliases)}
        self._shards, self._turn = shards, turn
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

    def divided(self, is_due: Callable[[int, Sequence[Lane]], bool]) -> dict[int, dict[Lane, Demand]]:
        """Return a part for each shard that may have something due, without suspects.

        Args:
            is_due: Returns whether a shard may have something due in one of some lanes.
        """
        among = {
            lane: [
                shard
                for shard in range(self._shards)
                if (shard, lane) not in self._exhausted and is_due(shard, (lane, *each.aliases))
            ]
            for lane, each in self._left.items()
        }
        shares = self._shares([lane for lane, each in among.items() if each]) if self._bytes > 0 else {}
        parts: dict[int, dict[Lane, Demand]] = {}
        for n, (lane, messages) in enumerate(shares.items()):
            each, asked = self._left[lane], among[lane]
            first = (self._turn + n) % len(asked)
            asked = asked[first:] + asked[:first]
            if each.max_bytes < MAX_CLAIM_BYTES:
                asked = asked[:1]
            most_bytes = min(each.max_bytes, max(self._bytes // len(asked), 1))
            share, more = divmod(messages, len(asked))
            for i, shard in enumerate(asked):
                if part := share + (i < more):
                    own = replace(each, messages=part, max_bytes=most_bytes, max_lapses=self.max_lapses)
                    parts.setdefault(shard, {})[lane] = own
        return parts

    def took(self, shard: int, part: Mapping[Lane, Demand], claims: Sequence[Claim]) -> None:
        """Note the claims with which a shard has met its part of the demand."""
        counts = Counter(self._owners[claim.record.envelope.lane] for claim in claims)
        self._messages -= len(claims)
        self._bytes -= sum(claim.record.envelope.size for claim in claims)
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
        equal = left // len(lanes) if lanes else 0
        shares = {lane: min(self._left[lane].messages, equal) for lane in lanes}
        left -= sum(shares.values())
        for lane in lanes:
            more = min(self._left[lane].messages - shares[lane], left)
            shares[lane] += more
            left -= more
        return shares
