"""Carrying out commands: puts of new ids in bulk, everything else one by one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from .. import transitions as t
from ..model import (
    After,
    At,
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
from .rows import INSERT_NEW, Row, headers_text, object_text
from .tables import Entry, Tables

__all__ = ["apply"]

# What a value that no column can hold raises; the command it came with is refused, its neighbours are not.
_BAD_VALUE = (OverflowError, UnicodeError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)


def apply(tables: Tables, commands: Sequence[Command], source: SourcePosition | None) -> list[Outcome]:
    """Carry out commands in order.

    Args:
        tables: If `careful`, each command is undone alone when it fails.
        commands: Any.
        source: Moves with them; if it has been passed, nothing is done.
    """
    if source is not None and not _move_position(tables, source):
        return [Refused("passed")] * len(commands)
    if tables.careful:
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
        " ON CONFLICT (ns, source) DO UPDATE SET position = excluded.position WHERE position < excluded.position",
        (tables.ns, source.source, source.position),
    )
    return moved.rowcount > 0


def _apply_safely(tables: Tables, command: Command) -> Outcome:
    tables.execute("SAVEPOINT command")
    try:
        return _apply(tables, command)
    except _BAD_VALUE as error:
        tables.execute("ROLLBACK TO command")
        tables.forget_caches()
        return Refused("unavailable", f"it holds a value that cannot be stored ({type(error).__name__})")
    finally:
        tables.execute("RELEASE command")


def _apply(tables: Tables, command: Command) -> Outcome:
    remembered = tables.remembered(command.op)
    if remembered is not None:
        return remembered
    entry = tables.find(command.id)
    match command:
        case Put():
            return _put(tables, command, entry, None)
        case Cancel():
            outcome = _cancel(tables, command, entry)
        case Reschedule() | Fire():
            outcome = _move(tables, command, entry)
    tables.remember(command.op, outcome)
    return outcome


# --- puts -------------------------------------------------------------------------------------------------


def _put_all(tables: Tables, puts: Sequence[Put]) -> list[Outcome]:
    """Insert puts whose ids nobody has, live or remembered, in one statement; then the rest, one by one.

    No op needs looking up for the former: while any op of an id is remembered, its row stands. Numbers are given by
    position, so that scheduling order is that of the commands either way.
    """
    first = tables.next_n(len(puts))
    rows = _rows(tables, puts, first)
    inserted = tables.executemany(INSERT_NEW, rows).rowcount
    stored = {row[1] for row in rows}
    if inserted < len(puts) or len(rows) < len(puts):
        query = "SELECT n FROM messages WHERE n BETWEEN ? AND ?"
        stored = {n for (n,) in tables.execute(query, (first, first + len(puts) - 1))}
    # The rows are still in the cache: reading them back costs less than binding their places again.
    tables.execute(
        "INSERT INTO queue SELECT lane, place_ms, n FROM messages WHERE n BETWEEN ? AND ?", (first, first + len(puts) - 1)
    )
    now = tables.now
    outcomes: list[Outcome] = []
    for n, put in enumerate(puts, first):
        if n in stored:
            outcomes.append(Stored("stored", now, _due_ms(put.due, now)))
        else:
            outcomes.append(_put_again(tables, put, n))
    if tables.keeps_journal:
        new = [put for n, put in enumerate(puts, first) if n in stored]
        tables.notes([("stored", t.record_of(put, _due_ms(put.due, now), now), "") for put in new])
    return outcomes


def _rows(tables: Tables, puts: Sequence[Put], first: int) -> list[Row]:
    """Return the rows of those puts that may be new."""
    ns, now, lane_number = tables.ns, tables.now, tables.lane_number
    ended = _ended_versions(tables, puts)
    rows: list[Row] = []
    for n, put in enumerate(puts, first):
        if put.envelope.id in ended:
            continue
        envelope = put.envelope
        due_ms = put.due.ms if type(put.due) is At else now + put.due.ms
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
            late.action if late.action else 0,
        ))  # fmt: skip
    return rows


def _ended_versions(tables: Tables, puts: Sequence[Put]) -> set[str]:
    """Return the ids of `newer` puts that have a tombstone."""
    newer = [put.id for put in puts if put.conflict.mode == "newer"]
    if not newer:
        return set()
    query = "SELECT id FROM tombstones WHERE ns = ? AND id IN (SELECT value FROM json_each(?))"
    return {row[0] for row in tables.execute(query, (tables.ns, object_text(newer)))}


def _put_again(tables: Tables, put: Put, n: int) -> Outcome:
    remembered = tables.remembered(put.op)
    return _put(tables, put, tables.find(put.id), n) if remembered is None else remembered


def _put(tables: Tables, put: Put, entry: Entry | None, n: int | None) -> Outcome:
    if entry is not None and entry.record.op == put.op:
        return Stored("stored", entry.record.revision, entry.record.due_ms)
    live = entry if entry is not None and not entry.is_over else None
    verdict = t.put_verdict(
        put.conflict,
        put.envelope.rule,
        None if live is None else live.record.envelope,
        in_flight=live is not None and live.token != 0,
        ended_version=_ended_version(tables, put.id) if live is None and put.conflict.mode == "newer" else None,
    )
    if isinstance(verdict, Refused):
        return verdict
    if live is not None and verdict in ("kept", "in_flight"):
        return Stored(verdict, live.record.revision, live.record.due_ms)
    if live is not None:
        tables.end_occurrences(live.record)
    last = None if entry is None else entry.record.revision
    record = t.record_of(put, _due_ms(put.due, tables.now), t.next_revision(tables.now, last))
    n = tables.next_n() if n is None else n  # before the old row is gone, so that the new number is above its own
    tables.displace(entry)
    tables.insert(record, record.due_ms, n)
    tables.note(verdict, record)
    return Stored(verdict, record.revision, record.due_ms)


def _ended_version(tables: Tables, message_id: str) -> int | None:
    query = "SELECT version FROM tombstones WHERE ns = ? AND id = ?"
    found = tables.execute(query, (tables.ns, message_id)).fetchone()
    return None if found is None else int(found[0])


# --- the other commands -----------------------------------------------------------------------------------


def _cancel(tables: Tables, command: Cancel, entry: Entry | None) -> Outcome:
    if entry is None or entry.is_over:
        return Refused("not_found")
    record = entry.record
    in_flight = tables.end_occurrences(record)
    if entry.token:
        tables.execute("UPDATE messages SET no_retry = 1 WHERE n = ?", (entry.n,))
        in_flight = True
    else:
        tables.unplace(entry)
        tables.forget(entry)
    tables.note("cancelled", record, "in_flight" if in_flight else "")
    return Stored("in_flight" if in_flight else "cancelled", record.revision, record.due_ms)


def _move(tables: Tables, command: Reschedule | Fire, entry: Entry | None) -> Outcome:
    if entry is None or entry.is_over:
        return Refused("not_found")
    if entry.token:
        return Refused("too_late" if isinstance(command, Reschedule) else "in_flight")
    if isinstance(command, Reschedule):
        place_ms = _due_ms(command.due, tables.now)
        moved = t.moved(entry.record, place_ms)
    else:
        place_ms = tables.now
        moved = t.fired(entry.record, tables.now)
    tables.unplace(entry)
    tables.move(entry, moved, place_ms)
    answer: Literal["rescheduled", "fired"] = "rescheduled" if isinstance(command, Reschedule) else "fired"
    tables.note(answer, moved)
    return Stored(answer, moved.revision, moved.due_ms)


def _due_ms(due: At | After, now: int) -> int:
    return now + due.ms if isinstance(due, After) else due.ms
