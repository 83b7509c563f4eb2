"""What one `Work` knows of the claims it was given: enough to end a plain one without the server reading it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aiodelay.model import Claim, Done, Record, Renewal, RenewOutcome, Settlement

from .keys import member_of
from .scripts import Arg

__all__ = ["HeldClaims"]

MOST_HELD = 20_000


class _Held(NamedTuple):
    record: Record
    lane: int
    token: int


class HeldClaims:
    """Claims given out, by id. A cache: what is not here is ended the longer way, with the same outcome."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def add(self, claim: Claim, lane: int) -> None:
        """Note what was given out."""
        if len(self._held) >= MOST_HELD:  # never settled: lost, or lapsed
            self._held.clear()
        self._held[claim.record.envelope.id] = _Held(claim.record, lane, claim.token)

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Note new tokens."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.get(renewal.id)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = held._replace(token=renewal.to)

    def plain(self, settlement: Settlement) -> list[Arg] | None:
        """Return how `settle.lua` is told of a plain end.

        None unless it is a `Done` of a claim known here that neither recurs, nor is a series' occurrence, nor carries
        a version: to end such a one is to delete it.
        """
        if type(settlement) is not Done:
            return None
        held = self._held.get(settlement.id)
        if held is None or held.token != settlement.token:
            return None
        record = held.record
        envelope = record.envelope
        if envelope.rule is not None or envelope.version is not None or "~" in envelope.id:
            return None
        known = record.op + record.revision.to_bytes(6, "big") + record.due_ms.to_bytes(6, "big")
        return [member_of(envelope.id), held.lane, held.token, known]

    def size_of(self, message_id: str) -> int:
        """Return the bytes of a message, 0 if it is not known here."""
        held = self._held.get(message_id)
        return 0 if held is None else held.record.envelope.size

    def drop(self, settlements: Iterable[Settlement]) -> None:
        """Forget what was settled."""
        for settlement in settlements:
            self._held.pop(settlement.id, None)
