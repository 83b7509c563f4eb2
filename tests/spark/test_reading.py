"""Reading tables of real stores in parts, as executors do: every row once, as written, with no change."""

from __future__ import annotations

import asyncio
import json
import pickle
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringContains,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.table_scan import BATCH_BYTES
from aiodelay.core.values import (
    Again,
    At,
    Cancel,
    Claim,
    Conflict,
    Dead,
    Demand,
    Done,
    Envelope,
    Fire,
    Late,
    Put,
    Reschedule,
    Settlement,
)
from aiodelay.operations.json_shapes import read_rule
from aiodelay.ports import Store
from aiodelay.recurrence import Cron, encode_rule
from aiodelay.spark.columns import _types_of
from aiodelay.spark.reading import PushingReader, Reader, reader_of
from tests.support.servers import redis_products, serving
from tests.support.stores import SHARED_STORES, empty_store

T = TypeVar("T")
TYPES = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
    "array<string>": ArrayType(StringType()),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
}
DUE_MS = 1_924_992_000_000
DUE = datetime(2031, 1, 1, tzinfo=UTC)
assert DUE.timestamp() * 1000 == DUE_MS


@pytest.fixture(params=SHARED_STORES, ids=str)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store."""
    with empty_store(request.param, tmp_path) as url:
        yield url


def schema_of(table: str, *columns: str) -> StructType:
    types = _types_of(table)  # type: ignore[arg-type]
    return StructType([StructField(name, TYPES[types[name]]) for name in columns or types])


def reader(store: str, *columns: str, table: str = "messages", **options: str) -> Reader:
    found = reader_of({"store": store, "table": table, **options}, schema_of(table, *columns))
    assert isinstance(found, Reader)
    return found


def parts_of(given: Reader) -> list[list[dict[str, Any]]]:
    """Read each part as executors do: with a copy, from a copy of the part."""
    elsewhere = pickle.loads(pickle.dumps(given))
    parts = pickle.loads(pickle.dumps(given.partitions()))
    return [[row for batch in elsewhere.read(part) for row in batch.to_pylist()] for part in parts]


def rows(store: str, *columns: str, table: str = "messages", **options: str) -> list[dict[str, Any]]:
    return [row for part in parts_of(reader(store, *columns, table=table, **options)) for row in part]


def ids(store: str, **options: str) -> list[str]:
    found = sorted(row["id"] for row in rows(store, "id", **options))
    assert found == sorted(row["id"] for row in rows(store, "id", "payload", **options))
    return found


def within(store: str, run: Callable[[Store], Awaitable[T]]) -> T:
    async def opened() -> T:
        async with open_store(store, namespace="default", clock=None) as each:
            return await run(each)

    return asyncio.run(opened())


def put(envelope: Envelope, due_ms: int = DUE_MS, *, conflict: Conflict | None = None, late: Late | None = None) -> Put:
    return Put(new_op(), envelope, At(due_ms), conflict or Conflict.replace(), late or Late())


def store_all(store: str, *puts: Put) -> None:
    async def apply(opened: Store) -> None:
        for at in range(0, len(puts), 500):
            for outcome in await opened.apply(puts[at : at + 500]):
                assert getattr(outcome, "answer", outcome) in ("stored", "replaced")

    within(store, apply)


def numbered(n: int, due_ms: Callable[[int], int] = lambda _: DUE_MS) -> list[Put]:
    return [put(Envelope(f"m{i}", "work", "a", payload=b"%d" % i), due_ms(i)) for i in range(n)]


EVERYTHING = Envelope(
    "ünï·漢-1",
    "kafka",
    "orders",
    payload=bytes(range(256)) * 200,
    key=b"\x00k",
    headers={"h": b"\xff", "é": b""},
    trace={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
    version=(1 << 63) - 1,
)


def test_every_field_comes_back_as_it_was_written(url: str) -> None:
    rule = encode_rule(Cron("0 9 * * mon", tz="Europe/Paris"))
    store_all(
        url,
        put(EVERYTHING, conflict=Conflict.newer((1 << 63) - 1), late=Late.drop("15m")),
        put(Envelope("empty", "stdout", "a")),
        put(Envelope("null", "kafka", "t", encoding="null", key=b"")),
        put(Envelope("typed", "order.due", encoding="json", payload=b'{"n":1}')),
        put(Envelope("named", "lane", type="order.late", encoding="msgpack", payload=b"\x80")),
        put(Envelope("series", "lane", encoding="json", payload=b"1", rule=rule)),
        put(Envelope("0" * 12 + "7" + "0" * 3 + "8" + "0" * 15, "stdout", "own")),
    )
    found = {row["id"]: row for row in rows(url)}
    assert len(found) == 7
    assert found == {row["id"]: row for row in rows(url, partitions="5")}
    row = found[EVERYTHING.id]
    assert row.pop("revision") > 1_700_000_000_000
    assert row == {
        "id": EVERYTHING.id,
        "due_at": DUE,
        "next_attempt_at": DUE,
        "state": "scheduled",
        "to": "kafka:orders",
        "type": None,
        "encoding": "",
        "payload": EVERYTHING.payload,
        "key": b"\x00k",
        "headers": list(EVERYTHING.headers.items()),
        "version": EVERYTHING.version,
        "attempt": 0,
        "expires_at": DUE + timedelta(minutes=15),
        "late": "drop",
        "rule": None,
        "trace": list(EVERYTHING.trace.items()),
        "first_error": None,
        "last_error": None,
    }
    assert (found["empty"]["payload"], found["empty"]["key"], found["empty"]["headers"]) == (b"", None, [])
    assert (found["empty"]["expires_at"], found["empty"]["late"], found["empty"]["version"]) == (None, "deliver", None)
    assert (found["null"]["payload"], found["null"]["key"], found["null"]["encoding"]) == (None, b"", "null")
    assert (found["typed"]["to"], found["typed"]["type"]) == ("handler:order.due", "order.due")
    assert (found["named"]["to"], found["named"]["type"]) == ("handler:lane", "order.late")
    assert encode_rule(read_rule(json.loads(found["series"]["rule"]))) == rule
    dues = [(row["id"], row["due_at"]) for row in rows(url, "id", "due_at")]
    assert sorted(dues) == sorted((name, row["due_at"]) for name, row in found.items())
    assert [*rows(url, "due_at", "id")[0]] == ["due_at", "id"]


def test_parts_are_of_one_size_though_all_is_due_at_one_time(url: str) -> None:
    store_all(url, *numbered(12_000))
    for columns in (("id", "due_at"), ("id", "payload")):
        parts = parts_of(reader(url, *columns, partitions="7"))
        assert sorted(row["id"] for part in parts for row in part) == sorted(f"m{i}" for i in range(12_000))
        sizes = [len(part) for part in parts if part]
        assert len(sizes) == 7
        assert max(sizes) < 1.2 * min(sizes)
    (part,) = parts_of(reader(url, "id"))
    assert len({row["id"] for row in part}) == len(part) == 12_000


def test_what_moves_while_it_is_read_is_read_once_at_most_and_what_stands_still_once(url: str) -> None:
    """Of overdue messages some are claimed, ended, retried and put between the parts."""
    store_all(url, *numbered(400, lambda i: DUE_MS + i if i % 2 else 1_000_000 + i))

    async def drain(opened: Store, given: Reader) -> list[str]:
        async with opened.work("w", ["work"]) as work:
            parts = given.partitions()
            found: list[str] = []
            first = await work.claim({"work": Demand(30)}, request=new_op().hex(), lease_ms=15_000)
            for i, part in enumerate(parts):
                found += [row["id"] for batch in given.read(part) for row in batch.to_pylist()]
                claimed = await work.claim({"work": Demand(20)}, request=new_op().hex(), lease_ms=15_000)
                ends = [
                    _settlement(each, n) for n, each in enumerate([*claimed.claims, *first.claims[5 * i : 5 * i + 5]])
                ]
                await work.settle(ends)
                await opened.apply([put(Envelope(f"new{i}", "work", "a"), 1_000_000 + i)])
            return found

    for columns in (("id", "due_at"), ("id", "payload")):
        found = within(url, partial(drain, given=reader(url, *columns, partitions="6")))
        assert len(found) == len(set(found))
        assert {f"m{i}" for i in range(1, 400, 2)} <= set(found)


def _settlement(claim: Claim, n: int) -> Settlement:
    record = claim.record
    if n % 2:
        return Done(record.id, record.revision, claim.token)
    return Again(record.id, record.revision, claim.token, DUE_MS + 10_000 + n, 1)


def test_states_and_retries_are_told(url: str) -> None:
    store_all(
        url,
        put(Envelope("later", "work", "a")),
        put(Envelope("claimed", "work", "a"), 1_000),
        put(Envelope("retried", "work", "b"), 2_000),
        put(Envelope("held", "work", "held"), 3_000),
        put(Envelope("overdue", "other", "a"), 4_000),
        put(Envelope("aside", "aside", "a"), 5_000),
    )

    async def look(opened: Store) -> list[dict[str, Any]]:
        async with opened.work("w", ["work", "other"]) as work:
            await opened.pause("work", "held")
            await opened.pause("aside")
            claims = (await work.claim({"work": Demand(9)}, request="1", lease_ms=15_000)).claims
            record = claims[1].record
            assert record.id == "retried"
            await work.settle([Again(record.id, record.revision, claims[1].token, DUE_MS, 1, "boom")])
            return rows(url, "id", "state", "attempt", "next_attempt_at", "due_at", "first_error", partitions="3")

    found = {row.pop("id"): row for row in within(url, look)}
    states = {name: row["state"] for name, row in found.items()}
    assert states == {
        "later": "scheduled",
        "claimed": "in_flight",
        "retried": "scheduled",
        "held": "held",
        "overdue": "overdue",
        "aside": "held",
    }
    second = datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
    retried = found["retried"]
    assert (retried["attempt"], retried["first_error"], retried["due_at"]) == (1, "boom", second)
    assert retried["next_attempt_at"] == DUE
    early = {"dueFrom": "1970-01-01T00:00:01Z", "dueTo": "1970-01-01T00:00:03+00:00"}
    assert ids(url, **early) == ["claimed", "retried"]  # by when it was due, not by when it is tried next


@pytest.mark.parametrize("has_parity", [True, False])
def test_due_times_are_the_records_though_places_alone_are_read(has_parity: bool) -> None:
    """What was put, moved, fired and retried; where sequences tell what stands elsewhere, no other record is read."""
    with serving(redis_products()[0]) as url:
        client: Any = redis.Redis.from_url(f"{url}")
        if not has_parity:  # as versions left it that did not heed it
            client.hset("{default:00}:meta", "seq", 7)
        store_all(f"{url}", *numbered(40, lambda i: DUE_MS + i), put(Envelope("again", "work", "a"), 2_000))
        expected = {f"m{i}": DUE_MS + i for i in range(40)} | {"again": 2_000, "m3": DUE_MS - 9}

        async def change(opened: Store) -> None:
            await opened.apply([Reschedule(new_op(), "m3", At(DUE_MS - 9)), Fire(new_op(), "m4")])
            async with opened.work("w", ["work"]) as work:
                claims = (await work.claim({"work": Demand(9)}, request="1", lease_ms=15_000)).claims
                expected["m4"] = max(claim.record.due_ms for claim in claims)
                await work.settle(
                    [Again(each.record.id, each.record.revision, each.token, DUE_MS + 5, 1) for each in claims]
                )

        within(f"{url}", change)
        assert client.hexists("{default:00}:meta", "parity") == has_parity
        found = rows(f"{url}", "id", "due_at", "next_attempt_at")
        lone = {row["id"]: round(row["due_at"].timestamp() * 1000) for row in found}
        assert lone == expected
        assert {row["id"] for row in found if row["next_attempt_at"] != row["due_at"]} == {"m4", "again"}
        assert ids(f"{url}", dueTo="2000-01-01T00:00:00Z") == ["again"]
        if has_parity:  # nobody asks for the others' records
            client.hdel("{default:00}:msg", *(b"\x02" + name.encode() for name in expected if name[0] == "m"))
            assert len(rows(f"{url}", "id", "due_at")) == 40


def test_options_say_what_is_read(url: str) -> None:
    store_all(url, *numbered(50, lambda i: DUE_MS + i), put(Envelope("x", "elsewhere", "a"), DUE_MS + 10))
    assert ids(url, lane="elsewhere") == ["x"]
    assert ids(url, lane="nowhere") == []
    assert ids(url, ids="m1, m7,nothing") == ["m1", "m7"]
    assert ids(url, ids='["m1", "x"]', lane="work") == ["m1"]
    assert ids(url, ids="[]") == []
    assert list(reader(url, ids="[]").read(InputPartition(None))) == []  # which Spark makes where there are no parts
    assert ids(url, ids="m1,m7", dueFrom="2031-01-01T00:00:00.005Z") == ["m7"]
    at = "2031-01-01T01:00:00.{:03}+01:00"
    for parts in ("1", "4"):
        assert ids(url, dueFrom=at.format(48), partitions=parts) == ["m48", "m49"]
        assert ids(url, dueTo=at.format(2), partitions=parts) == ["m0", "m1"]
        assert ids(url, dueFrom=at.format(10), dueTo=at.format(11), partitions=parts) == ["m10", "x"]
    if not url.startswith("sqlite"):
        assert ids(url, namespace="another") == []


def test_filters_are_taken_where_they_may_be(url: str) -> None:
    store_all(url, *numbered(20, lambda i: DUE_MS + i))
    given = reader(url, "id", "due_at", pushdown="true")
    assert isinstance(given, PushingReader)
    of_time = [
        GreaterThanOrEqual(("due_at",), DUE + timedelta(milliseconds=3)),
        LessThan(("due_at",), DUE + timedelta(milliseconds=9)),
    ]
    unknown = StringContains(("id",), "m")
    filters = [EqualTo(("id",), "m4"), In(("id",), ("m4", "m5")), *of_time, unknown]
    assert list(given.pushFilters(filters)) == filters  # Spark looks again
    assert parts_of(given)[0] == [{"id": "m4", "due_at": DUE + timedelta(milliseconds=4)}]
    assert type(reader(url)) is Reader  # Spark refuses one that takes filters unless it is configured to offer them
    given = reader(url, "id", pushdown="true")
    list(given.pushFilters(of_time))
    found = {row["id"] for part in parts_of(given) for row in part}
    assert {f"m{i}" for i in range(3, 9)} <= found <= {f"m{i}" for i in range(3, 10)}
    at = DUE + timedelta(milliseconds=5)
    between = [GreaterThanOrEqual(("due_at",), at), LessThanOrEqual(("due_at",), at)]
    ways: list[list[Filter]] = [between, [EqualTo(("due_at",), at)]]
    for of_one in ways:
        given = reader(url, "id", pushdown="true")
        list(given.pushFilters(of_one))
        assert [row["id"] for part in parts_of(given) for row in part] == ["m5"]


def test_dead_letters_and_what_has_ended(url: str) -> None:
    versions = [put(Envelope(f"v{i}", "work", "a", version=i), 1_000, conflict=Conflict.newer(i)) for i in range(5)]
    store_all(url, *versions, put(Envelope("d", "work", "a", payload=b"x"), 2_000), put(Envelope("e", "work"), 3_000))

    async def end(opened: Store) -> None:
        async with opened.work("w", ["work"]) as work:
            claims = (await work.claim({"work": Demand(9)}, request="1", lease_ms=15_000)).claims
            *done, failed, silent = [(each.record.id, each.record.revision, each.token) for each in claims]
            await work.settle([*starmap(Done, done), Again(*failed, 2_000, 2, "boom"), Dead(*silent, "late", 0)])
            (claim,) = (await work.claim({"work": Demand(9)}, request="2", lease_ms=15_000)).claims
            await work.settle([Dead(*failed[:2], claim.token, "rejected", 3, "no", traceback="Traceback\n  é")])

    within(url, end)
    for parts in ("1", "3"):
        ended = {row["id"]: row for row in rows(url, table="done", partitions=parts)}
        assert {name: row["version"] for name, row in ended.items()} == {f"v{i}": i for i in range(5)}
        assert all(row["until"] > datetime.now(UTC) + timedelta(hours=20) for row in ended.values())
        letter, silent = sorted(rows(url, table="dead", partitions=parts), key=itemgetter("id"))
        assert (letter["id"], letter["reason"], letter["attempt"], letter["last_error"]) == ("d", "rejected", 3, "no")
        assert (letter["payload"], letter["to"]) == (b"x", "work:a")
        assert abs(letter["given_up_at"] - datetime.now(UTC)) < timedelta(minutes=5)
        assert (letter["errors"], letter["traceback"]) == (["boom", "no"], "Traceback\n  é")
        assert (silent["reason"], silent["errors"], silent["traceback"]) == ("late", [], None)
    assert [row["id"] for row in rows(url, "id", table="done", ids="v2,none")] == ["v2"]
    assert rows(url, "id", table="dead", ids="none") == rows(url, "id", table="dead", lane="other") == []
    # A later end of the same id counts.
    store_all(url, put(Envelope("v1", "work", "a", version=9), conflict=Conflict.newer(9)))
    within(url, lambda opened: opened.apply([Cancel(new_op(), "v1")]))
    (again,) = rows(url, table="done", ids="v1")
    assert again["version"] == 9
    assert len(rows(url, table="done")) == 5


def test_records_of_dead_letters_are_fetched_only_if_a_column_needs_them(url: str) -> None:
    store_all(url, put(Envelope("a", "work"), 1_000), put(Envelope("b", "work"), 2_000))

    async def give_up(opened: Store) -> None:
        async with opened.work("w", ["work"]) as work:
            claims = (await work.claim({"work": Demand(9)}, request="1", lease_ms=15_000)).claims
            await work.settle([Dead(each.record.id, each.record.revision, each.token, "late", 0) for each in claims])

    within(url, give_up)
    columns = ["id", "given_up_at", "revision"]
    before = [{name: row[name] for name in columns} for row in rows(url, table="dead")]
    assert len(before) == 2
    if url.startswith("sqlite"):  # a batch ends with the first record that is larger than a batch
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("UPDATE dead SET record = zeroblob(?)", (BATCH_BYTES,))
        columns.append("reason")
        before = [row | {"reason": "late"} for row in before]
    else:
        redis.Redis.from_url(url).delete("{default:00}:dead")
    given = reader(url, *columns, table="dead")
    (part,) = given.partitions()
    assert [batch.to_pylist() for batch in given.read(part)] == [before]


def test_large_messages_come_in_batches_of_bounded_size(url: str) -> None:
    store_all(url, *(put(Envelope(f"b{i}", "work", "a", payload=bytes(50_000))) for i in range(500)))
    given = reader(url)
    (part,) = given.partitions()
    sizes = [batch.nbytes for batch in given.read(part)]
    assert sum(sizes) > 25_000_000
    assert max(sizes) < 10_000_000
    (part,) = (small := reader(url, "id", "due_at")).partitions()
    assert sum(batch.nbytes for batch in small.read(part)) < 100_000
