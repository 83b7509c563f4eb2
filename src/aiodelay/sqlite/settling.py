"""Ending and prolonging claims: plain `Done`s in bulk, everything else one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .. import transitions as t
from ..model import (
    RETRY_WINDOW_MS,
    Again,
    Claim,
    Dead,
    Done,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)
from .rows import object_text
from .tables import LARGE_BYTES, Entry, Tables

__all__ = ["Held", "HeldClaims", "renew", "settle"]

MOST_HELD = 20_000
PURGED_PER_SETTLEMENT = 2


class Held(NamedTuple):
    """What this process knows of a claim that it was given: enough to end it without looking it up."""

    n: int
    token: int
    record: Record


class HeldClaims:
    """Claims given out by one `Work`, by id. A cache: what is not here is looked up in the tables."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, claims: Iterable[Claim], entries: Iterable[Entry]) -> None:
        """Note what was given out."""
        if len(self._held) > MOST_HELD:  # never settled: lost, or lapsed
            self._held.clear()
        for claim, entry in zip(claims, entries, strict=True):
            self._held[entry.record.envelope.id] = Held(entry.n, claim.token, entry.record)

    def renewed(self, renewal: Renewal) -> None:
        """Note a new token."""
        held = self._held.get(renewal.id)
        if held is not None:
            self._held[renewal.id] = held._replace(token=renewal.to)

    def plain(self, settlement: Settlement) -> Held | None:
        """Return the claim if to end it is to delete it: `Done`, not recurring, no version, not a series' retry."""
        if type(settlement) is not Done:
            return None
        held = self._held.get(settlement.id)
        if held is None or held.token != settlement.token:
            return None
        envelope = held.record.envelope
        is_plain = envelope.rule is None and envelope.version is None and "~" not in envelope.id
        return held if is_plain else None

    def drop(self, settlements: Iterable[Settlement]) -> None:
        """Forget what was settled."""
        for settlement in settlements:
            self._held.pop(settlement.id, None)


def settle(tables: Tables, settlements: Sequence[Settlement], held: HeldClaims) -> list[SettleOutcome]:
    """End claims; one outcome per settlement, in order."""
    plain: dict[int, tuple[int, Held]] = {}
    others: list[int] = []
    for i, settlement in enumerate(settlements):
        claim = held.plain(settlement)
        if claim is None or claim.n in plain:
            others.append(i)
        else:
            plain[claim.n] = (i, claim)
    outcomes = [SettleOutcome.SETTLED] * len(settlements)
    if plain:
        numbers = _end_leases(tables, plain)
        ended = [(settlements[plain[n][0]], plain[n][1].record) for n in numbers]
        _end(tables, numbers, [record for _, record in ended])
        if tables.keeps_journal:
            tables.notes([(done.outcome, record, "") for done, record in ended if isinstance(done, Done)])
        if len(numbers) < len(plain):
            others += [i for n, (i, _) in plain.items() if n not in set(numbers)]
    for i in others:
        outcomes[i] = _settle(tables, settlements[i])
    purge_ended(tables, len(settlements) * PURGED_PER_SETTLEMENT)
    return outcomes


def _end_leases(tables: Tables, plain: Mapping[int, tuple[int, Held]]) -> list[int]:
    """Delete those leases that still have the token we know; return their numbers."""
    query = "DELETE FROM leases WHERE n IN (SELECT value FROM json_each(?)) RETURNING n, ns, lane, token"
    rows = tables.execute(query, (object_text(list(plain)),)).fetchall()
    others = [row for row in rows if plain[row[0]][1].token != row[3]]
    if others:  # a number that was ours, and has come to another message since
        tables.executemany("INSERT INTO leases (n, ns, lane, token) VALUES (?, ?, ?, ?)", others)
        gone = {row[0] for row in others}
        rows = [row for row in rows if row[0] not in gone]
    return sorted(row[0] for row in rows)


def _end(tables: Tables, numbers: Iterable[int], records: Sequence[Record]) -> None:
    """Delete messages, or remember those whose op may still be repeated."""
    limit = tables.now - RETRY_WINDOW_MS
    young: list[int] = []
    large: list[int] = []
    old: list[int] = []
    for n, record in zip(numbers, records, strict=True):
        (young if record.revision > limit else old).append(n)
        if len(record.envelope.payload) > LARGE_BYTES:
            large.append(n)
    if old:
        tables.execute("DELETE FROM messages WHERE n IN (SELECT value FROM json_each(?))", (object_text(old),))
    if young:
        tables.execute(
            "INSERT INTO ended (ns, n, until_ms) SELECT ?, value, ? FROM json_each(?)",
            (tables.ns, tables.now + RETRY_WINDOW_MS, object_text(young)),
        )
    if large and young:
        query = "UPDATE messages SET payload = x'' WHERE n IN (SELECT value FROM json_each(?))"
        tables.execute(query, (object_text(large),))


