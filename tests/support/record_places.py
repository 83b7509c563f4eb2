"""Check the places in code and docs that list the fields of a record: does a place lack a declared field?

Each function of `PLACES` takes a declaration: `FIELDS`, or a copy with one more field. For each place that lacks a
field, it yields one line that begins with the name of the file. If it yields no line, every place has all fields.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import fields as attributes_of
from msgspec.structs import replace

from aiodelay import Every
from aiodelay.backends.kafka import records
from aiodelay.backends.sqlite import commands, rows
from aiodelay.backends.sqlite.connection import LATER_COLUMNS
from aiodelay.core import record_codec
from aiodelay.core.record_format import PREFIX, Field, body_keys, prefix_of
from aiodelay.core.values import DeadLetter, Envelope, LateAction, Record
from aiodelay.errors import AiodelayError
from aiodelay.operations import json_shapes
from aiodelay.recurrence import encode_rule

from .lua_code import LUA, calls, code_of

__all__ = ["FULL", "PLACES", "Fields", "table_of"]

Fields: TypeAlias = Sequence[Field]

DOCS = Path(__file__).parents[2] / "docs"
DUE_MS = 1_924_992_000_123  # not a whole second, so `scheduler-epoch` alone cannot express it
FULL = Record(
    Envelope(
        "m",
        "lane",
        "there",
        "order.placed",
        "json",
        b'{"a": 1}',
        b"key",
        {"h": b"v"},
        {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
        7,
        encode_rule(Every("10m")),
    ),
    revision=DUE_MS - 60_000,
    due_ms=DUE_MS,
    op=bytes(range(1, 9)),
    expires_ms=DUE_MS + 60_000,
    late=LateAction.DROP,
    attempt=3,
    lapses=2,
    kills=1,
    alone=True,
    no_retry=True,
    live=(DUE_MS - 600_000,),
    first_error="first",
    last_error="last",
    earlier_errors=("earlier",),
    traceback="Traceback",
    put_due_ms=DUE_MS - 30_000,
    debounced_ms=DUE_MS - 60_000,
    appended=b'{"a": 2}',
    appended_due_ms=DUE_MS + 30_000,
)
"""A record in which no field has its default."""


def fixed_numbers(fields: Fields) -> int:
    """Return the count of the numbers in the fixed prefix, including format and flags."""
    return len(prefix_of(fields).fixed)


# --- the values and the codec -----------------------------------------------------------------------------


def in_model(fields: Fields) -> Iterator[str]:
    """Compare the attributes of `Record` and `Envelope`."""
    declared = {each.path: each.type for each in fields}
    written = {f"envelope.{name}": kind for name, kind in Envelope.__annotations__.items() if name != "id"}
    written |= {name: kind for name, kind in Record.__annotations__.items() if name != "envelope"}
    written = {path: kind.replace('"', "'") for path, kind in written.items()}
    for path in declared.keys() - written.keys():
        yield f"record.py: {'Envelope' if '.' in path else 'Record'} has no attribute {path.rpartition('.')[2]}"
    for path in written.keys() - declared.keys():
        yield f"record_format.py: FIELDS lacks {path}"
    for path in declared.keys() & written.keys():
        if declared[path] != written[path]:
            yield f"record_format.py: {path} is {written[path]}, not {declared[path]}"


def in_codec(fields: Fields) -> Iterator[str]:
    """Compare the record's bytes."""
    if record_codec._PREFIX_READ.size != prefix_of(fields).size:
        yield "record_codec.py: _PREFIX_READ has another size than the prefix"
    if (packed := len(_call_in(record_codec.encode_record, "pack").args)) != fixed_numbers(fields):
        yield f"record_codec.py: encode_record packs {packed} numbers"
    data = record_codec.encode_record(FULL, 1)
    flags_at, end = PREFIX.places["flags"].at, PREFIX.places["version"].end
    body: dict[str, Any] = msgspec.msgpack.decode(data[end:])
    keys = body_keys(fields)
    if list(keys.values()) != [each.name for each in attributes_of(record_codec._Body)]:
        yield "record_codec.py: _Body has other keys, or the same in another order"
    for name, key in keys.items():
        if key not in body:
            yield f"record_codec.py: encode_body writes no {name}"
        without = {each: value for each, value in body.items() if each != key}
        if _read(data[:end] + msgspec.msgpack.encode(without)) == FULL:
            yield f"record_codec.py: decode_record reads no {name}"
    for name, flag in prefix_of(fields).flags.items():
        if not data[flags_at] & flag.mask:
            yield f"record_codec.py: _flags sets no bit of {name}"
        flipped = bytes([data[flags_at] ^ flag.mask])
        if name not in keys and _read(data[:flags_at] + flipped + data[flags_at + 1 :]) == FULL:
            yield f"record_codec.py: decode_record reads no flag of {name}"


