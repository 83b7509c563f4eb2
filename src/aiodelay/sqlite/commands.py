"""Carrying out commands: puts of new ids in bulk, everything else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Literal

from aiodelay import transitions as t
from aiodelay.model import (
    RETRY_WINDOW_MS,
    Cancel,
    Command,
    Fire,
    Outcome,
    Put,
    Record,
    Refused,
    Reschedule,
    SourcePosition,
    Stored,
)

from .connection import BAD_VALUE, bad_value
from .forgetting import PURGED_PER_ENDED, purge_answers, purge_ended
from .rows import INSERT_NEW, INSERT_SEVERAL_NEW, NEW_AT_ONCE, Row, headers_text, object_text
from .tables import Entry, Tables

__all__ = ["apply"]


def apply(tables: Tables, commands: Sequence[Command], source: SourcePosition | None) -> list[Outcome]:
    """Carry out commands in order.

    Args:
        tables: If `careful`, each command is undone alone when it fails; with a `source`, all of them are.
        commands: Any.
        source: Moves with them; if it stands elsewhere, nothing is done.
    """
    if source is not None and not _move_position(tables, source):
        return [Refused("passed")] * len(commands)
    outcomes = _apply_all(tables, commands, source)
    if tables.answers:
        purge_ended(tables, tables.answers * PURGED_PER_ENDED)
        purge_answers(tables, tables.answers * PURGED_PER_ENDED)
        tables.answers = 0
    return outcomes


def _apply_all(tables: Tables, commands: Sequence[Command], source: SourcePosition | None) -> list[Outcome]:
    if tables.careful and source is None:
        return [_apply_safely(tables, command) for command in commands]
    outcomes: list[Outcome] = []
    for is_put, group in groupby(commands, _is_put):
        run = list(group)
        if is_put:
            outcomes += _put_all(tables, run)  # type: ignore[arg-type]
        else:
            outcomes += [_apply(tables, command) for command in run]
    return outcomes


def _is_put(command: Command) -> bool:
    return type(command) is Put


def _move_position(tables: Tables, source: SourcePosition) -> bool:
    moved = tables.execute(
        "INSERT INTO positions (ns, source, position) VALUES (?, ?, ?)"
        " ON CONFLICT (ns, source) DO UPDATE SET position = excluded.position WHERE position = ?",
        (tables.ns, source.source, source.position, source.first),
    )
    return moved.rowcount > 0


def _apply_safely(tables: Tables, command: Command) -> Outcome:
    tables.execute("SAVEPOINT command")
    try:
        return _apply(tables, command)
    except BAD_VALUE as error:
        tables.execute("ROLLBACK TO command")
        tables.forget_caches()
        return Refused("unavailable", bad_value(error).reason)
    finally:
        tables.execute("RELEASE command")


def _apply(tables: Tables, command: Command, n: int | None = None) -> Outcome:
    """Carry out a command, or answer its repetition as it was answered first.

    Args:
        tables: In a transaction.
        command: Any.
        n: The number kept for what it stores.
    """
    is_remembered = command.op != t.NO_OP
    outcome = tables.remembered(command.op) if is_remembered else None
    if outcome is not None:
        return outcome
    entry = tables.find(command.id)
    if entry is not None and is_remembered and entry.record.op == command.op and _tells(entry, tables.now):
        return t.first_answer(entry.record)
    match command:
        case Put():
            outcome = _put(tables, command, entry, n)
        case Cancel():
            outcome = _cancel(tables, command, _live(entry))
        case Reschedule():
            outcome = _reschedule(tables, command, _live(entry))
        case Fire():
            outcome = _fire(tables, _live(entry))
    # That it was stored, the record itself tells.
    if is_remembered and not (isinstance(outcome, Stored) and outcome.answer == "stored"):
        tables.remember(command.op, outcome)
    return outcome


def _tells(entry: Entry, now: int) -> bool:
    """Say whether the row still answers for its op: of what has ended, as long as the op may be repeated."""
    return not entry.is_over or now < entry.record.revision + RETRY_WINDOW_MS


def _live(entry: Entry | None) -> Entry | None:
    return None if entry is None or entry.is_over else entry


# --- puts -------------------------------------------------------------------------------------------------


def _put_all(tables: Tables, puts: Sequence[Put]) -> list[Outcome]:
    """Insert puts whose ids nobody has, live or remembered, in one statement; then the rest, one by one.

    Numbers are given by position, so that scheduling order is that of the commands either way.
    """
    first = tables.next_n(len(puts))
    last = first + len(puts) - 1
    rows = _new_rows(tables, puts, first)
    stored = {row[1] for row in rows}
    if _insert_new(tables, rows) < len(rows):
        stored = {n for (n,) in tables.execute("SELECT n FROM messages WHERE n BETWEEN ? AND ?", (first, last))}
    # The rows are still in the cache: to read them back costs less than to bind their places again.
    query = "INSERT INTO queue (lane, place_ms, n) SELECT lane, place_ms, n FROM messages WHERE n BETWEEN ? AND ?"
    tables.execute(query, (first, last))
    tables.has_new = True
    now = tables.now
    outcomes: list[Outcome] = []
    for n, put in enumerate(puts, first):
        if n not in stored:
            outcomes.append(_apply(tables, put, n))
            continue
        due_ms = t.due_of(put.due, now)
        outcomes.append(Stored("stored", now, due_ms))
        if tables.keeps_journal:
            tables.note("stored", t.record_of(put, due_ms, now))
    return outcomes


def _insert_new(tables: Tables, rows: Sequence[Row]) -> int:
    """Insert rows whose ids nobody has; return how many."""
    several = len(rows) - len(rows) % NEW_AT_ONCE
    inserted = 0
    for at in range(0, several, NEW_AT_ONCE):
        values = list(chain.from_iterable(rows[at : at + NEW_AT_ONCE]))
        inserted += tables.execute(INSERT_SEVERAL_NEW, values).rowcount
    return inserted + tables.executemany(INSERT_NEW, rows[several:]).rowcount if rows[several:] else inserted


def _new_rows(tables: Tables, puts: Sequence[Put], first: int) -> list[Row]:
    """Return the rows of those puts that are new if their ids are."""
    ns, now, lane_number = tables.ns, tables.now, tables.lane_number
    remembered = tables.remembered_among([put.op for put in puts])
    ended = _ended_with_version(tables, puts)
    rows: list[Row] = []
    for n, put in enumerate(puts, first):
        envelope = put.envelope
        if envelope.id in ended or put.op in remembered or put.conflict.mode == "if_revision":
            continue
        due_ms = t.due_of(put.due, now)
        late = put.late
        rows.append((
            ns,
            n,
            due_ms,
            lane_number(envelope.lane),
            envelope.id,
            envelope.address,
            envelope.type,
            envelope.encoding,
            envelope.payload,
            envelope.key,
            headers_text(envelope) if envelope.headers else None,
            object_text(dict(envelope.trace)) if envelope.trace else None,
            envelope.version,
            None if envelope.rule is None else object_text(dict(envelope.rule)),
            now,
            due_ms,
            put.op,
            due_ms + late.after_ms if late.action else 0,
            int(late.action) if late.action else 0,
        ))  # fmt: skip
    return rows


def _ended_with_version(tables: Tables, puts: Sequence[Put]) -> set[str]:
    """Return the ids of `newer` puts that may have a tombstone."""
    newer = [put.id for put in puts if put.conflict.mode == "newer"]
    if not newer:
        return set()
    query = "SELECT id FROM tombstones WHERE ns = ? AND id IN (SELECT value FROM json_each(?))"
    return {row[0] for row in tables.execute(query, (tables.ns, object_text(newer)))}


def _put(tables: Tables, put: Put, entry: Entry | None, n: int | None) -> Outcome:
    live = _live(entry)
    verdict = t.put_verdict(
        put.conflict,
        put.envelope.rule,
        None if live is None else live.record,
        in_flight=live is not None and live.token != 0,
        ended_version=tables.ended_version(put.id) if put.conflict.mode == "newer" else None,
    )
    if isinstance(verdict, Refused):
        return verdict
    if live is not None:
        if verdict in ("kept", "in_flight"):
            return Stored(verdict, live.record.revision, live.record.due_ms)
        tables.end_retries(put.id, is_replaced=True)
        tables.supersede(live)
    revision = t.next_revision(tables.now, None if entry is None else entry.record.revision)
    record = t.record_of(put, t.due_of(put.due, tables.now), revision)
    n = tables.next_n() if n is None else n  # before the old row is gone, so that the new number is above its own
    tables.displace(entry)
    tables.insert(record, record.due_ms, n)
    tables.note(verdict, record)
    is_older_in_flight = verdict == "replaced" and tables.has_superseded(put.id)
    return Stored(verdict, revision, record.due_ms, is_older_in_flight)


# --- the other commands -----------------------------------------------------------------------------------


def _cancel(tables: Tables, command: Cancel, entry: Entry | None) -> Outcome:
    refused = t.cancel_refused(command, None if entry is None else entry.record)
    if refused is not None or entry is None:
        return refused or Refused("not_found")
    record = entry.record
    in_flight = tables.end_retries(record.id) or tables.has_superseded(record.id)
    if entry.token:
        tables.execute("UPDATE messages SET no_retry = 1 WHERE n = ?", (entry.n,))
    else:
        tables.unplace(entry)
        tables.forget(entry)
    answer: Literal["in_flight", "cancelled"] = "in_flight" if entry.token or in_flight else "cancelled"
    tables.note("cancelled", record, answer if answer == "in_flight" else "")
    return Stored(answer, record.revision, record.due_ms)


def _reschedule(tables: Tables, command: Reschedule, entry: Entry | None) -> Outcome:
    if entry is None:
        return Refused("not_found")
    if entry.token:
        return Refused("too_late")
    record = t.moved(entry.record, t.due_of(command.due, tables.now))
    return _move(tables, entry, record, record.due_ms, "rescheduled")


def _fire(tables: Tables, entry: Entry | None) -> Outcome:
    if entry is None:
        return Refused("not_found")
    if entry.token:
        return Refused("in_flight")
    return _move(tables, entry, t.fired(entry.record, tables.now), min(entry.place_ms, tables.now), "fired")


def _move(
    tables: Tables, entry: Entry, record: Record, place_ms: int, answer: Literal["rescheduled", "fired"]
) -> Outcome:
    tables.remember_put(entry.record)
    tables.unplace(entry)
    tables.move(entry, record, place_ms)
    tables.note(answer, record)
    return Stored(answer, record.revision, record.due_ms)
