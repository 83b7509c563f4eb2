"""The stream of events: every number once, from an exact place to another, even if parts are trimmed or split."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from aiodelay import Scheduler
from aiodelay.backends.redis.sharded.reshard import reshard
from aiodelay.core.values import JournalEntry
from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreUnavailableError, UnsupportedByStoreError
from aiodelay.spark.events import EventReader, _batch, stream_reader_of
from aiodelay.spark.following import EventsLostError
from aiodelay.spark.schemas import EVENTS
from tests.support.journals import note
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer
from tests.support.stores import SHARED_STORES, empty_store

ALL = ReadAllAvailable()
EARLIEST = {"starting": "earliest"}
TYPES = {"STRING": StringType(), "INT": IntegerType(), "BIGINT": LongType(), "TIMESTAMP": TimestampType()}
ALL_COLUMNS = StructType([StructField(name, TYPES[kind]) for name, kind in re.findall(r"([a-z_]+) ([A-Z]+)", EVENTS)])


@pytest.fixture(params=SHARED_STORES, ids=str)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store that keeps 1,000 entries."""
    with empty_store(request.param, tmp_path, "?journal=1000") as url:
        yield url


def reader_of(store: str, columns: StructType | None = None, **options: str) -> EventReader:
    return stream_reader_of({"store": store, "table": "events", **options}, columns or ALL_COLUMNS)