def purge_ended(tables: Tables, limit: int) -> None:
    """Delete messages that need not be remembered any more, lowest numbers first.

    The lowest number stands for all: if it is not over, nothing is done; the others wait at most a window for it.
    """
    over = "(until_ms <= ?1 OR until_ms > ?2)"
    times = tables.now, tables.now + RETRY_WINDOW_MS
    query = f"SELECT {over} FROM ended WHERE ns = ?3 ORDER BY n LIMIT 1"  # noqa: S608 - constant
    first = tables.execute(query, (*times, tables.ns)).fetchone()
    if not first or not first[0]:
        return
    query = f"SELECT n FROM (SELECT n, until_ms FROM ended WHERE ns = ?3 ORDER BY n LIMIT ?4) WHERE {over}"  # noqa: S608
    numbers = object_text([n for (n,) in tables.execute(query, (*times, tables.ns, limit))])
    tables.execute("DELETE FROM messages WHERE n IN (SELECT value FROM json_each(?))", (numbers,))
    query = "DELETE FROM ended WHERE ns = ? AND n IN (SELECT value FROM json_each(?))"
    tables.execute(query, (tables.ns, numbers))


def _settle(tables: Tables, settlement: Settlement) -> SettleOutcome:
    entry = tables.find(settlement.id)
    if entry is None or entry.is_over or entry.token != settlement.token:
        is_newer = entry is not None and not entry.is_over and entry.record.revision != settlement.revision
        return SettleOutcome.SUPERSEDED if is_newer else SettleOutcome.GONE
    record = entry.record
    is_series = record.envelope.rule is not None
    retrying = isinstance(settlement, Again) and not record.no_retry
    tables.unplace(entry)
    goes_on = is_series and settlement.then_due_ms is not None and not record.no_retry
    if isinstance(settlement, Again) and retrying:
        _retry(tables, entry, settlement, beside=goes_on)
    elif isinstance(settlement, Dead):
        tables.bury(t.after_failure(record, settlement), settlement.reason)
    elif isinstance(settlement, Again):
        tables.note("dropped", record, "cancelled in flight")
    else:
        tables.note(settlement.outcome, record)
    if goes_on and settlement.then_due_ms is not None:
        rearmed = t.rearmed(record, settlement.then_due_ms, retrying=retrying)
        tables.move(entry, rearmed, rearmed.due_ms)
    elif not retrying:
        tables.forget(entry)
    return SettleOutcome.SETTLED


def _retry(tables: Tables, entry: Entry, settlement: Again, *, beside: bool) -> None:
    """Put the message back; `beside`: as an occurrence on its own, since its series goes on."""
    record = t.after_failure(entry.record, settlement)
    if beside:
        record = t.as_occurrence(record)
        tables.displace(tables.find(record.id))
        tables.insert(record, settlement.due_ms)
    else:
        tables.move(entry, record, settlement.due_ms)
    tables.note("again", record, settlement.error or "")


def renew(tables: Tables, renewals: Sequence[Renewal]) -> list[RenewOutcome]:
    """Prolong leases; one outcome per renewal, in order."""
    return [_renew(tables, renewal) for renewal in renewals]


def _renew(tables: Tables, renewal: Renewal) -> RenewOutcome:
    entry = tables.find(renewal.id)
    if entry is None or entry.is_over or not entry.token or entry.token not in (renewal.token, renewal.to):
        is_newer = entry is not None and not entry.is_over and entry.record.revision != renewal.revision
        return RenewOutcome.SUPERSEDED if is_newer else RenewOutcome.LOST
    if t.is_lease_over(renewal.to, tables.now):
        return RenewOutcome.LOST
    tables.execute("UPDATE leases SET token = ? WHERE n = ?", (renewal.to, entry.n))
    if entry.record.alone:
        tables.execute("UPDATE messages SET alone = 0, lapses = 0 WHERE n = ?", (entry.n,))
    return RenewOutcome.CANCELLED if entry.record.no_retry else RenewOutcome.RENEWED