def _read(data: bytes) -> Record | None:
    try:
        return record_codec.decode_record(data, message_id=FULL.id, lane={1: FULL.envelope.lane}.__getitem__)
    except AiodelayError:
        return None


def _call_in(function: Callable[..., Any], name: str) -> ast.Call:
    """Return the only call of this name in the source of a function."""
    nodes = ast.walk(ast.parse(inspect.getsource(function)))
    (found,) = [
        each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == name
    ]
    return found


# --- Redis ------------------------------------------------------------------------------------------------

_FORMATS = {"PREFIX": 0, "HEADED": 1}
"""The names of formats in Lua, and the count of the numbers that each has before the prefix."""


def in_lua(fields: Fields) -> Iterator[str]:
    """Compare the prefix that scripts pack and unpack. Scripts keep body keys that they do not know."""
    wanted = fixed_numbers(fields)
    for name in LUA:
        code = code_of(name)
        for _, (kind, *values) in calls(code, "pack", "struct.pack"):
            if kind in _FORMATS and len(values) != wanted + _FORMATS[kind]:
                yield f"redis/lua/{name}.lua: pack({kind}, ...) is given {len(values)} values"
        for names, kind in re.findall(r"((?:\w+,\s*)+\w+)\s*=\s*unpack_bytes\((PREFIX|HEADED),", code):
            if (count := names.count(",") + 1) != wanted + _FORMATS[kind]:
                yield f"redis/lua/{name}.lua: unpack_bytes({kind}, ...) names {count} values"


# --- SQLite -----------------------------------------------------------------------------------------------

_FIRST_COLUMNS = {
    *("lane", "address", "type", "encoding", "key", "headers", "trace", "version", "rule", "revision", "due_ms", "op"),
    *("expires_ms", "late", "attempt", "lapses", "kills", "alone", "no_retry", "live", "first_error", "last_error"),
    "payload",
}
"""The columns of the record in files of the first version."""
_OF_ROW = {"n", "ns", "id", "place_ms"}
"""The columns of `messages` that are not fields."""


def in_sqlite(fields: Fields) -> Iterator[str]:
    """Compare the table `messages` and its rows."""
    yield from _in_schema({each.column.name: each.column.type for each in fields if each.column is not None})
    written = {
        "rows.py: insert_values": (rows.columns_of(fields), len(rows.insert_values(1, 2, 3, FULL))),
        "rows.py: move_values": (rows.moved_columns(fields), len(rows.move_values(1, 2, FULL))),
        "commands.py: _new_rows": (rows.new_columns(fields), len(_new_row().elts) - 1),
    }
    for where, (columns, count) in written.items():
        if len(columns) != count:
            yield f"sqlite/{where} gives {count} values for {len(columns)} columns"
    row = rows.insert_values(1, 2, 3, FULL)
    row += (None,) * (len(rows.columns_of(fields)) - len(row))
    try:
        is_read = rows.record_of(row, FULL.envelope.lane) == replace(FULL, traceback=None)
    except ValueError:
        is_read = False
    if not is_read:
        yield "sqlite/rows.py: record_of does not read the row as it was written"
    readers = {name for name, _ in rows._READERS}
    for each in fields:
        if each.column is not None and each.column.type == "JSON" and each.column.name not in readers:
            yield f"sqlite/rows.py: _READERS lacks {each.column.name}"


def _in_schema(declared: Mapping[str, str]) -> Iterator[str]:
    schema = files("aiodelay.backends.sqlite").joinpath("schema.sql").read_text(encoding="utf-8")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        found = {name: kind for _, name, kind, *_ in connection.execute("PRAGMA table_info (messages)")}
    for name, kind in declared.items():
        if found.get(name) != kind.replace("JSON", "TEXT"):
            yield f"sqlite/schema.sql: table messages has no column {name} {kind}"
        if name not in _FIRST_COLUMNS and name not in LATER_COLUMNS:
            yield f"sqlite/connection.py: LATER_COLUMNS lacks {name}, which older files do not have"
    for name in found.keys() - declared.keys() - _OF_ROW:
        yield f"record_format.py: FIELDS lacks the column {name}"
    insert = schema.partition("INSERT INTO messages (")[2]
    replaced = insert.partition("ON CONFLICT (ns, id) DO UPDATE SET")[2].partition(";")[0]
    for name in declared.keys() - set(re.findall(r"(\w+) =", replaced)):
        yield f"sqlite/schema.sql: trigger schedule_insert leaves {name} as it was"


