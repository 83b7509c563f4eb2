"""The arguments of the scripts `settle` and `renew`, the letters of their answers, and how much one call may do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import member_of
from aiodelay.core.record_codec import encode_trace, storable_text
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    Again,
    Dead,
    Done,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)

from .lease_cache import Held

__all__ = [
    "CHANGE_COST",
    "NOT_HELD",
    "RENEWED",
    "RENEWED_AT_ONCE",
    "ROOM",
    "SETTLED",
    "cost_of_change",
    "divided",
    "renewal_arguments",
    "settlement_arguments",
]

MOST_COST, CHANGE_COST = 500, 12
"""The most that the settlements of one call may cost, and the cost of a settlement that is not plain.

The unit is the cost of a plain settlement: the server only has to delete the message. For any other settlement, the
script reads and rewrites the record. The limit bounds the time for which one call blocks the server.
"""
RENEWED_AT_ONCE = 150
SETTLED = {ord("s"): SettleOutcome.SETTLED, ord("u"): SettleOutcome.SUPERSEDED, ord("g"): SettleOutcome.GONE}
NOT_HELD = ord("n")
ROOM = b"+"
"""The end of the answer of `settle`, if limits let other messages begin now."""
RENEWED = {
    ord("r"): RenewOutcome.RENEWED,
    ord("c"): RenewOutcome.CANCELLED,
    ord("u"): RenewOutcome.SUPERSEDED,
    ord("l"): RenewOutcome.LOST,
}


def renewal_arguments(renewals: Sequence[Renewal]) -> list[Arg]:
    """Return the arguments of `renew.lua` for these leases."""
    arguments: list[Arg] = []
    for each in renewals:
        arguments += [member_of(each.id), each.revision, each.token, each.to, int(each.ends_trial)]
    return arguments


def settlement_arguments(settlement: Settlement) -> list[Arg]:
    """Return the arguments of `settle.lua` for a claim that is not plain."""
    head: list[Arg] = [member_of(settlement.id), settlement.revision, settlement.token]
    then: Arg = "" if settlement.then_due_ms is None else max(settlement.then_due_ms, 0)
    match settlement:
        case Done(outcome=outcome):
            return [*head, f"d{outcome}", "", 0, "", then, "", ""]
        case Again(due_ms=due_ms, attempt=attempt, error=error, trace=trace):
            return [*head, "a", max(due_ms, 0), attempt, _error(error), then, _trace(trace), ""]
        case Dead(reason=reason, attempt=attempt, error=error, trace=trace, traceback=traceback):
            lines = (storable_text(traceback) or "").encode()
            return [*head, f"x{reason}", "", attempt, _error(error), then, _trace(trace), lines]


def _trace(trace: Mapping[str, str] | None) -> bytes:
    return encode_trace(trace) if trace else b""


def _error(text: str | None) -> bytes:
    """Encode an error's text. A character that UTF-8 cannot encode becomes an escape and does no harm."""
    return b"" if text is None else b"e" + text.encode("utf-8", "backslashreplace")


def cost_of_change(held: Held | None) -> int:
    """Return the cost of a settlement that is not plain. `held` is the claim; None = unknown."""
    size = held.claim.record.envelope.size if held else 0
    return CHANGE_COST + size * MOST_COST // MAX_CLAIM_BYTES


def divided(
    plain: Sequence[tuple[int, Held]], others: Sequence[tuple[int, Settlement, int]]
) -> Iterator[tuple[Sequence[tuple[int, Held]], Sequence[tuple[int, Settlement, int]]]]:
    """Divide settlements between calls of at most `MOST_COST`. A single settlement may cost more."""
    last = len(plain) // MOST_COST * MOST_COST
    for start in range(0, last, MOST_COST):
        yield plain[start : start + MOST_COST], ()
    of_plain, start, cost = plain[last:], 0, len(plain) - last
    for i, (_, _, own) in enumerate(others):
        if cost and cost + own > MOST_COST:
            yield of_plain, others[start:i]
            of_plain, start, cost = (), i, 0
        cost += own
    if cost:
        yield of_plain, others[start:]
