"""`settle` and `renew`: end claims and renew leases. `settle` ends plain claims in bulk, and other claims one by one.

To end a *plain* claim, the store deletes the lease and records that the message has ended. It does not read the row of
the message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    Claim,
    Done,
    Envelope,
    Lane,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)

from .forgetting import PURGED_PER_ENDED, purge_ended
from .limits import count_ended, in_bulk, read_limits
from .rows import object_text
from .tables import LARGE_BYTES, Tables

__all__ = ["Held", "HeldClaims", "renew", "settle"]

MOST_HELD = 20_000


class Held(NamedTuple):
    """A claim that this process holds, with the number of its message.

    With the number, `settle` can end the claim without reading the row.
    """

    n: int
    token: int
    record: Record


class HeldClaims:
    """The claims that one `SqliteWork` holds, by message id.

    A missing claim does no harm, because `settle` then reads the tables.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, claims: Iterable[Claim], numbers: Iterable[int]) -> None:
        """Add new claims. If there are too many claims, forget all old claims first."""
        if len(self._held) > MOST_HELD:  # Nobody settled the old claims: they are lost or have lapsed.
            self._held.clear()
        for claim, n in zip(claims, numbers, strict=True):
            self._held[claim.record.envelope.id] = Held(n, claim.token, claim.record)

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Update the tokens of renewed claims."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.get(renewal.id)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = held._replace(token=renewal.to)

    def plain(self, settlement: Settlement) -> Held | None:
        """Return the held claim if it is plain, or None if it is not.

        A claim is plain if four conditions hold. The settlement is `Done`. The message has never lapsed. The message
        does not recur, and its id has no `~`, which the id of a retry of a series has. The message has no version.

        The caller also checks that the message got no items since the claim.
        """
        if type(settlement) is not Done:
            return None
        held = self._held.get(settlement.id)
        if held is None or held.token != settlement.token:
            return None
        envelope = held.record.envelope
        is_plain = envelope.rule is None and envelope.version is None and "~" not in envelope.id
        is_plain = is_plain and not held.record.lapses
        return held if is_plain else None

    def are_in(self, lanes: Collection[Lane], settlements: Iterable[Settlement]) -> bool:
        """Return whether one of the settled claims is in one of the lanes. A claim that is not held may be."""
        held = (self._held.get(settlement.id) for settlement in settlements)
        return any(each is None or each.record.envelope.lane in lanes for each in held)

    def drop(self, settlements: Iterable[Settlement]) -> None:
        """Remove claims that have been settled."""
        for settlement in settlements:
            self._held.pop(settlement.id, None)


def settle(tables: Tables, settlements: Sequence[Settlement], held: HeldClaims) -> list[SettleOutcome]:
    """End claims. Return one outcome for each settlement, in order."""
    has_limited = bool(tables.limited) and held.are_in(tables.limited, settlements)
    tables.has_new |= has_limited  # the next message of a key may begin
    plain: dict[int, Held] = {}
    by_index: dict[int, int] = {}
    if len({settlement.id for settlement in settlements}) < len(settlements):
        held = HeldClaims()  # Two settlements have the same id. Without a cache, the rules handle them in order.
    for i, settlement in enumerate(settlements):
        claim = held.plain(settlement)
        if claim is not None:
            plain[claim.n] = claim
            by_index[i] = claim.n
    ended: list[int] = []
    if plain:
        held_alone = _without_items(tables, plain)
        ended = _end_limited(tables, held_alone) if has_limited else _end_leases(tables, held_alone)
    _end(tables, ended, plain)
    outcomes = [SettleOutcome.SETTLED] * len(settlements)
    if len(ended) < len(settlements) or tables.keeps_journal:
        done = set(ended)
        for i, settlement in enumerate(settlements):
            if by_index.get(i) not in done:
                outcomes[i] = tables.rules.settle(settlement, tables.now)
            elif isinstance(settlement, Done):
                tables.note(settlement.outcome, plain[by_index[i]].record, tables.now)
    if settlements:
        purge_ended(tables, len(settlements) * PURGED_PER_ENDED)
    return outcomes


def _without_items(tables: Tables, held: Mapping[int, Held]) -> Mapping[int, Held]:
    """Return the claims whose messages got no items since the claim. The index of the other messages is small."""
    query = """
        SELECT n FROM messages INDEXED BY messages_appended
        WHERE n IN (SELECT value FROM json_each(?)) AND appended IS NOT NULL
    """
    with_items = {n for (n,) in tables.execute(query, (object_text(list(held)),))}
    return {n: each for n, each in held.items() if n not in with_items} if with_items else held


def _end_limited(tables: Tables, plain: Mapping[int, Held]) -> list[int]:
    """End leases, as `_end_leases`. Count all ended claims of a key at once."""
    limited = read_limits(tables)
    with in_bulk(tables):
        ended = _end_leases(tables, plain)
    by_lane: dict[Lane, list[Envelope]] = {}
    for n in ended:
        envelope = plain[n].record.envelope
        by_lane.setdefault(envelope.lane, []).append(envelope)
    for name, envelopes in by_lane.items():
        if (lane := limited.get(tables.known_lane(name))) is not None:
            count_ended(tables, lane, envelopes)
    return ended


def _end_leases(tables: Tables, plain: Mapping[int, Held]) -> list[int]:
    """Delete the leases that still have the tokens of these claims. Return the numbers of their messages."""
    query = "DELETE FROM leases WHERE n IN (SELECT value FROM json_each(?)) RETURNING n, ns, lane, token"
    rows = tables.execute(query, (object_text(list(plain)),)).fetchall()
    others = [row for row in rows if plain[row[0]].token != row[3]]
    if others:  # A number of an ended message may belong to a new message. Give the new message its lease back.
        # The lease loses its holder, and so it only ends by itself. Reading the holder would slow all settlements.
        tables.executemany("INSERT INTO leases (n, ns, lane, token) VALUES (?, ?, ?, ?)", others)
        gone = {row[0] for row in others}
        rows = [row for row in rows if row[0] not in gone]
    return sorted(row[0] for row in rows)


def _end(tables: Tables, numbers: Sequence[int], held: Mapping[int, Held]) -> None:
    """End messages. Their rows stay without large payloads, until `purge_ended` deletes the rows."""
    if not numbers:
        return
    tables.execute(
        "INSERT INTO ended (ns, n, until_ms) SELECT ?, value, ? FROM json_each(?)",
        (tables.ns, tables.now + RETRY_WINDOW_MS, object_text(numbers)),
    )
    large = [n for n in numbers if len(held[n].record.envelope.payload) > LARGE_BYTES]
    if large:
        query = "UPDATE messages SET payload = x'' WHERE n IN (SELECT value FROM json_each(?))"
        tables.execute(query, (object_text(large),))


def renew(tables: Tables, renewals: Sequence[Renewal]) -> list[RenewOutcome]:
    """Renew leases. Return one outcome for each renewal, in order."""
    return [tables.rules.renew(renewal) for renewal in renewals]
