"""Each field is declared once: every place carries a new field, and the check names a place that lacks it."""

from __future__ import annotations

from importlib import import_module

import pytest

from aiodelay.backends.kafka import records
from aiodelay.backends.redis.records.layouts import lua_constants
from aiodelay.backends.sqlite import rows
from aiodelay.core.record_format import FIELDS, PREFIX, Column, Field, body_keys, prefix_of
from aiodelay.core.values import Envelope, Record
from tests.support.record_places import FULL, PLACES, table_of

ADDED = {
    "body": Field(
        path="note",
        type="str | None",
        meaning="a remark",
        body="n",
        column=Column("note", "JSON"),
        is_state=True,
        header="aiodelay-note",
        spark=Column("note", "STRING"),
        json=("note",),
    ),
    "prefix": Field(
        path="pace",
        type="int",
        meaning="how many a second",
        prefix="u16",
        column=Column("pace", "INTEGER"),
        is_state=True,
        header="aiodelay-pace",
        spark=Column("a_second", "INT"),
        json=("pace",),
    ),
    "flag": Field(
        path="envelope.silent",
        type="bool",
        meaning="it is not told of",
        prefix="flag:6",
        column=Column("silent", "INTEGER"),
        header="aiodelay-silent",
        json=("silent",),
    ),
}
"""Fields that nobody has heard of, one for each kind of place in a record."""

FORGOTTEN: dict[tuple[str, str], set[str]] = {
    ("body", "model"): {"record.py: Record has no attribute note"},
    ("body", "codec"): {
        "record_codec.py: _Body has other keys, or the same in another order",
        "record_codec.py: encode_body writes no note",
        "record_codec.py: decode_record reads no note",
    },
    ("body", "lua"): set(),  # scripts leave the keys that they do not know as they are
    ("body", "sqlite"): {
        "sqlite/schema.sql: table messages has no column note JSON",
        "sqlite/schema.sql: trigger schedule_insert leaves note as it was",
        "sqlite/connection.py: LATER_COLUMNS lacks note, which older files do not have",
        "sqlite/rows.py: insert_values gives 31 values for 32 columns",
        "sqlite/rows.py: move_values gives 17 values for 18 columns",
        "sqlite/rows.py: record_of does not read the row as it was written",
        "sqlite/rows.py: _READERS lacks note",
    },
    ("body", "kafka"): {
        "kafka/records.py: encode_record writes no aiodelay-note",
        "kafka/records.py: decode reads no aiodelay-note",
    },
    ("body", "spark"): {"spark/write_settings.py: note is neither written nor left out"},
    ("body", "json"): {
        "json_shapes.py: record_shape writes no note",
        "json_shapes.py: read_record reads no note",
        "service/api/models.py: RecordOut has no note",
    },
    ("body", "docs"): {
        "docs/formats.md: no row | `note` | | `n` | `note` | `aiodelay-note` | `note` | `note` | a remark |",
        "docs/cli.md: the keys of messages lack note",
        "docs/spark/data-source.md: the columns of tables lack note",
    },
    ("prefix", "codec"): {
        "record_codec.py: _PREFIX_READ has another size than the prefix",
        "record_codec.py: encode_record packs 10 numbers",
    },
    ("prefix", "lua"): {
        "redis/lua/record.lua: pack(PREFIX, ...) is given 10 values",
        "redis/lua/record.lua: unpack_bytes(PREFIX, ...) names 10 values",
        "redis/lua/record.lua: unpack_bytes(HEADED, ...) names 11 values",
        "redis/lua/apply.lua: pack(HEADED, ...) is given 11 values",
        "redis/lua/log.lua: pack(PREFIX, ...) is given 10 values",
    },
    ("prefix", "spark"): {
        "spark/columns.py: _SOURCES makes a_second without pace",
        "spark/write_settings.py: a_second is neither written nor left out",
        "record_codec.py: decode_columns reads no pace",
    },
    ("flag", "codec"): {
        "record_codec.py: _flags sets no bit of silent",
        "record_codec.py: decode_record reads no flag of silent",
    },
    ("flag", "lua"): set(),  # a flag is a constant, and nothing more
    ("flag", "sqlite"): {
        "sqlite/schema.sql: table messages has no column silent INTEGER",
        "sqlite/schema.sql: trigger schedule_insert leaves silent as it was",
        "sqlite/connection.py: LATER_COLUMNS lacks silent, which older files do not have",
        "sqlite/rows.py: insert_values gives 31 values for 32 columns",
        "sqlite/rows.py: record_of does not read the row as it was written",
    },
}
"""What a place that is written by hand says of an added field."""


