"""Options of `format("aiodelay")` for writing: the driver reads them and names a wrong option in its error."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from aiodelay.errors import ConfigurationError, TargetError
from aiodelay.operations.spark_options import (
    ColdCancelOptions,
    ColdPutOptions,
    EngineOptions,
    MigrateOptions,
    StoreOptions,
)
from aiodelay.spark.options import store_url
from aiodelay.spark.write_settings import WriteSettings, read_settings


def test_a_store_is_named_by_url_variable_or_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORE", "redis://:secret@host\n")
    secret = tmp_path / "store"
    secret.write_text("redis://:other@host\n")
    assert store_url("redis://host") == "redis://host"
    assert store_url("env:STORE") == "redis://:secret@host"
    assert store_url(f"file:{secret}") == "redis://:other@host"


def test_a_missing_variable_or_file_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigurationError, match="'env:NO_SUCH'"):
        store_url("env:NO_SUCH")
    with pytest.raises(ConfigurationError, match="absent"):
        store_url(f"file:{tmp_path / 'absent'}")
    with pytest.raises(ConfigurationError, match="empty"):
        store_url(f"file:{empty}")


TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "map<string,int>": MapType(StringType(), IntegerType()),
}
OPTIONS = {"store": "redis://:secret@host", "to": "redis-list:orders"}
FRAME = "id string, due_at timestamp, payload binary"


def settings(columns: str = FRAME, **given: str) -> WriteSettings:
    return read_settings(OPTIONS | given, schema_of(columns))


def schema_of(columns: str) -> StructType:
    fields = [column.rpartition(" ") for column in columns.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, _, kind in fields])


def test_options_have_defaults_and_their_names_know_no_case() -> None:
    found = settings()
    assert (found.namespace, found.conflict, found.rate, found.batch_rows) == ("default", "insert", 20_000, 500)
    assert (found.max_payload, found.patience_ms, found.timezone) == (262_144, 60_000, None)
    found = settings(RATE="80", Concurrency="4", BATCHROWS="7", timeout="2s", checkpointlocation="/tmp/c")
    assert (found.task_rate, found.batch_rows, found.patience_ms) == (20, 7, 2_000)
    assert settings(checkpointLocation="/tmp/c", queryName="Spark's own") == settings()
    assert "secret" not in repr(found)


def test_the_text_of_a_jobs_options_has_no_url() -> None:
    url = "redis://:secret@host"
    options: list[object] = [
        StoreOptions(store=url),
        EngineOptions(source=url, checkpoint="c", to=url),
        MigrateOptions(source=url, target=url, cutover=datetime(2027, 1, 1, tzinfo=UTC), work="w"),
        ColdPutOptions(tier="t", store=url),
        ColdCancelOptions(tier="t", store=url),
    ]
    assert [each for each in map(repr, options) if "secret" in each] == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"store": ""}, "option 'store' is missing"),
        ({"store": "http://host"}, "'http'"),
        ({"store": "memory:"}, "other processes see"),
        ({"store": "kafka://host/topic"}, "takes messages in bulk"),
        ({"namespace": "a b"}, "namespace is 'a b'"),
        ({"table": "dead"}, "option 'table' is 'dead'"),
        ({"conflict": "replace"}, "option 'conflict' is 'replace'; allowed: insert, newer"),
        ({"conflict": "debounce:5s"}, "option 'conflict' is 'debounce:5s'; allowed: insert, newer"),
        ({"conflict": "newer"}, "column 'version' is missing"),
        ({"to": ""}, "column 'to' is missing"),
        ({"to": "orders"}, "to is 'orders'"),
        ({"to": "handler:a b"}, "the handler name in to="),
        ({"rate": "-1"}, "option 'rate' is '-1'"),
        ({"concurrency": "0"}, "option 'concurrency' is '0'"),
        ({"batchRows": "501"}, "option 'batchRows' is '501'"),
        ({"timezone": "Nowhere"}, "option 'timezone' is 'Nowhere'"),
        ({"timeout": "soon"}, "option 'timeout' is 'soon'"),
        ({"rates": "1"}, "option is 'rates'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(given: dict[str, str], told: str) -> None:
    with pytest.raises((ConfigurationError, TargetError)) as found:
        settings(**given)
    assert told in str(found.value)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("id string, due_at timestamp", "column 'payload' is missing among id, due_at"),
        ("due_at timestamp, payload binary", "column 'id' is missing"),
        ("id string, payload binary", "column 'due_at' is missing"),
        ("id bigint, due_at timestamp, payload binary", "column 'id' is of type bigint; allowed: string"),
        ("id string, due_at string, payload binary", "column 'due_at' is of type string"),
        ("id string, due_at timestamp_ntz, payload binary", "give the option 'timezone'"),
        (f"{FRAME}, headers map<string,int>", "column 'headers' is of type map<string,int>"),
        (f"{FRAME}, topic string", "column is 'topic'"),
        (f"{FRAME}, spread string", "column is 'spread'; allowed: a later due_at, such as timestampadd("),
        (
            f"{FRAME}, conflict string",
            "column is 'conflict'; allowed: the option conflict for all rows: insert, or newer",
        ),
        (f"{FRAME}, ID string", "column 'id' is given twice"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(columns: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        settings(columns)
    assert told in str(found.value)


def test_overwrite_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"save mode is overwrite; allowed: mode\('append'\)"):
        read_settings(OPTIONS, schema_of(FRAME), overwrite=True)


def test_local_times_need_a_zone() -> None:
    assert (
        settings("id string, due_at timestamp_ntz, payload binary", timezone="Europe/Paris").timezone == "Europe/Paris"
    )