def _new_row() -> ast.Tuple:
    (row,) = _call_in(commands._new_rows, "append").args
    assert isinstance(row, ast.Tuple)
    return row


# --- Kafka ------------------------------------------------------------------------------------------------


def in_kafka(fields: Fields) -> Iterator[str]:
    """Compare the headers of the Kafka record of a message."""
    wire = records.encode_record(FULL, read_to=0)
    headers = dict(wire.headers)
    whole = _decoded(headers)
    for each in fields:
        if each.header is None:
            continue
        if each.header not in headers:
            yield f"kafka/records.py: encode_record writes no {each.header}"
        other = {name: value for name, value in headers.items() if name != each.header}
        if _decoded(other if each.header in headers else headers | {each.header: b"1"}) == whole:
            yield f"kafka/records.py: decode reads no {each.header}"


def _decoded(headers: Mapping[str, bytes]) -> Record | None:
    try:
        return records.decode(b"m", FULL.envelope.payload, list(headers.items()), written_ms=0)
    except AiodelayError:
        return None


# --- Spark ------------------------------------------------------------------------------------------------

_OF_TABLE = {"id", "next_attempt_at", "state"}
"""The columns of the Spark table `messages` that are not fields."""


def in_spark(fields: Fields) -> Iterator[str]:
    """Compare the columns of messages and dead letters."""
    columns, schemas = _spark("columns"), _spark("schemas")
    own = {"due_at"} if "due_at TIMESTAMP" in schemas.MESSAGES and "due_at TIMESTAMP" in schemas.DEAD else set()
    both = schemas.record_columns(fields).keys() | own
    of_letters = columns._types_of("dead").keys()
    readable = {name for name, place in PREFIX.places.items() if place.type in ("u16", "u48", "u64?")} | {"late"}
    for each in fields:
        if each.spark is None:
            continue
        name, kind = each.spark
        if name not in (of_letters if each.only_dead else both):
            yield f"spark/schemas.py: no table has {name}"
        if kind.lower().replace(" ", "") not in columns._ARROW:
            yield f"spark/columns.py: _ARROW lacks {kind}"
        if each.name not in (columns._SOURCES[name].needs if name in columns._SOURCES else (name,)):
            yield f"spark/columns.py: _SOURCES makes {name} without {each.name}"
        if each.body is None and each.name not in readable:
            yield f"record_codec.py: decode_columns reads no {each.name}"
        yield from _in_spark_writing(name)
    for name in columns._types_of("messages").keys() - both - _OF_TABLE:
        yield f"record_format.py: FIELDS lacks the Spark column {name}"


def _in_spark_writing(name: str) -> Iterator[str]:
    settings, composing, migrate = _spark("write_settings"), _spark("composing"), _spark("jobs.migrate")
    if name not in settings.COLUMNS and name not in settings.LEFT_OUT:
        yield f"spark/write_settings.py: {name} is neither written nor left out"
    elif name in settings.COLUMNS:
        if f'"{name}"' not in inspect.getsource(composing):
            yield f"spark/composing.py: no put is made of {name}"
        if name not in {*migrate._PARTS, "trace"}:  # a trace context is not compared: it is not part of the message
            yield f"spark/jobs/migrate.py: _PARTS lacks {name}"


def _spark(name: str) -> ModuleType:
    return importlib.import_module(f"aiodelay.spark.{name}")


# --- JSON -------------------------------------------------------------------------------------------------

_NOT_READ = {"bytes", "is_cancelled", "is_last_attempt"}
"""Keys whose values follow from other keys, or from the place of the message in the store."""
_SHAPES = {
    "message_shape": ("cli.export", "cli.messages", "service.api.messages"),
    "dead_letter_shape": ("cli.export", "cli.dead", "service.api.dead"),
}
"""The modules that write messages and dead letters as JSON."""