def forgotten(place: str, *added: Field) -> set[str]:
    if place == "spark":
        pytest.importorskip("pyspark")
    return set(PLACES[place]((*FIELDS, *added)))


@pytest.mark.parametrize("place", PLACES)
def test_every_place_carries_every_field(place: str) -> None:
    assert forgotten(place) == set()


@pytest.mark.parametrize(("kind", "place"), FORGOTTEN, ids=map("-".join, FORGOTTEN))
def test_a_place_that_forgets_an_added_field_is_named(kind: str, place: str) -> None:
    assert forgotten(place, ADDED[kind]) == FORGOTTEN[kind, place]


def test_no_field_of_the_sample_has_its_default() -> None:
    """Else a place that never writes a field would look like one that does."""
    default = Record(Envelope("", ""), 0, 0, b"")

    def value(record: Record, field: Field) -> object:
        return getattr(record.envelope if field.path.startswith("envelope.") else record, field.name)

    assert [each.name for each in FIELDS if value(FULL, each) == value(default, each)] == []


# --- what is made from the declaration --------------------------------------------------------------------


def test_an_added_field_arrives_in_the_record() -> None:
    fields = (*FIELDS, *ADDED.values())
    prefix = prefix_of(fields)
    assert (prefix.size, prefix.places["pace"].at, prefix.format) == (PREFIX.size + 2, PREFIX.size, f"{PREFIX.format}H")
    assert prefix.places["version"].at == prefix.size
    assert prefix.flags["silent"].mask == 1 << 6
    assert body_keys(fields) == body_keys(FIELDS) | {"note": "n"}


def test_an_added_field_arrives_in_lua() -> None:
    before, after = lua_constants(FIELDS), lua_constants((*FIELDS, *ADDED.values()))
    assert (after["BODY.NOTE"], after["BODY.NOTE_KEY"], after["FLAG.SILENT"]) == ("'n'", r"'\161n'", "64")
    assert (after["RECORD.PACE_OFFSET"], after["VALUE.PACE_FIRST"], after["VALUE.PACE_LAST"]) == ("34", "41", "42")
    assert (after["RECORD.PREFIX"], after["RECORD.SIZE"], after["VALUE.BODY_FIRST"]) == (
        "'>BBHI6I6I6HBBc8H'",
        "36",
        "43",
    )
    assert before.keys() < after.keys()


def test_an_added_field_arrives_in_sqlite_statements() -> None:
    fields = (*FIELDS, *ADDED.values())
    assert rows.columns_of(fields) == (*rows.columns_of(FIELDS), "note", "pace", "silent")
    assert rows.moved_columns(fields) == (*rows.moved_columns(FIELDS), "note", "pace")


def test_an_added_field_arrives_in_sparks_schema_behind_the_others() -> None:
    pytest.importorskip("pyspark")
    schemas = import_module("aiodelay.spark.schemas")
    before, after = schemas.record_columns(FIELDS), schemas.record_columns((*FIELDS, *ADDED.values()))
    assert list(after.items()) == [*before.items(), ("note", "STRING"), ("a_second", "INT")]


def test_the_headers_of_kafka_are_those_of_the_declaration() -> None:
    assert {each.name: each.header for each in FIELDS if each.header is not None} == records.HEADER


def test_an_added_field_arrives_in_the_table_of_the_page() -> None:
    added = table_of((*FIELDS, ADDED["prefix"])).removeprefix(table_of(FIELDS))
    assert added == ("| `pace` | `u16` | | `pace` | `aiodelay-pace` | `a_second` | `pace` | how many a second |\n")
