"""`apply`: carries out commands in a transaction. Puts with new ids are inserted in bulk, other commands one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from aiodelay.core import transitions as t
from aiodelay.core.values import Command, Outcome, Put, Refused, SourcePosition, Stored

from .connection import BAD_VALUE, bad_value
from .forgetting import PURGED_PER_ENDED, purge_answers, purge_ended
from .rows import INSERT_NEW, INSERT_SEVERAL_NEW, NEW_AT_ONCE, Row, headers_text, object_text
from .tables import Tables

__all__ = ["apply"]


_BY_RULES = frozenset({"if_revision", "debounce", "throttle", "throttle_last"})
"""The conflict modes that the rules decide or complete, also for a new id."""


def apply(tables: Tables, commands: Sequence[Command], source: SourcePosition | None) -> list[Outcome]:
    """Carry out commands in order. Return one outcome for each command.

    Args:
        tables: The tables, in a transaction. If `tables.careful` is set and `source` is None, a command with a value
            that cannot be stored is undone alone. Any other failure undoes all commands.
        commands: The commands to carry out.
        source: The new position of an intake, or None. It is stored in the same transaction. If the commands do not
            continue the stored position, no command is carried out.
    """
    if source is not None and not _move_position(tables, source):
        return [Refused("passed")] * len(commands)
    if any(type(command) is Put and command.conflict.mode == "append" for command in commands):
        tables.switch_on(("append",))
    outcomes = _apply_all(tables, commands, source)
    if tables.new_answers:
        purge_ended(tables, tables.new_answers * PURGED_PER_ENDED)
        purge_answers(tables, tables.new_answers * PURGED_PER_ENDED)
        tables.new_answers = 0
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
            outcomes += [tables.rules.apply(command, tables.now) for command in run]
    return outcomes


def _is_put(command: Command) -> bool:
    return type(command) is Put


def _move_position(tables: Tables, source: SourcePosition) -> bool:
    if source.is_stored:
        query = "UPDATE positions SET position = ? WHERE ns = ? AND source = ? AND position = ?"
        moved = tables.execute(query, (source.position, tables.ns, source.source, source.first))
    else:
        moved = tables.execute(
            "INSERT INTO positions (ns, source, position) VALUES (?, ?, ?)"
            " ON CONFLICT (ns, source) DO UPDATE SET position = excluded.position WHERE position = ?",
            (tables.ns, source.source, source.position, source.first),
        )
    return moved.rowcount > 0


def _apply_safely(tables: Tables, command: Command) -> Outcome:
    tables.execute("SAVEPOINT command")
    try:
        return tables.rules.apply(command, tables.now)
    except BAD_VALUE as error:
        tables.execute("ROLLBACK TO command")
        tables.forget_caches()
        return Refused("unavailable", bad_value(error).reason)
    finally:
        tables.execute("RELEASE command")


def _put_all(tables: Tables, puts: Sequence[Put]) -> list[Outcome]:
    """Insert new messages in bulk, and then carry out the other puts one by one.

    A put is inserted in bulk if three conditions hold. The table `messages` has no row with its id. The store remembers
    no answer to its op. Its conflict rule is not one of `_BY_RULES`, and not `newer` with an id in the table
    `tombstones`.

    The number of a put follows from its position among the puts. So the scheduling order is always the order of the
    commands.
    """
    first = tables.next_n(len(puts))
    last = first + len(puts) - 1
    rows = _new_rows(tables, puts, first)
    stored = {row[1] for row in rows}
    if _insert_new(tables, rows) < len(rows):
        stored = {n for (n,) in tables.execute("SELECT n FROM messages WHERE n BETWEEN ? AND ?", (first, last))}
    # SQLite still has the new rows in its cache. A read of their places is faster than a second statement with
    # parameters.
    query = "INSERT INTO queue (lane, place_ms, n) SELECT lane, place_ms, n FROM messages WHERE n BETWEEN ? AND ?"
    tables.execute(query, (first, last))
    tables.has_new = True
    now = tables.now
    outcomes: list[Outcome] = []
    for n, put in enumerate(puts, first):
        if n not in stored:
            tables.reserve_n(n)
            outcomes.append(tables.rules.apply(put, now))
            continue
        due_ms = t.due_of(put.due, now)
        outcomes.append(Stored("stored", now, due_ms))
        if tables.keeps_journal:
            tables.note("stored", t.record_of(put, due_ms, now), now)
    tables.reserve_n(0)
    return outcomes


def _insert_new(tables: Tables, rows: Sequence[Row]) -> int:
    """Insert the rows whose ids do not exist yet. Return how many rows were inserted."""
    several = len(rows) - len(rows) % NEW_AT_ONCE
    inserted = 0
    for at in range(0, several, NEW_AT_ONCE):
        values = list(chain.from_iterable(rows[at : at + NEW_AT_ONCE]))
        inserted += tables.execute(INSERT_SEVERAL_NEW, values).rowcount
    return inserted + tables.executemany(INSERT_NEW, rows[several:]).rowcount if rows[several:] else inserted


def _new_rows(tables: Tables, puts: Sequence[Put], first: int) -> list[Row]:
    """Return the rows of the puts that can be inserted if their id is new. The rules decide about the other puts."""
    ns, now, lane_number = tables.ns, tables.now, tables.lane_number
    remembered = tables.answers.known_among([put.op for put in puts], now)
    ended = _ended_with_version(tables, puts)
    rows: list[Row] = []
    for n, put in enumerate(puts, first):
        envelope = put.envelope
        if envelope.id in ended or put.op in remembered or put.conflict.mode in _BY_RULES:
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
    """Return the ids of the `newer` puts whose ids have a row in the table `tombstones`."""
    newer = [put.id for put in puts if put.conflict.mode == "newer"]
    if not newer:
        return set()
    query = "SELECT id FROM tombstones WHERE ns = ? AND id IN (SELECT value FROM json_each(?))"
    return {row[0] for row in tables.execute(query, (tables.ns, object_text(newer)))}
