"""`LeaseCache`: the claims that one worker holds, in the memory of its process.

To end a *plain* claim, the server only has to delete the message. The worker sends the values that the server would
otherwise read from the record. The worker takes these values from this cache.
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
"""The largest expected lag of the server's clock behind this process's estimate of the server's time."""


class Held(Struct, frozen=True, gc=False):
    """A claim that this worker holds, with the encoded id of the message and the number of its lane."""

    member: bytes
    lane: int
    claim: Claim

    def is_plain(self, settlement: Settlement) -> bool:
        """Return True if the server only has to delete the message.

        This is the case if four conditions hold. The settlement is `Done`. The message has never lapsed. The message
        neither recurs nor is an occurrence of a series. The message has no version.
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
    """The claims that a worker holds, by message id.

    A missing claim does no harm. The server then reads the record to end the claim, and the outcome is the same.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, held: Sequence[Held]) -> None:
        """Add new claims. If the cache is full, empty it first."""
        if len(self._held) >= MOST_HELD:  # Nobody settled the old claims: they are lost or have lapsed.
            self._held.clear()
        self._held |= {each.claim.record.envelope.id: each for each in held}

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Update the tokens of renewed claims. Remove the claims that were not renewed."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.pop(renewal.id, None)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = Held(held.member, held.lane, Claim(held.claim.record, renewal.to))

    def take(self, settlements: Iterable[Settlement]) -> list[Held | None]:
        """Remove the claims of these settlements, and return them. None stands for a claim that is not in the cache."""
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
    for i, held in enumerate(ended):
        lists.setdefault((held.lane, held.claim.token), []).append(i)
    arguments: list[Arg] = [len(lists)]
    for (lane, token), indexes in lists.items():
        arguments += (lane, token, len(indexes))
        arguments += [ended[i].member for i in indexes]
    order = [i for indexes in lists.values() for i in indexes]
    memories: list[Arg] = []
    recent_ms = now_ms - SLACK_MS - RETRY_WINDOW_MS
    for place, i in enumerate(order, 1):
        member, record = ended[i].member, ended[i].claim.record
        if record.revision > recent_ms and record.op != NO_OP:
            until = (record.revision + RETRY_WINDOW_MS).to_bytes(6, "big")
            answer = b"s" + record.revision.to_bytes(6, "big") + record.due_ms.to_bytes(6, "big")
            memories += (place, b"o" + record.op, until + answer)
        if member[0] == TEXT:
            memories += (place, b"r" + member, record.revision.to_bytes(6, "big"))
    return [*arguments, len(memories), *memories], order
