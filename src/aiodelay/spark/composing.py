"""Conversion of Arrow rows into puts, column by column, for tasks that write to a store.

A check runs on the whole column where possible. It runs on single rows only if a value of the column may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from aiodelay.core.durations import MAX_HORIZON_MS, check_horizon
from aiodelay.core.recurrence import Rule, encode_rule, placed
from aiodelay.core.transitions import NO_OP
from aiodelay.core.validation import (
    MAX_ID_BYTES,
    check_headers,
    check_id,
    check_key,
    check_payload_size,
    check_type_name,
)
from aiodelay.core.values import MAX_CLAIM_BYTES, NO_HEADERS, NO_TRACE, At, Conflict, Envelope, Late, LateAction, Put
from aiodelay.errors import ConfigurationError, InputError, PayloadTypeError, ScheduleTimeError, TargetError, shortened
from aiodelay.operations.json_shapes import read_rule

from .write_settings import WriteSettings, destination_of

__all__ = ["parts_of", "puts_of"]

T = TypeVar("T")
R = TypeVar("R")

_FIRST_VERSION = 0
_SUSPECT_ID = r"[\x00-\x1f\x7f-\x{9f}\x{2028}\x{2029}]|~[0-9]{10}"
_LATE = {action.name.lower(): action for action in LateAction}
_ENCODINGS = ("", "json", "msgpack", "null")


def parts_of(batch: pa.RecordBatch, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch into parts that fit into one call to a store: at most `most_rows` rows, and not too many bytes."""
    row_bytes = max(batch.nbytes // max(batch.num_rows, 1), 1)
    rows = max(min(most_rows, MAX_CLAIM_BYTES // row_bytes), 1)
    for at in range(0, batch.num_rows, rows):
        yield batch.slice(at, rows)


def puts_of(batch: pa.RecordBatch, settings: WriteSettings, now_ms: int) -> list[Put]:
    """Return a put for each row of a batch.

    Args:
        batch: Rows with the columns that the settings name, in that order.
        settings: The defaults for missing columns, and the limits.
        now_ms: The store's time, against which due times are checked.

    Raises:
        InputError: A row cannot be a message. The error names the column, the id, the value and the allowed values.
    """
    columns = dict(zip(settings.columns, batch.columns, strict=True))
    return _Rows(columns, settings).puts(now_ms)


class _Rows:
    """The columns of one batch. Each method returns one part of the puts, with a value for each row."""

    def __init__(self, columns: Mapping[str, pa.Array], settings: WriteSettings) -> None:
        self._columns, self._settings = columns, settings
        self._ids = _ids(columns["id"])

    def puts(self, now_ms: int) -> list[Put]:
        dues = self._dues(now_ms)
        lanes, addresses = self._destinations()
        encodings, keys = self._encodings(), self._keys()
        versions, conflicts = self._versions()
        envelopes = map(
            Envelope,
            self._ids,
            lanes,
            addresses,
            self._types(lanes, addresses),
            encodings,
            self._payloads(encodings, keys),
            keys,
            self._read("headers", _headers, NO_HEADERS),
            self._read("trace", _trace, NO_TRACE),
            versions,
            self._rules(),
        )
        return list(map(Put, repeat(NO_OP), envelopes, map(At, dues), conflicts, self._lates(dues)))

    def _each(self, values: Iterable[T], read: Callable[[T], R]) -> list[R]:
        """Read the value of each row; an error names the id of the row."""
        found: list[R] = []
        try:
            found.extend(map(read, values))
        except InputError as error:
            raise type(error)(error.field, error.value, error.allowed, self._ids[len(found)]) from None
        return found

    def _read(self, name: str, read: Callable[[Any], R], default: R) -> list[R]:
        """Read a column; null values, and all values of a missing column, become the default."""
        column = self._columns.get(name)
        if column is None or column.null_count == len(column):
            return [default] * len(self._ids)
        return self._each(_values(name, column), lambda value: default if value is None else read(value))

    def _dues(self, now_ms: int) -> list[int]:
        dues = self._times("due_at")
        if self._columns["due_at"].null_count or max(dues) > now_ms + MAX_HORIZON_MS or min(dues) < 0:
            self._each(dues, lambda due_ms: _checked_due(due_ms, now_ms))
        return dues

    def _times(self, name: str) -> list[Any]:
        """Return a column of times in epoch ms, rounded up so that no message is early."""
        column = self._columns[name]
        if column.type.tz is None:  # a local time may exist twice or never: the later instant is never early
            column = pc.assume_timezone(column, self._settings.timezone, ambiguous="latest", nonexistent="latest")
        return [None if us is None else -(-us // 1000) for us in column.cast(pa.int64()).to_pylist()]

    def _destinations(self) -> tuple[Sequence[str], Sequence[str]]:
        if "to" not in self._columns:
            lane, address = _destination(self._settings.to)
            return [lane] * len(self._ids), [address] * len(self._ids)
        default = self._settings.to
        given = _values("to", self._columns["to"])
        pairs = self._each(given, lambda to: _destination(default if to is None else to))
        return [lane for lane, _ in pairs], [address for _, address in pairs]

    def _types(self, lanes: Sequence[str], addresses: Sequence[str]) -> Sequence[str]:
        if "type" not in self._columns:
            return [""] * len(self._ids)
        types = self._read("type", _type, "")
        named = zip(types, lanes, addresses, strict=True)
        return ["" if type_ == lane and not address else type_ for type_, lane, address in named]

    def _encodings(self) -> Sequence[Any]:
        found = self._read("encoding", _encoding, None)
        payload = self._columns["payload"]
        if not payload.null_count:
            return [each or "" for each in found] if "encoding" in self._columns else [""] * len(found)
        nulls = payload.is_null().to_pylist()
        return [each or ("null" if is_null else "") for each, is_null in zip(found, nulls, strict=True)]

    def _keys(self) -> Sequence[bytes | None]:
        return self._read("key", lambda key: check_key(_bytes(key)), None)

    def _payloads(self, encodings: Sequence[str], keys: Sequence[bytes | None]) -> Sequence[bytes]:
        column = self._columns["payload"]
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
        payloads: list[bytes] = column.to_pylist()
        if column.null_count or "encoding" in self._columns:
            rows = zip(payloads, encodings, keys, strict=True)
            payloads = self._each(rows, lambda row: _payload(*row))
        most = self._settings.max_payload
        if (pc.max(pc.binary_length(column)).as_py() or 0) > most:
            self._each(payloads, lambda payload: _sized(payload, most))
        return payloads

    def _rules(self) -> Sequence[Mapping[str, str | int] | None]:
        given = self._read("rule", _rule, None)
        return [
            None if rule is None else encode_rule(placed(rule, message_id))
            for rule, message_id in zip(given, self._ids, strict=True)
        ]

    def _versions(self) -> tuple[Iterable[int], Iterable[Conflict]]:
        """Return versions and conflict rules. With `insert` all rows have version 0, so any stored version is kept."""
        if self._settings.conflict == "insert":
            return repeat(_FIRST_VERSION), repeat(Conflict.newer(_FIRST_VERSION))
        given = self._columns["version"].to_pylist()
        return given, self._each(given, _newer)

    def _lates(self, dues: Sequence[int]) -> Iterable[Late]:
        if "late" not in self._columns and "expires_at" not in self._columns:
            return repeat(Late.deliver())
        actions = self._read("late", _late_action, None)
        expiries = self._times("expires_at") if "expires_at" in self._columns else [None] * len(dues)
        return self._each(zip(actions, expiries, dues, strict=True), lambda row: _late(*row))


# --- one value --------------------------------------------------------------------------------------------


def _ids(column: pa.Array) -> list[str]:
    if column.null_count:
        raise InputError("id", "null", f"1 to {MAX_ID_BYTES} bytes of UTF-8")
    ids: list[str] = _values("id", column)
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    is_fine = ids and lengths["min"] > 0 and lengths["max"] <= MAX_ID_BYTES
    if not is_fine or pc.any(pc.match_substring_regex(column, _SUSPECT_ID)).as_py():
        for message_id in ids:
            check_id(message_id)
    return ids


def _values(name: str, column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return] # pyarrow has no types
    except UnicodeDecodeError as error:
        raise InputError(f"column {name!r}", f"not UTF-8 ({error.reason})", "text") from None


def _checked_due(due_ms: int | None, now_ms: int) -> None:
    if due_ms is None:
        raise ScheduleTimeError("due_at", "null", "a time")
    if due_ms < 0:
        raise ScheduleTimeError("due_at", "before 1970", "a time from 1970 on; a message with a past time is due now")
    check_horizon(due_ms, now_ms, "due_at")


def _destination(to: str | None) -> tuple[str, str]:
    if to is None:
        raise TargetError("to", "null", "'<sink>:<address>', or the option 'to' for rows without a destination")
    return destination_of(to)


def _type(name: str) -> str:
    try:
        return check_type_name(name, "type")
    except ConfigurationError as error:
        raise InputError("type", error.value, error.allowed) from None


def _headers(given: Sequence[tuple[str, bytes | str]]) -> Mapping[str, bytes]:
    return check_headers({name: value if value is None else _bytes(value) for name, value in given})


def _trace(given: Sequence[tuple[str, str | None]]) -> Mapping[str, str]:
    trace = dict(given)
    if None in trace.values():
        raise InputError("trace", "a map with a null value", "text for each name")
    return cast("Mapping[str, str]", trace)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _rule(text: str) -> Rule:
    try:
        given = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        raise ScheduleTimeError("rule", shortened(text), 'JSON such as {"interval": "10m"}') from None
    return read_rule(given)


def _encoding(text: str) -> str:
    if text not in _ENCODINGS:
        raise PayloadTypeError("encoding", shortened(text), "'', 'json', 'msgpack' or 'null'")
    return text


def _payload(payload: bytes | None, encoding: str, key: bytes | None) -> bytes:
    if encoding != "null":
        if payload is None:
            raise PayloadTypeError("payload", "null", f"bytes, which the encoding {encoding!r} needs")
        return payload
    if payload or key is None:
        got = f"{len(payload)} bytes with the encoding 'null'" if payload else "null, and the key is null too"
        raise PayloadTypeError("payload", got, "null if the row has a key, for a message without a value")
    return b""


def _sized(payload: bytes, most: int) -> None:
    check_payload_size(payload, most)


def _newer(version: int | None) -> Conflict:
    if version is None or version < 0:
        raise InputError("version", shortened(version), "an integer from 0 to 2**63-1")
    return Conflict.newer(version)


def _late_action(text: str) -> LateAction:
    if text not in _LATE:
        raise InputError("late", shortened(text), ", ".join(_LATE))
    return _LATE[text]


def _late(action: LateAction | None, expires_ms: int | None, due_ms: int) -> Late:
    if (expires_ms is None) != (action in (None, LateAction.DELIVER)):
        given = "given without expires_at" if expires_ms is None else "missing or 'deliver', but expires_at is given"
        raise InputError("late", given, "drop or dead_letter together with expires_at, or neither of the two columns")
    if action is None or expires_ms is None:
        return Late.deliver()
    return Late(action, max(expires_ms - due_ms, 0))
