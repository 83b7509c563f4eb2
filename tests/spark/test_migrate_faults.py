"""Migrations that are killed between their steps, meet obstacles, or get wrong options."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyspark.sql import SparkSession

from aiodelay import AiodelayError
from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import occurrence_id
from aiodelay.core.values import Again, At, Cancel, Conflict, Demand, Envelope, Late, Put, Record, Stored
from aiodelay.recurrence import Cron, encode_rule
from aiodelay.spark.jobs import migrate
from aiodelay.spark.moving import MOVED
from tests.spark.messages import stored
from tests.spark.test_kills import running, wait_for_rows
from tests.spark.test_reading import EVERYTHING
from tests.support.servers import RedisServer

pytestmark = pytest.mark.timeout(900)  # passes are many small jobs of Spark, which take a loaded machine long

CUTOVER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
DUE_MS = int(CUTOVER.timestamp() * 1000) + 3_600_000
ROWS = 1_000


def put(envelope: Envelope, late: Late = Late.deliver(), conflict: Conflict = Conflict.replace()) -> Put:  # noqa: B008 - immutable
    return Put(new_op(), envelope, At(DUE_MS), conflict, late)


def apply(url: str, namespace: str, *commands: Put | Cancel) -> list[str]:
    """Carry commands out; return what each was answered."""

    async def play() -> list[str]:
        async with open_store(url, namespace=namespace, clock=None) as store:
            found = await store.apply(commands)
        return [each.answer if isinstance(each, Stored) else f"{each}" for each in found]

    return asyncio.run(play())


def content(record: Record) -> Record:
    """Return what moves of a message."""
    trace = {name: text for name, text in record.envelope.trace.items() if name != MOVED}
    return structs.replace(record, revision=0, op=bytes(8), envelope=structs.replace(record.envelope, trace=trace))


def test_all_of_a_message_moves_and_what_is_held_or_in_the_way_stays(
    spark: SparkSession, redis_server: RedisServer, tmp_path: Path, namespace: str
) -> None:
    first, second = redis_server.url, f"sqlite:///{tmp_path / 'second.db'}"
    rule = encode_rule(Cron("0 9 * * mon", tz="Europe/Paris"))
    puts = [
        put(structs.replace(EVERYTHING, headers={"h": b"\xff"}), Late.drop("15m"), Conflict.newer((1 << 63) - 1)),
        put(Envelope("null", "kafka", "t", encoding="null", key=b"")),
        put(Envelope("typed", "order.due", encoding="json", payload=b'{"n":1}')),
        put(Envelope("named", "lane", type="order.late", encoding="msgpack", payload=b"\x80")),
        put(Envelope("series", "lane", encoding="json", payload=b"1", rule=rule)),
        put(Envelope("held", "paused", payload=b"h")),
        put(Envelope("theirs", "lane", payload=b"ours")),
        put(Envelope("odd", "lane", headers={"é": b""})),
    ]
    apply(first, namespace, *puts)
    apply(second, namespace, put(Envelope("theirs", "lane", payload=b"theirs")))

    async def hold() -> None:
        async with open_store(first, namespace=namespace, clock=None) as store:
            await store.pause("paused")

    asyncio.run(hold())
    before = stored(first, namespace)
    places: dict[str, Any] = {"source": first, "target": second, "namespace": namespace, "to_namespace": namespace}
    summary = migrate.run(spark, cutover=CUTOVER, work=f"{tmp_path / 'work'}", verify=True, concurrency=2, **places)
    assert summary.counts == {
        "copied": 5,
        "moved": 5,
        "same": 5,
        "refused": 1,
        "left": 3,
        **dict.fromkeys(("gone", "changed", "late", "taken_back", "drift"), 0),
    }
    assert (summary.rejected, summary.is_within(0)) == (3, False)
    after = stored(second, namespace)
    assert after.pop("theirs").envelope.payload == b"theirs"
    assert stored(first, namespace).keys() == {"held", "odd", "theirs"}
    assert after.keys() == before.keys() - {"held", "odd", "theirs"}
    assert {each: content(after[each]) for each in after} == {each: content(before[each]) for each in after}
    assert after[EVERYTHING.id].envelope.trace.keys() == {"traceparent", MOVED}


def retry_first_of(url: str, series: str) -> str:
    """Have the occurrence of a series that is due be retried later; return its id."""

    async def play() -> str:
        async with open_store(url, namespace="default", clock=None) as store, store.work("tests", ["lane"]) as work:
            (claim,) = (await work.claim({"lane": Demand(1)}, request="1", lease_ms=60_000)).claims
            record = claim.record
            again = Again(series, record.revision, claim.token, DUE_MS, 1, "failed", DUE_MS)
            await work.settle([again])
            return occurrence_id(series, record.due_ms)

    return asyncio.run(play())


def test_a_retry_stays_with_its_series_and_what_another_migration_brought_stays(
    spark: SparkSession, tmp_path: Path
) -> None:
    a, b, c = (f"sqlite:///{tmp_path / name}.db" for name in "abc")
    rule = encode_rule(Cron("0 9 * * mon", tz="Europe/Paris"))
    series = Envelope("s", "lane", encoding="json", payload=b"1", rule=rule)
    apply(a, "default", Put(new_op(), series, At(0)))
    retried = retry_first_of(a, "s")
    apply(a, "default", put(Envelope("x", "lane", payload=b"a")))
    given: dict[str, Any] = {"target": c, "cutover": CUTOVER, "concurrency": 1, "passes": 1}
    first = migrate.run(spark, source=a, work=f"{tmp_path / 'work-a'}", **given)
    assert (first.counts["moved"], first.counts["left"]) == (1, 1)
    assert stored(a, "default").keys() == {"s", retried}, "to take out the series would end the retry too"

    apply(b, "default", *(put(Envelope(name, "lane", payload=b"b")) for name in "xy"))
    other = migrate.run(spark, source=b, work=f"{tmp_path / 'work-b'}", **given)
    assert (other.counts["moved"], other.counts["taken_back"], other.counts["left"]) == (1, 0, 1)
    assert {name: record.envelope.payload for name, record in stored(c, "default").items()} == {"x": b"a", "y": b"b"}

    apply(a, "default", Cancel(new_op(), retried))
    last = migrate.run(spark, source=a, work=f"{tmp_path / 'work-a'}", **given)
    assert (last.counts["moved"], last.counts["left"]) == (1, 0)
    assert stored(c, "default").keys() == {"s", "x", "y"}


@pytest.mark.nightly  # each in test_kills
@pytest.mark.usefixtures("java")
def test_a_migration_is_killed_while_it_copies_and_while_it_takes_out(
    spark: SparkSession, redis_server: RedisServer, tmp_path: Path, namespace: str
) -> None:
    url, other, work = redis_server.url, f"{namespace}b", f"{tmp_path / 'work'}"
    apply(url, namespace, *(put(Envelope(f"m{n}", "lane", payload=b"%d" % n)) for n in range(ROWS)))
    slowly = ("migrate_slowly", url, namespace, other, CUTOVER.isoformat(), work)
    with running(*slowly) as process:
        wait_for_rows(process, url, other)
    copies = stored(url, other)
    assert 0 < len(copies) < ROWS
    assert len(stored(url, namespace)) == ROWS
    uncopied = next(f"m{n}" for n in range(ROWS) if f"m{n}" not in copies)
    cancelled = [min(copies), uncopied]
    assert apply(url, namespace, *(Cancel(new_op(), each) for each in cancelled)) == ["cancelled", "cancelled"]
    replaced = max(copies)
    apply(url, namespace, put(Envelope(replaced, "lane", payload=b"new")))
    with running(*slowly) as process:
        asyncio.run(_until_fewer(process, url, namespace, ROWS - len(cancelled)))
    left, moved = stored(url, namespace), stored(url, other)
    assert 0 < len(left) < ROWS - len(cancelled)
    assert left.keys() | moved.keys() == {f"m{n}" for n in range(ROWS)} - {*cancelled}
    places: dict[str, Any] = {"source": url, "target": url, "namespace": namespace, "to_namespace": other}
    summary = migrate.run(spark, cutover=CUTOVER, work=work, rate=0, concurrency=2, verify=True, **places)
    assert (summary.rejected, summary.facts["resumed"]) == (0, True)
    assert not stored(url, namespace)
    payloads = {each: record.envelope.payload for each, record in stored(url, other).items()}
    assert payloads == {f"m{n}": b"%d" % n for n in range(ROWS) if f"m{n}" not in cancelled} | {replaced: b"new"}


async def _until_fewer(process: Any, url: str, namespace: str, n: int) -> None:  # noqa: ANN401 - a process
    async with open_store(url, namespace=namespace, clock=None) as store, store.work("tests", ()) as work:
        while sum(each.scheduled for each in (await store.counts()).values()) == n:
            assert process.poll() is None, "it ended before it took anything out"
            work.clear()
            await work.wait(until_ms=store.now_ms() + 100)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"target": "same"}, "to is "),
        ({"margin": "10m"}, "margin is 10m, with lead=10m"),
        ({"cutover": timedelta(minutes=5)}, "cutover is in "),
        ({"source": "memory://"}, "store of a migration is memory://; allowed: redis:"),
        ({"target": "redis://127.0.0.1:1"}, "redis://127.0.0.1:1 is unavailable"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"work": "/tmp/[w]"}, "work is '/tmp/[w]'; allowed: a folder"),
        ({"work": "other"}, "work is the folder of another migration: source sqlite:"),
    ],
)
def test_what_is_wrong_is_told_before_anything_moves(
    spark: SparkSession, tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    first, second = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "second"))
    given: dict[str, Any] = {"source": first, "target": second, "cutover": CUTOVER, "work": f"{tmp_path / 'work'}"}
    if isinstance(ahead := changed.get("cutover"), timedelta):
        changed = {"cutover": datetime.now(UTC) + ahead}
    if changed.get("target") == "same":
        changed = {"target": first}
    if changed.get("work") == "other":
        changed = {"target": f"sqlite:///{tmp_path / 'third'}.db"}
        apply(first, "default", put(Envelope("m", "lane")))
        migrate.run(spark, **given)
    with pytest.raises(AiodelayError) as raised:
        migrate.run(spark, **given | changed)
    assert f"{raised.value}".startswith(told), raised.value
