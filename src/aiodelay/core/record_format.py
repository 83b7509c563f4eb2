"""The declaration of a record's fields, with the name and position of each field in bytes, tables, headers and JSON.

The codec, the constants of Redis' scripts, SQLite's statements, Kafka's headers and Spark's schemas are made from
`FIELDS`. Other places list the fields by hand. tests/unit/test_record_places.py compares each of them with `FIELDS`,
and names the places where a new field is missing. docs/formats.md has the same table for readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

__all__ = ["FIELDS", "FORMAT_VERSION", "PREFIX", "Column", "Field", "Flag", "Place", "Prefix", "body_keys", "prefix_of"]

FORMAT_VERSION = 1


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: The name of the column.
        type: The type in the table's language; `JSON` is text in SQLite.
    """

    name: str
    type: str


class Field(Struct, frozen=True, kw_only=True):
    """One field of a record, with its form in bytes, tables, headers and JSON.

    If the field is absent from one of these forms, the attribute for this form is None or empty.

    Attributes:
        path: The attribute of `Record`, such as `attempt`, or of the record's envelope, such as `envelope.key`.
        type: The type of that attribute, as the class declares it.
        meaning: One line for docs/formats.md.
        prefix: The format in the fixed prefix: `u8`, `u16`, `u48`, `8s` or `flag:<bits>`. A `u64?:<bit>` follows the
            prefix if this bit of the flags is set.
        body: The key in the MessagePack body, one letter. The body omits a field with its default value.
        column: The column of the SQLite table `messages`.
        is_state: Whether a settlement, a lapse, a reschedule or a fire may change the field while the message lives.
        only_dead: Whether only dead letters have the field. SQLite stores dead letters as bytes, so the field has no
            column.
        header: The header of a Kafka record. The payload and the caller's headers are those of the Kafka record itself.
        spark: The column of the Spark tables `messages` and `dead`.
        json: The keys of the field in the JSON of the API, the command line and an export.
    """

    path: str
    type: str
    meaning: str
    prefix: str | None = None
    body: str | None = None
    column: Column | None = None
    is_state: bool = False
    only_dead: bool = False
    header: str | None = None
    spark: Column | None = None
    json: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the attribute. All code uses it as the name of the field."""
        return self.path.rpartition(".")[2]


FIELDS: tuple[Field, ...] = (
    Field(
        path="envelope.lane",
        type="Lane",
        meaning="number of the lane, from the store's table of lanes",
        prefix="u16",
        column=Column("lane", "INTEGER"),
        header="aiodelay-lane",
        spark=Column("to", "STRING"),
        json=("to",),
    ),
    Field(
        path="revision",
        type="int",
        meaning="epoch ms of the put, unique and growing per id",
        prefix="u48",
        column=Column("revision", "INTEGER"),
        header="aiodelay-revision",
        spark=Column("revision", "BIGINT"),
        json=("revision",),
    ),
    Field(
        path="due_ms",
        type="int",
        meaning="epoch ms before which it is not delivered",
        prefix="u48",
        column=Column("due_ms", "INTEGER"),
        is_state=True,
        header="aiodelay-due-ms",
        spark=Column("due_at", "TIMESTAMP"),
        json=("due",),
    ),
    Field(
        path="expires_ms",
        type="int",
        meaning="epoch ms after which a claim is late; 0 = never",
        prefix="u48",
        column=Column("expires_ms", "INTEGER"),
        is_state=True,
        header="aiodelay-expires-ms",
        spark=Column("expires_at", "TIMESTAMP"),
        json=("late",),
    ),
    Field(
        path="attempt",
        type="int",
        meaning="runs that finished",
        prefix="u16",
        column=Column("attempt", "INTEGER"),
        is_state=True,
        header="aiodelay-attempt",
        spark=Column("attempt", "INT"),
        json=("attempt",),
    ),
    Field(
        path="lapses",
        type="int",
        meaning="leases that ended unsettled, in a row, outside trials",
        prefix="u8",
        column=Column("lapses", "INTEGER"),
        is_state=True,
        header="aiodelay-lapses",
        json=("lapses",),
    ),
    Field(
        path="kills",
        type="int",
        meaning="processes that ended while they tried this message alone",
        prefix="u8",
        column=Column("kills", "INTEGER"),
        is_state=True,
        header="aiodelay-kills",
        json=("kills",),
    ),
    Field(
        path="op",
        type="bytes",
        meaning="the command that wrote this revision",
        prefix="8s",
        column=Column("op", "BLOB"),
        header="aiodelay-op",
    ),
    Field(
        path="envelope.version",
        type="int | None",
        meaning="the caller's version, if it gave one",
        prefix="u64?:5",
        column=Column("version", "INTEGER"),
        header="aiodelay-version",
        spark=Column("version", "BIGINT"),
        json=("version",),
    ),
    Field(
        path="alone",
        type="bool",
        meaning="the current claim tries this message alone",
        prefix="flag:1",
        column=Column("alone", "INTEGER"),
        is_state=True,
    ),
    Field(
        path="no_retry",
        type="bool",
        meaning="cancelled in flight: no retry, no recurrence",
        prefix="flag:2",
        column=Column("no_retry", "INTEGER"),
        is_state=True,
        header="aiodelay-no-retry",
        json=("is_cancelled", "is_last_attempt"),
    ),
    Field(
        path="late",
        type="LateAction",
        meaning="what a late claim does: 0 deliver, 1 drop, 2 dead letter",
        prefix="flag:3-4",
        column=Column("late", "INTEGER"),
        header="aiodelay-late",
        spark=Column("late", "STRING"),
        json=("late",),
    ),
    Field(
        path="envelope.payload",
        type="bytes",
        meaning="the bytes to deliver",
        body="p",
        column=Column("payload", "BLOB"),
        spark=Column("payload", "BINARY"),
        json=("payload", "payload_base64", "bytes"),
    ),
    Field(
        path="envelope.key",
        type="bytes | None",
        meaning="the sink's message key",
        body="k",
        column=Column("key", "BLOB"),
        header="scheduler-target-key",
        spark=Column("key", "BINARY"),
        json=("key", "key_base64"),
    ),
    Field(
        path="envelope.headers",
        type="Mapping[str, bytes]",
        meaning="the caller's headers",
        body="h",
        column=Column("headers", "JSON"),
        spark=Column("headers", "MAP<STRING, BINARY>"),
        json=("headers",),
    ),
    Field(
        path="envelope.trace",
        type="Mapping[str, str]",
        meaning="trace context of the span that scheduled it, see below",
        body="c",
        column=Column("trace", "JSON"),
        is_state=True,
        header="aiodelay-trace",
        spark=Column("trace", "MAP<STRING, STRING>"),
        json=("trace",),
    ),
    Field(
        path="envelope.type",
        type="str",
        meaning="the event's stable type name, where it is not the lane",
        body="t",
        column=Column("type", "TEXT"),
        header="aiodelay-type",
        spark=Column("type", "STRING"),
        json=("type",),
    ),
    Field(
        path="envelope.encoding",
        type="Literal['', 'json', 'msgpack', 'null']",
        meaning="how the payload is written: json, msgpack, or raw bytes",
        body="e",
        column=Column("encoding", "TEXT"),
        header="aiodelay-encoding",
        spark=Column("encoding", "STRING"),
        json=("encoding",),
    ),
    Field(
        path="envelope.address",
        type="str",
        meaning="where in the sink",
        body="a",
        column=Column("address", "TEXT"),
        header="aiodelay-address",
        spark=Column("to", "STRING"),
        json=("to",),
    ),
    Field(
        path="envelope.rule",
        type="Mapping[str, str | int] | None",
        meaning="recurrence rule; bit 0 says that there is one",
        prefix="flag:0",
        body="r",
        column=Column("rule", "JSON"),
        header="aiodelay-rule",
        spark=Column("rule", "STRING"),
        json=("every",),
    ),
    Field(
        path="live",
        type="tuple[int, ...]",
        meaning="due times of a series' occurrences that are being retried",
        body="l",
        column=Column("live", "JSON"),
        is_state=True,
        header="aiodelay-live",
        json=("retrying",),
    ),
    Field(
        path="first_error",
        type="str | None",
        meaning="the first failed attempt's error",
        body="f",
        column=Column("first_error", "TEXT"),
        is_state=True,
        header="aiodelay-first-error",
        spark=Column("first_error", "STRING"),
        json=("first_error",),
    ),
    Field(
        path="last_error",
        type="str | None",
        meaning="the last failed attempt's error",
        body="g",
        column=Column("last_error", "TEXT"),
        is_state=True,
        header="aiodelay-last-error",
        spark=Column("last_error", "STRING"),
        json=("last_error",),
    ),
    Field(
        path="earlier_errors",
        type="tuple[str, ...]",
        meaning="errors before the last one, oldest first, at most 4; a repeated error is kept once",
        body="j",
        column=Column("earlier_errors", "JSON"),
        is_state=True,
        header="aiodelay-earlier-errors",
        json=("earlier_errors",),
    ),
    Field(
        path="traceback",
        type="str | None",
        meaning="of a dead letter: its last attempt's traceback, cut to 8 KiB",
        body="b",
        is_state=True,
        only_dead=True,
        header="aiodelay-traceback",
        spark=Column("traceback", "STRING"),
        json=("traceback",),
    ),
    Field(
        path="put_due_ms",
        type="int | None",
        meaning="due time of the put, if it was rescheduled or fired since: part of the delivery id",
        body="d",
        column=Column("put_due_ms", "INTEGER"),
        is_state=True,
        header="aiodelay-put-due-ms",
        json=("delivery_id",),
    ),
    Field(
        path="debounced_ms",
        type="int | None",
        meaning="of a debounced message: epoch ms of the first call of its burst",
        body="w",
        column=Column("debounced_ms", "INTEGER"),
        header="aiodelay-debounced-ms",
        json=("debounced_since",),
    ),
    Field(
        path="appended",
        type="bytes | None",
        meaning="of a message in flight: the items that came since its claim, joined by newlines",
        body="i",
        column=Column("appended", "BLOB"),
        is_state=True,
        header="aiodelay-appended",
        json=("appended", "appended_base64"),
    ),
    Field(
        path="appended_due_ms",
        type="int | None",
        meaning="due time of these items, if they become a message of their own",
        body="m",
        column=Column("appended_due_ms", "INTEGER"),
        is_state=True,
        header="aiodelay-appended-due-ms",
        json=("appended_due",),
    ),
)
"""First the numbers of the prefix in the order of their bytes, then the keys of the body in their written order."""


# --- the prefix -------------------------------------------------------------------------------------------

_NUMBERS = {"u8": ("B", 1), "u16": ("H", 2), "u48": ("6s", 6), "8s": ("8s", 8)}
"""For each type of the fixed prefix: the format of Python's `struct`, and the size in bytes."""
_OPTIONAL, _OPTIONAL_BYTES = "u64?", 8
_FIRST = {"format": "u8", "flags": "u8"}
"""The numbers at the beginning of every prefix, before the numbers of fields."""