def rows_of(reader: EventReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    """Read what stands between two offsets as executors do: with a copy, piece by piece."""
    elsewhere = pickle.loads(pickle.dumps(reader))
    pieces = pickle.loads(pickle.dumps(reader.partitions(start, end)))
    return [row for piece in pieces for batch in elsewhere.read(piece) for row in batch.to_pylist()]


def numbers_of(reader: EventReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [row["number"] for row in rows_of(reader, start, end)]


def test_offsets_are_exact_and_what_stands_between_two_is_read_again_as_it_was(url: str) -> None:
    asyncio.run(note(url, 1, 30))
    reader = reader_of(url)
    assert reader.initialOffset() == reader.initialOffset() == EARLIEST
    first = reader.latestOffset(EARLIEST, ALL)
    assert first == {"0": 1}
    assert reader.partitions(EARLIEST, first) == []
    second = reader.latestOffset(first, ReadMaxRows(7))
    assert second == {"0": 8}
    assert numbers_of(reader, first, second) == numbers_of(reader, first, second) == [*range(1, 8)]
    end = reader.latestOffset(second, ALL)
    assert end == {"0": 31} == reader.latestOffset(end, ALL)
    row = rows_of(reader, second, end)[0]
    assert (row["partition"], row["number"], row["event"], row["id"]) == (0, 8, "stored", "m8")
    assert (row["lane"], row["attempt"], row["detail"]) == ("work", 0, None)
    assert (row["due_at"] - row["at"]).total_seconds() == 3600
    latest = reader_of(url, startingOffset="latest")
    assert latest.initialOffset() == {"starting": "latest"}
    assert latest.latestOffset(latest.initialOffset(), ReadMaxRows(1)) == {"0": 31}


def test_available_now_ends_where_the_journal_ended_when_it_began(url: str) -> None:
    asyncio.run(note(url, 1, 5))
    reader = reader_of(url)
    reader.prepareForTriggerAvailableNow()
    asyncio.run(note(url, 6, 5))
    assert reader.latestOffset({"0": 1}, ALL) == {"0": 6} == reader.latestOffset({"0": 6}, ALL)


def test_much_is_split_between_tasks_and_only_the_columns_asked_for_are_made(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=1000000"
    asyncio.run(note(url, 1, 50_000))
    reader = reader_of(url, StructType().add("number", LongType()), partitions="2")
    pieces = reader.partitions({"0": 1}, {"0": 50_001})
    assert len(pieces) == 2
    read = [[row for batch in reader.read(piece) for row in batch.to_pylist()] for piece in pieces]
    assert [len(rows) for rows in read] == [25_000, 25_000]
    assert [row for rows in read for row in rows] == [{"number": n} for n in range(1, 50_001)]


def test_text_that_is_no_unicode_is_told_by_its_bytes() -> None:
    odd = JournalEntry(7, 1, "later\udcff", "m\ud800", 0, "work", 2, 0, "")
    names = pa.schema([pa.field(name, pa.string()) for name in ("event", "id", "lane", "detail")])
    (row,) = _batch(0, [odd], names).to_pylist()
    assert row == {"event": r"later\udcff", "id": r"m\ud800", "lane": "work", "detail": None}


def test_what_was_trimmed_unread_is_named_or_gone_on_without(url: str, caplog: pytest.LogCaptureFixture) -> None:
    small = url.replace("journal=1000", "journal=200")
    asyncio.run(note(small, 1, 1500))
    strict, lax = reader_of(small), reader_of(small, failOnDataLoss="false")
    first = strict.latestOffset(EARLIEST, ALL)["0"]
    assert 1 < first <= 1301  # servers trim in nodes of 100
    with pytest.raises(EventsLostError, match=rf"events 1 to {first - 1} of part 0 .* \({first - 1:,} in all\) were"):
        strict.latestOffset({"0": 1}, ALL)
    with pytest.raises(EventsLostError, match=f"events 9 to {first - 1} "):  # found by a task, trimmed after planning
        numbers_of(strict, {"0": 9}, {"0": 1501})
    with pytest.raises(EventsLostError, match="events 3 to 8 "):
        numbers_of(strict, {"0": 3}, {"0": 9})
    assert lax.latestOffset({"0": 1}, ReadMaxRows(10)) == {"0": first + 10}
    assert numbers_of(lax, {"0": 1}, {"0": first + 10}) == [*range(first, first + 10)]
    assert f"events 1 to {first - 1} of part 0" in caplog.text


def test_a_journal_that_is_shorter_than_what_was_read_was_made_anew(url: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(note(url, 1, 5))
    with pytest.raises(EventsLostError, match=r"events 6 to 19 .* created again"):
        reader_of(url).latestOffset({"0": 20}, ALL)
    with pytest.raises(EventsLostError, match=r"events 0 to 6 of part 1 .* created again"):  # with fewer parts
        reader_of(url).latestOffset({"0": 6, "1": 7}, ALL)
    with pytest.raises(ConfigurationError, match="checkpoint is another source's"):
        reader_of(url).latestOffset({"0": 6, "of": "schedules"}, ALL)
    lax = reader_of(url, failOnDataLoss="false")
    assert lax.latestOffset({"0": 20, "1": 7}, ALL) == {"0": 6}
    assert numbers_of(lax, {"0": 20}, {"0": 6}) == [*range(1, 6)]
    assert "created again" in caplog.text


def test_after_a_move_to_more_or_to_fewer_shards_the_stream_goes_on(
    redis_server: RedisServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{redis_server.url}?journal=1000"
    strict = reader_of(url, namespace=namespace)
    lax = reader_of(url, namespace=namespace, failOnDataLoss="false")

    def move(shards: int) -> None:
        asyncio.run(reshard(redis_server.url, namespace, shards, lambda _examined, _of: None))

    asyncio.run(note(url, 1, 20, namespace=namespace))
    before = strict.latestOffset({"0": 1}, ALL)
    assert before == {"0": 21}
    move(4)
    asyncio.run(note(url, 21, 40, namespace=namespace))
    later = strict.latestOffset(before, ALL)
    assert later.keys() == {"0", "1", "2", "3"}
    rows = rows_of(strict, before, later)
    assert {row["id"] for row in rows} == {f"m{n}" for n in range(21, 61)}
    move(2)  # a batch that was planned before must not end the stream for ever
    with pytest.raises(EventsLostError, match=rf"events 1 to {later['2'] - 1} of part 2 .* were trimmed"):
        rows_of(strict, before, later)
    left = [row for row in rows if row["partition"] < 2]
    assert rows_of(lax, before, later) == left
    assert f"events 1 to {later['3'] - 1} of part 3" in caplog.text
    assert lax.latestOffset(later, ALL) == {part: later[part] for part in ("0", "1")}


def test_spark_reads_every_number_once_in_runs_and_tells_clearly_what_is_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=50"
    folder = f"{tmp_path / 'out'}"

    def run(*, loss: str = "true") -> Sequence[int]:
        options = {"store": url, "table": "events", "maxRowsPerBatch": "17", "failOnDataLoss": loss}
        events = spark.readStream.format("aiodelay").options(**options).load()
        writer = events.writeStream.format("parquet").option("checkpointLocation", f"{tmp_path / 'checkpoint'}")
        query = writer.trigger(availableNow=True).start(folder)
        query.awaitTermination()
        return sorted(row.number for row in spark.read.parquet(folder).select("number").collect())

    asyncio.run(note(url, 1, 40))
    assert run() == [*range(1, 41)]
    asyncio.run(note(url, 41, 10))
    assert run() == [*range(1, 51)] == run()
    asyncio.run(note(url, 51, 60))
    with pytest.raises(StreamingQueryException, match="EventsLostError: events 51 to 60 of part 0"):
        run()
    assert run(loss="false") == [*range(1, 51), *range(61, 111)]


def test_kafka_is_read_partition_by_partition_up_to_what_is_committed(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    history = new_name("history")
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=3&history={history}"
    target = asyncio.run(create_topic(kafka, new_name()))
    delivered = asyncio.run(_deliver(url, target, 20))
    reader = reader_of(url)
    first = reader.latestOffset(EARLIEST, ALL)
    assert first == {"0": 0, "1": 0, "2": 0}
    end = reader.latestOffset(first, ALL)
    rows = rows_of(reader, first, end)
    assert Counter(row["event"] for row in rows if row["id"] in delivered) == {"stored": 20, "delivered": 20}
    places = {(row["partition"], row["number"]) for row in rows}
    assert len(places) == len(rows) >= 40
    assert {part for part, _ in places} == {0, 1, 2}
    stepwise, at = list[tuple[int, int]](), first
    while (then := reader.latestOffset(at, ReadMaxRows(10))) != at:
        assert sum(then.values()) - sum(at.values()) <= 10
        stepwise += [(row["partition"], row["number"]) for row in rows_of(reader, at, then)]
        at = then
    assert sorted(stepwise) == sorted(places)
    beyond = {"0": end["0"] + 9, "1": end["1"], "2": end["2"]}
    with pytest.raises(EventsLostError, match=f"events {end['0']} to {end['0'] + 8} of part 0 .* created again"):
        reader.latestOffset(beyond, ALL)
    with pytest.raises(EventsLostError, match="of part 0"):
        numbers_of(reader, end, beyond)
    lax = reader_of(url, failOnDataLoss="false")
    assert len(rows_of(lax, beyond, lax.latestOffset(beyond, ALL))) == sum(row["partition"] == 0 for row in rows)


async def _deliver(url: str, target: str, n: int) -> set[str]:
    """Deliver messages, and return their ids once the history tells of all of them."""
    ids = {f"m{i}" for i in range(n)}
    async with Scheduler(url) as scheduler, asyncio.timeout(60):
        for each in sorted(ids):
            await scheduler.schedule(b"", to=f"kafka:{target}", delay="1ms", id=each)
        while {each.id for each in await scheduler.journal(limit=1000) if each.event == "delivered"} != ids:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.05)
    return ids


def test_bad_options_are_named_before_anything_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=10"
    for options, told in [
        ({"table": "dead"}, "option 'table' is 'dead'; allowed: events"),
        ({"startingOffset": "middle"}, "option 'startingOffset' is 'middle'; allowed: earliest, latest"),
        ({"maxRowsPerBatch": "0"}, "option 'maxRowsPerBatch' is '0'; allowed: an integer from 1"),
        ({"failOnDataLoss": "maybe"}, "option 'failOnDataLoss' is 'maybe'; allowed: true, false"),
        ({"partitions": "none"}, "option 'partitions' is 'none'; allowed: an integer from 1"),
        ({"lane": "a"}, "option is 'lane'; allowed: "),
        ({"store": ""}, "option 'store' is missing"),
        ({"namespace": "a b"}, "namespace is 'a b'"),
    ]:
        with pytest.raises(ConfigurationError, match=told):
            stream_reader_of({"table": "events", "store": url} | options, ALL_COLUMNS)
    told = repr(reader_of("redis://user:secret@127.0.0.1?journal=10")._settings)
    assert "secret" not in told
    assert "user" in told  # as a traceback with variables shows it
    with pytest.raises(ConfigurationError, match="column is 'payload'; allowed: partition, number"):
        reader_of(url, StructType().add("id", StringType()).add("payload", BinaryType()))
    with pytest.raises(ConfigurationError, match="type of column 'at' is string; allowed: timestamp"):
        reader_of(url, StructType().add("at", StringType()))
    for store in (f"sqlite:///{tmp_path / 'delay.db'}", "redis://127.0.0.1", "kafka://127.0.0.1/schedules"):
        with pytest.raises(UnsupportedByStoreError, match="journal is off; allowed: "):
            reader_of(store)
    with pytest.raises(UnsupportedByStoreError, match="memory://"):
        reader_of("memory://?journal=10")


def test_nothing_is_made_where_there_is_no_store(tmp_path: Path, kafka: str) -> None:
    with pytest.raises(StoreUnavailableError, match=r"nowhere\.db"):
        reader_of(f"sqlite:///{tmp_path / 'nowhere.db'}?journal=10").latestOffset(EARLIEST, ALL)
    assert list(tmp_path.iterdir()) == []
    history = new_name("history")
    with pytest.raises(StoreMismatchError, match=f"topic {history} is missing"):
        reader_of(f"kafka://{kafka}/schedules?history={history}").latestOffset(EARLIEST, ALL)
    with pytest.raises(StoreUnavailableError, match=r"redis://user:\*\*\*@127\.0\.0\.1:1"):
        reader_of("redis://user:secret@127.0.0.1:1?journal=10").latestOffset(EARLIEST, ALL)


@pytest.fixture(autouse=True)
def _all_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiodelay.spark")
