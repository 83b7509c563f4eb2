"""Converts a record to a row of the table `messages`, and a row to a record.

The module defines the order of the columns and the encoding of their values. `commands` and `tables` depend on both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from aiodelay.core.record_codec import storable_text, storable_texts
from aiodelay.core.record_format import FIELDS, Field
from aiodelay.core.values import NO_HEADERS, NO_TRACE, Envelope, Lane, LateAction, Record
from aiodelay.errors import RecordFormatError

__all__ = [
    "INSERT",
    "INSERT_NEW",
    "INSERT_SEVERAL_NEW",
    "MOVE",
    "NEW_AT_ONCE",
    "ROW",
    "Row",
    "careful_record_of",
    "columns_of",
    "headers_text",
    "insert_values",
    "move_values",
    "moved_columns",
    "new_columns",
    "object_text",
    "record_of",
    "salvaged",
]

Row: TypeAlias = tuple[Any, ...]

_ATTRIBUTES = (*Envelope.__struct_fields__, *Record.__struct_fields__)


def columns_of(fields: Iterable[Field]) -> tuple[str, ...]:
    """Return the columns of a row in the order in which statements read and write them.

    First come `n`, `place_ms`, the lane and the id. The other columns follow in the order of the record's attributes.
    """
    columns = {each.name: each.column.name for each in fields if each.column is not None}
    first = ("n", "place_ms", columns.pop("lane"), "id")
    known = [columns.pop(name) for name in _ATTRIBUTES if name in columns]
    return (*first, *known, *columns.values())


def moved_columns(fields: Collection[Field]) -> tuple[str, ...]:
    """Return the columns that `MOVE` writes: number and place, and the fields of the state."""
    state = {each.column.name for each in fields if each.is_state and each.column is not None}
    return ("n", "place_ms", *(name for name in columns_of(fields) if name in state))


def new_columns(fields: Iterable[Field]) -> tuple[str, ...]:
    """Return the columns that `INSERT_NEW` writes for a put. The later columns get their default values."""
    columns = columns_of(fields)
    return columns[: columns.index("late") + 1]


_COLUMNS, _MOVED, _NEW = columns_of(FIELDS), moved_columns(FIELDS), new_columns(FIELDS)

ROW = ", ".join(f"m.{name}" for name in _COLUMNS)
"""The columns of a SELECT from `messages AS m`, for `record_of`.

