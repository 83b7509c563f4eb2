"""What one `Work` knows of the claims it was given: enough to end a plain one without the server reading it."""

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
"""How far the server's clock may be behind what we think it is."""


class Held(Struct, frozen=True, gc=False):
    """A claim given out: its id as Redis holds it, its lane's number, and itself."""

    member: bytes
    lane: int
    claim: Claim

    def is_plain(self, settlement: Settlement) -> bool:
        """Say whether to end it is to delete it.

        It has never lapsed, does not recur, is no series' occurrence, and has no version.
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
    """Claims given out, by id. A cache: what is not here is ended the longer way, with the same outcome."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, held: Sequence[Held]) -> None:
        """Note what was given out."""
        if len(self._held) >= MOST_HELD:  # never settled: lost, or lapsed
            self._held.clear()
        self._held |= {each.claim.record.envelope.id: each for each in held}

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Note new tokens, and know those no more that were not renewed."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.pop(renewal.id, None)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = Held(held.member, held.lane, Claim(held.claim.record, renewal.to))

    def take(self, settlements: Iterable[Settlement]) -> list[Held | None]:
        """Return what is known of claims that are to be ended; they are known no more."""
        found = [(settlement.token, self._held.pop(settlement.id, None)) for settlement in settlements]
        return [held if held is not None and held.claim.token == token else None for token, held in found]


def plain_arguments(ended: Sequence[Held], now_ms: int) -> tuple[list[Arg], list[int]]:
    """Write plain ends as `settle.lua` takes them.

    Args:
        ended: Claims.
        now_ms: The store's time.

    Returns:
        The arguments, and the order in which they name the claims.
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