class Place(NamedTuple):
    """The place of a number in a record.

    Attributes:
        at: Bytes from the beginning of the record.
        size: The size in bytes.
        type: The type, as `Field.prefix` names it.
    """

    at: int
    size: int
    type: str

    @property
    def end(self) -> int:
        """The place where the next number begins."""
        return self.at + self.size


class Flag(NamedTuple):
    """The bits of one flag. `mask` selects these bits; `shift` is the number of the lowest bit."""

    shift: int
    mask: int


class Prefix(Struct, frozen=True):
    """The fixed part at the beginning of a record.

    Attributes:
        format: The format for Python's `struct`.
        size: The size in bytes.
        places: The place of each number, by field, also of a number that follows the prefix only if a flag is set.
        flags: The bits of each flag, by field.
    """

    format: str
    size: int
    places: Mapping[str, Place]
    flags: Mapping[str, Flag]

    @property
    def fixed(self) -> dict[str, Place]:
        """The numbers that every record has, with their places."""
        return {name: place for name, place in self.places.items() if place.type != _OPTIONAL}


def prefix_of(fields: Sequence[Field]) -> Prefix:
    """Return the prefix that holds these fields."""
    kinds = _FIRST | {each.name: each.prefix for each in fields if each.prefix is not None and each.prefix in _NUMBERS}
    places: dict[str, Place] = {}
    size = 0
    for name, kind in kinds.items():
        places[name] = Place(size, _NUMBERS[kind][1], kind)
        size = places[name].end
    flags: dict[str, Flag] = {}
    for field in fields:
        kind, colon, bits = (field.prefix or "").partition(":")
        if colon:
            flags[field.name] = _flag(bits)
        if kind == _OPTIONAL:
            places[field.name] = Place(size, _OPTIONAL_BYTES, kind)
    return Prefix(">" + "".join(_NUMBERS[kind][0] for kind in kinds.values()), size, places, flags)


def _flag(bits: str) -> Flag:
    first, _, last = bits.partition("-")
    low, high = int(first), int(last or first)
    return Flag(low, sum(1 << bit for bit in range(low, high + 1)))


PREFIX = prefix_of(FIELDS)


# --- the body ---------------------------------------------------------------------------------------------


def body_keys(fields: Iterable[Field]) -> dict[str, str]:
    """Return the keys of the body by field, in the order in which they are written."""
    return {each.name: each.body for each in fields if each.body is not None}
