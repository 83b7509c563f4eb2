"""Ending and prolonging claims: plain `Done`s in bulk, everything else one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aiodelay import transitions as t
from aiodelay.model import (
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

from .forgetting import PURGED_PER_ENDED, purge_ended
from .rows import object_text
from .tables import LARGE_BYTES, Entry, Tables

__all__ = ["Held", "HeldClaims", "renew", "settle"]

MOST_HELD = 20_000


class Held(NamedTuple):
    """What this process knows of a claim that it was given: enough to end it without looking it up."""

    n: int
    token: int
    record: Record


class HeldClaims:
    """Claims given out by one `Work`, by id. A cache: what is not here is looked up in the tables."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, claims: Iterable[Claim], numbers: Iterable[int]) -> None:
        """Note what was given out."""
        if len(self._held) > MOST_HELD:  # never settled: lost, or lapsed
            self._held.clear()
        for claim, n in zip(claims, numbers, strict=True):
            self._held[claim.record.envelope.id] = Held(n, claim.token, claim.record)

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Note new tokens."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.get(renewal.id)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = held._replace(token=renewal.to)

    def plain(self, settlement: Settlement) -> Held | None:
        """Return the claim if to end it is to delete it: `Done`; no lapse, no rule, no version, not a series' retry."""
        if type(settlement) is not Done:
            return None
        held = self._held.get(settlement.id)
        if held is None or held.token != settlement.token:
            return None
        envelope = held.record.envelope
        is_plain = envelope.rule is None and envelope.version is None and "~" not in envelope.id
        is_plain = is_plain and not held.record.lapses
        return held if is_plain else None

    def drop(self, settlements: Iterable[Settlement]) -> None:
        """Forget what was settled."""
        for settlement in settlements:
            self._held.pop(settlement.id, None)


def settle(tables: Tables, settlements: Sequence[Settlement], held: HeldClaims) -> list[SettleOutcome]:
    """End claims; one outcome per settlement, in order."""
    plain: dict[int, Held] = {}
    by_index: dict[int, int] = {}
    if len({settlement.id for settlement in settlements}) < len(settlements):
        held = HeldClaims()  # one claim settled twice: in order, then
    for i, settlement in enumerate(settlements):
        claim = held.plain(settlement)
        if claim is not None:
            plain[claim.n] = claim
            by_index[i] = claim.n
    ended = _end_leases(tables, plain) if plain else []
    _end(tables, ended, plain)
    outcomes = [SettleOutcome.SETTLED] * len(settlements)
    if len(ended) < len(settlements) or tables.keeps_journal:
        done = set(ended)
        for i, settlement in enumerate(settlements):
            if by_index.get(i) not in done:
                outcomes[i] = _settle(tables, settlement)
            elif isinstance(settlement, Done):
                tables.note(settlement.outcome, plain[by_index[i]].record)
    if settlements:
        purge_ended(tables, len(settlements) * PURGED_PER_ENDED)
    return outcomes


def _end_leases(tables: Tables, plain: Mapping[int, Held]) -> list[int]:
    """Delete those leases that still have the token we know; return their numbers."""
    query = "DELETE FROM leases WHERE n IN (SELECT value FROM json_each(?)) RETURNING n, ns, lane, token"
    rows = tables.execute(query, (object_text(list(plain)),)).fetchall()
    others = [row for row in rows if plain[row[0]].token != row[3]]
    if others:  # a number that was ours, and has come to another message since
        tables.executemany("INSERT INTO leases (n, ns, lane, token) VALUES (?, ?, ?, ?)", others)
        gone = {row[0] for row in others}
        rows = [row for row in rows if row[0] not in gone]
    return sorted(row[0] for row in rows)


def _end(tables: Tables, numbers: Sequence[int], held: Mapping[int, Held]) -> None:
    """End messages; their rows stay for a while, without payloads that are large."""
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


def _settle(tables: Tables, settlement: Settlement) -> SettleOutcome:
    entry = tables.find(settlement.id)
    if entry is None or entry.is_over or entry.token != settlement.token:
        was_replaced = tables.end_superseded(settlement) or _is_newer(entry, settlement.revision)
        return SettleOutcome.SUPERSEDED if was_replaced else SettleOutcome.GONE
    record = entry.record
    recurs = record.envelope.rule is not None and not record.no_retry
    then_due_ms = settlement.then_due_ms if recurs else None
    tables.unplace(entry)
    lives_on = _end_attempt(tables, entry, settlement, beside=then_due_ms is not None)
    if then_due_ms is not None:
        tables.remember_put(record)
        series = t.rearmed(record, then_due_ms, retrying=lives_on)
        tables.move(entry, series, series.due_ms)
    elif not lives_on:
        tables.forget(entry)
    return SettleOutcome.SETTLED


def _is_newer(entry: Entry | None, revision: int) -> bool:
    return entry is not None and not entry.is_over and entry.record.revision > revision


def _end_attempt(tables: Tables, entry: Entry, settlement: Settlement, *, beside: bool) -> bool:
    """Do with a message what the settlement says; say whether it is tried again, `beside` its series or not."""
    record = entry.record
    match settlement:
        case Again() if not record.no_retry:
            _retry(tables, entry, settlement, beside=beside)
            return True
        case Again():
            tables.note("dropped", record, "cancelled in flight")
        case Dead():
            tables.bury(t.after_failure(record, settlement), settlement.reason)
        case Done():
            tables.note(settlement.outcome, record)
    return False


def _retry(tables: Tables, entry: Entry, settlement: Again, *, beside: bool) -> None:
    failed = t.after_failure(entry.record, settlement)
    if beside:
        failed = t.as_occurrence(failed)
        there = tables.find(failed.id)
        if there is not None:
            tables.supersede(there)
        tables.displace(there)
        tables.insert(failed, t.retry_place(failed, settlement.due_ms))
    else:
        tables.move(entry, failed, t.retry_place(failed, settlement.due_ms))
    tables.note("again", failed, settlement.error or "")


def renew(tables: Tables, renewals: Sequence[Renewal]) -> list[RenewOutcome]:
    """Prolong leases; one outcome per renewal, in order."""
    return [_renew(tables, renewal) for renewal in renewals]


def _renew(tables: Tables, renewal: Renewal) -> RenewOutcome:
    entry = tables.find(renewal.id)
    if entry is None or not entry.token or entry.token not in (renewal.token, renewal.to):
        return RenewOutcome.SUPERSEDED if tables.renew_superseded(renewal) else RenewOutcome.LOST
    tables.execute("UPDATE leases SET token = ? WHERE n = ?", (renewal.to, entry.n))
    if renewal.ends_trial:
        tables.execute("UPDATE messages SET alone = 0 WHERE n = ?", (entry.n,))
        tables.end_trial(entry)
    return RenewOutcome.CANCELLED if entry.record.no_retry else RenewOutcome.RENEWED