def in_json(fields: Fields) -> Iterator[str]:
    """Compare the shapes of the API, the command line and an export."""
    letter = DeadLetter(FULL, "rejected", DUE_MS)
    # A key or a payload that is not text has another JSON key.
    binary = replace(FULL, envelope=replace(FULL.envelope, key=b"\xff", payload=b"\xff"), appended=b"\xff")
    written = json_shapes.dead_letter_shape(letter) | json_shapes.dead_letter_shape(
        DeadLetter(binary, "rejected", DUE_MS)
    )
    models = importlib.import_module("aiodelay.service.api.models")
    of_message, of_letter = (_names(models.MessageOut), _names(models.DeadOut))
    declared = {key for each in fields for key in each.json}
    for each in fields:
        for key in each.json:
            if key not in written:
                yield f"json_shapes.py: record_shape writes no {key}"
            if key not in of_letter or key not in of_message | (of_letter if each.only_dead else set()):
                yield f"service/api/models.py: RecordOut has no {key}"
            if not _is_read(key, json_shapes.dead_letter_shape(letter)) and not _is_read(key, written):
                yield f"json_shapes.py: read_record reads no {key}"
    for key in written.keys() - declared - {"id", "reason", "given_up"}:
        yield f"record_format.py: FIELDS lacks the JSON key {key}"
    for key in (of_message | of_letter) - written.keys() - {"state", "next_attempt"}:
        yield f"service/api/models.py: {key} is written by no shape"
    for shape, modules in _SHAPES.items():
        for module in modules:
            if getattr(importlib.import_module(f"aiodelay.{module}"), shape, None) is not getattr(json_shapes, shape):
                yield f"{module.replace('.', '/')}.py: does not write {shape} of json_shapes.py"


def _names(model: type[msgspec.Struct]) -> set[str]:
    return {each.encode_name for each in attributes_of(model)}


def _is_read(key: str, shape: Mapping[str, Any]) -> bool:
    """Return whether a reader of the shape uses the key."""
    return key in _NOT_READ or _read_shape(shape) != _read_shape(
        {name: value for name, value in shape.items() if name != key} if key in shape else {**shape, key: 1}
    )


def _read_shape(shape: Mapping[str, Any]) -> Record | None:
    both = {name for name in ("key", "payload") if {name, f"{name}_base64"} <= shape.keys()}
    try:
        return json_shapes.read_record({name: value for name, value in shape.items() if name not in both})
    except AiodelayError:
        return None


# --- docs -------------------------------------------------------------------------------------------------

_HEADS: Mapping[str, Callable[[Field], str]] = {
    "field": lambda each: _code(each.name),
    "prefix": lambda each: _code(each.prefix),
    "body key": lambda each: _code(each.body),
    "SQLite column": lambda each: _code(each.column and each.column.name),
    "Kafka header": lambda each: _code(each.header),
    "Spark column": lambda each: _code(each.spark and each.spark.name),
    "JSON key": lambda each: ", ".join(map(_code, each.json)),
    "meaning": lambda each: each.meaning,
}


def table_of(fields: Fields) -> str:
    """Return the table of docs/formats.md."""
    heads = f"| {' | '.join(_HEADS)} |\n| {' | '.join('---' for _ in _HEADS)} |\n"
    return heads + "".join(_row(cell(each) for cell in _HEADS.values()) for each in fields)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def in_docs(fields: Fields) -> Iterator[str]:
    """Compare the pages that list fields."""
    formats, cli = (DOCS.joinpath(name).read_text(encoding="utf-8") for name in ("formats.md", "cli.md"))
    for row in table_of(fields).splitlines():
        if f"\n{row}\n" not in formats:
            yield f"docs/formats.md: no row {row}"
    keys = cli.partition("write messages with these keys")[2].partition("\n\n")[0]
    spark = (DOCS / "spark" / "data-source.md").read_text(encoding="utf-8").partition("### Tables")[2]
    for each in fields:
        for key in each.json:
            if f"`{key}`" not in keys:
                yield f"docs/cli.md: the keys of messages lack {key}"
        if each.spark is not None and f"`{each.spark.name}`" not in spark:
            yield f"docs/spark/data-source.md: the columns of tables lack {each.spark.name}"


PLACES: Mapping[str, Callable[[Fields], Iterable[str]]] = {
    "model": in_model,
    "codec": in_codec,
    "lua": in_lua,
    "sqlite": in_sqlite,
    "kafka": in_kafka,
    "spark": in_spark,
    "json": in_json,
    "docs": in_docs,
}