The first columns are `n`, `place_ms` and the lane's number.
"""


def _insert(columns: Sequence[str], rows: int = 1) -> str:
    values = f"({', '.join('?' * (len(columns) + 1))})"
    return f"INSERT INTO messages (ns, {', '.join(columns)}) VALUES {', '.join([values] * rows)}"


INSERT = _insert(_COLUMNS)
"""The statement that writes a row. Its parameters are `(ns, *insert_values(...))`."""
INSERT_NEW = _insert(_NEW) + " ON CONFLICT (ns, id) DO NOTHING"
"""The statement that writes the row of a put, unless the id exists. Parameters: `ns`, then the columns up to `late`."""
NEW_AT_ONCE = 50
INSERT_SEVERAL_NEW = _insert(_NEW, NEW_AT_ONCE) + " ON CONFLICT (ns, id) DO NOTHING"
"""`INSERT_NEW` for `NEW_AT_ONCE` rows. It takes an eighth less time than the same rows one by one."""
MOVE = f"UPDATE messages SET {', '.join(f'{name} = ?' for name in _MOVED)} WHERE n = ?"
"""The statement that gives a row a new number, place and state. Parameters: `(*move_values(...), old number)`."""

_json = msgspec.json.Encoder()
_read_headers = msgspec.json.Decoder(dict[str, bytes]).decode
_read_trace = msgspec.json.Decoder(dict[str, str]).decode
_read_rule = msgspec.json.Decoder(dict[str, str | int]).decode
_read_live = msgspec.json.Decoder(tuple[int, ...]).decode
_read_errors = msgspec.json.Decoder(tuple[str, ...]).decode
_READERS: Sequence[tuple[str, Callable[[str], object]]] = (
    ("headers", _read_headers),
    ("trace", _read_trace),
    ("rule", _read_rule),
    ("live", _read_live),
    ("earlier_errors", _read_errors),
)
_KINDS = {each.column.name: each.column.type for each in FIELDS if each.column is not None}
_NUMBERS = tuple(each.column.name for each in FIELDS if each.column is not None and each.type in ("int", "bool"))
_TEXTS = ("id", *(name for name, kind in _KINDS.items() if kind == "TEXT" and name != "encoding"))
_BLOBS = tuple(name for name, kind in _KINDS.items() if kind == "BLOB")
_OPTIONAL_TIMES = ("put_due_ms", "debounced_ms", "appended_due_ms")
_ENCODINGS = frozenset({"", "json", "msgpack", "null"})
_LATE = {int(action): action for action in LateAction}
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_INTEGER = (1 << 48) - 1


def object_text(value: object) -> str:
    """Encode a value as JSON text for a column."""
    return _json.encode(value).decode()


def headers_text(envelope: Envelope) -> str | None:
    """Encode headers for their column as a JSON object of base64, or return None if there are no headers."""
    return object_text(dict(envelope.headers)) if envelope.headers else None


def insert_values(n: int, place_ms: int, lane: int, record: Record) -> Row:
    """Return the parameters of `INSERT`, without the namespace."""
    envelope = record.envelope
    return (
        n,
        place_ms,
        lane,
        envelope.id,
        envelope.address,
        envelope.type,
        envelope.encoding,
        envelope.payload,
        envelope.key,
        headers_text(envelope),
        _trace_text(envelope),
        envelope.version,
        None if envelope.rule is None else object_text(dict(envelope.rule)),
        record.revision,
        record.due_ms,
        record.op,
        record.expires_ms,
        int(record.late),
        *_state(record),
        record.debounced_ms,
        record.appended,
        record.appended_due_ms,
    )


def move_values(n: int, place_ms: int, record: Record) -> Row:
    """Return the parameters of `MOVE`, without the old number."""
    return (
        n,
        place_ms,
        _trace_text(record.envelope),
        record.due_ms,
        record.expires_ms,
        *_state(record),
        record.appended,
        record.appended_due_ms,
    )


def _trace_text(envelope: Envelope) -> str | None:
    return object_text(dict(envelope.trace)) if envelope.trace else None


def _state(record: Record) -> Row:
    return (
        record.attempt,
        record.lapses,
        record.kills,
        int(record.alone),
        int(record.no_retry),
        object_text(record.live) if record.live else None,
        storable_text(record.first_error),
        storable_text(record.last_error),
        object_text(storable_texts(record.earlier_errors)) if record.earlier_errors else None,
        record.put_due_ms,
    )


def record_of(row: Row, lane: Lane) -> Record:
    """Return the record of a row.

    Args:
        row: The columns of `ROW`.
        lane: The name of the row's lane.

    Raises:
        RecordFormatError: Another program has written the row, and it is unreadable.
    """
    (
        _, _, _, id_, address, type_, encoding, payload, key, headers, trace, version, rule, revision, due_ms, op,
        expires_ms, late, attempt, lapses, kills, alone, no_retry, live, first_error, last_error,
        earlier_errors, put_due_ms, debounced_ms, appended, appended_due_ms,
    ) = row  # fmt: skip
    if not (
        type(payload) is type(op) is bytes
        and type(id_) is type(address) is type(type_) is str
        and type(due_ms) is type(revision) is type(expires_ms) is type(attempt) is type(lapses) is type(kills) is int
        and (version is None or (type(version) is int and version >= 0))
        and encoding in _ENCODINGS
        and (put_due_ms is None or type(put_due_ms) is int)
        and (debounced_ms is None or type(debounced_ms) is int)
        and (appended is None or type(appended) is bytes)
        and (appended_due_ms is None or type(appended_due_ms) is int)
    ):
        raise RecordFormatError(_problem(row))
    try:
        return Record(
            Envelope(
                id_,
                lane,
                address,
                type_,
                encoding,
                payload,
                key,
                NO_HEADERS if headers is None else _read_headers(headers),
                NO_TRACE if trace is None else _read_trace(trace),
                version,
                None if rule is None else _read_rule(rule),
            ),
            revision,
            due_ms,
            op,
            expires_ms,
            _LATE[late],
            attempt,
            lapses,
            kills,
            alone != 0,
            no_retry != 0,
            () if live is None else _read_live(live),
            first_error,
            last_error,
            () if earlier_errors is None else _read_errors(earlier_errors),
            None,
            put_due_ms,
            debounced_ms,
            appended,
            appended_due_ms,
        )
    except (msgspec.MsgspecError, TypeError, ValueError, KeyError):
        raise RecordFormatError(_problem(row)) from None


def careful_record_of(row: Row, lane: Lane) -> Record:
    """Return the record of a row after a check of every column. `record_of` does not check all columns.

    Raises:
        RecordFormatError: Another program has written the row, and it is unreadable.
    """
    if _unreadable(row):
        raise RecordFormatError(_problem(row))
    return record_of(row, lane)


def _problem(row: Sequence[Any]) -> str:
    """Return an error text that names the unreadable columns. It does not contain their values."""
    return f"column {', '.join(sorted(_unreadable(row)))} of table messages"


def _unreadable(row: Sequence[Any]) -> set[str]:
    value = dict(zip(_COLUMNS, row, strict=False))
    found = {name for name in _NUMBERS if type(value[name]) is not int}
    found |= {name for name in _TEXTS if value[name] is not None and not _is_text(value[name])}
    found |= {name for name in _BLOBS if value[name] is not None and type(value[name]) is not bytes}
    if value["version"] is not None and (type(value["version"]) is not int or value["version"] < 0):
        found.add("version")
    found |= {name for name in _OPTIONAL_TIMES if value[name] is not None and type(value[name]) is not int}
    if value["encoding"] not in _ENCODINGS:
        found.add("encoding")
    if value["late"] not in _LATE:
        found.add("late")
    for name, read in _READERS:
        try:
            if value[name] is not None:
                read(value[name])
        except (msgspec.MsgspecError, TypeError, ValueError):
            found.add(name)
    return found


def _is_text(value: object) -> bool:
    return type(value) is str and not _SURROGATE.search(value)


def salvaged(row: Sequence[Any], lane: Lane) -> Record:
    """Return a record with the readable columns of a damaged row. The field `last_error` names the unreadable columns.

    If the headers are unreadable, the header `aiodelay-unreadable` has their text.
    """
    value = dict(zip(_COLUMNS, row, strict=False))
    unreadable = _unreadable(row)
    numbers = {
        name: _number(value[name]) for name in ("revision", "due_ms", "expires_ms", "attempt", "lapses", "kills")
    }
    headers = {"aiodelay-unreadable": _as_bytes(value["headers"])} if "headers" in unreadable else None
    return Record(
        Envelope(
            _as_text(value["id"]),
            lane,
            _as_text(value["address"]),
            _as_text(value["type"]),
            "" if "encoding" in unreadable else value["encoding"],
            _as_bytes(value["payload"]),
            None if value["key"] is None else _as_bytes(value["key"]),
            headers or (_read_headers(value["headers"]) if value["headers"] is not None else NO_HEADERS),
            NO_TRACE,
            None if value["version"] is None or "version" in unreadable else value["version"],
            None,
        ),
        numbers["revision"],
        numbers["due_ms"],
        _as_bytes(value["op"])[:8],
        numbers["expires_ms"],
        _LATE.get(value["late"], LateAction.DELIVER),
        min(numbers["attempt"], 65_535),
        min(numbers["lapses"], 255),
        min(numbers["kills"], 255),
        first_error=None if value["first_error"] is None else _as_text(value["first_error"]),
        last_error=f"cannot be read: {_problem(row)}",
        appended=None if value["appended"] is None else _as_bytes(value["appended"]),
    )


def _number(value: object) -> int:
    return min(max(value, 0), _MAX_INTEGER) if isinstance(value, int) else 0


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else str(value)


def _as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "backslashreplace")
