"""`LeaseCache`, the claims that one `RedisWork` holds.

With its contents the server can end a *plain* claim without reading the record: it only deletes the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.layouts import OCCURRENCE, TEXT
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import RETRY_WINDOW_MS, Claim, Done, Renewal, RenewOutcome, Settlement

__all__ = ["Held", "LeaseCache", "plain_arguments"]

MOST_HELD = 20_000
SLACK_MS = 1_000
"""How far the server's clock may be behind this process's estimate of the server's time."""


class Held(Struct, frozen=True, gc=False):
    """A claim that this worker holds: the encoded id, the number of the lane, and the claim itself."""

    member: bytes
    lane: int
    claim: Claim

    def is_plain(self, settlement: Settlement) -> bool:
        """Return True if the settlement only has to delete the message.

        This is the case if the settlement is `Done`, and the message has never lapsed, does not recur, is not an
        occurrence of a series, and has no version.
        """
        envelope = self.claim.record.envelope
        return (
            type(settlement) is Done
            and not self.claim.record.lapses
            and envelope.rule is None
            and envelope.version is None
            and self.member[0] != OCCURRENCE
        )


class LeaseCache:
    """The claims that a worker holds, by id.

    This is only a cache. The server ends a claim that is not in it by reading the record, with the same outcome.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, held: Sequence[Held]) -> None:
        """Add new claims."""
        if len(self._held) >= MOST_HELD:  # These claims were lost or have lapsed: nobody settled them.
            self._held.clear()
        self._held |= {each.claim.record.envelope.id: each for each in held}

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Store the new tokens of renewed claims, and drop the claims that were not renewed."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.pop(renewal.id, None)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = Held(held.member, held.lane, Claim(held.claim.record, renewal.to))

    def take(self, settlements: Iterable[Settlement]) -> list[Held | None]:
        """Remove the claims of these settlements and return them; None = the claim is not in the cache."""
        found = [(settlement.token, self._held.pop(settlement.id, None)) for settlement in settlements]
        return [held if held is not None and held.claim.token == token else None for token, held in found]


def plain_arguments(ended: Sequence[Held], now_ms: int) -> tuple[list[Arg], list[int]]:
    """Return the arguments of `settle.lua` that end plain claims.

    Args:
        ended: The plain claims to end.
        now_ms: The store's time, epoch ms.

    Returns:
        The arguments, and the indexes of the claims in the order of the arguments.
    """
    lists: dict[tuple[int, int], list[int]] = {}
    memories: list[Arg] = []
    recent_ms = now_ms - SLACK_MS - RETRY_WINDOW_MS
    for i, held in enumerate(ended):
        member, record = held.member, held.claim.record
        lists.setdefault((held.lane, held.claim.token), []).append(i)
        if record.revision > recent_ms and record.op != NO_OP:
            until = (record.revision + RETRY_WINDOW_MS).to_bytes(6, "big")
            answer = b"s" + record.revision.to_bytes(6, "big") + record.due_ms.to_bytes(6, "big")
            memories += (b"o" + record.op, until + answer)
        if member[0] == TEXT:
            memories += (b"r" + member, record.revision.to_bytes(6, "big"))
    arguments: list[Arg] = [len(lists)]
    for (lane, token), indexes in lists.items():
        arguments += (lane, token, len(indexes))
        arguments += [ended[i].member for i in indexes]
    return [*arguments, len(memories), *memories], [i for indexes in lists.values() for i in indexes]
