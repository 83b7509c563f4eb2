"""Replay: delivered messages are stored again, once per name, from a snapshot and the archive; others stay."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay import Every, Scheduler
from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.values import Again, At, Conflict, Dead, Delivery, Demand, Envelope, Late, Put, Snapshot
from aiodelay.errors import ConfigurationError
from aiodelay.spark.jobs import archive, replay, snapshot
from aiodelay.testing import RecordingSink

IDS = [f"m{i}" for i in range(6)]
LONG_AGO_MS = 1_000_000_000_000
GIVEN_UP = partial(Dead, reason="rejected", attempt=2, error="no", traceback="Traceback\n  é")


async def schedule(url: str, namespace: str = "default") -> None:
    """Schedule six messages that are due and four that are not, of which two are for another address."""
    async with Scheduler(url, namespace=namespace, sinks=[RecordingSink("paper")], dispatch=False) as scheduler:
        for each in IDS:
            await scheduler.schedule(each.encode(), to="paper:in", id=each, delay="0s", key=b"k", headers={"h": b"1"})
        for each, to in [("late", "paper:in"), ("o1", "paper:out"), ("o2", "paper:out"), ("late2", "paper:in")]:
            await scheduler.schedule(b"", to=to, id=each, delay="1h")


async def give_up(url: str, namespace: str) -> None:
    """Schedule a message that is due before all others, let it fail, and give it up at its second failure."""
    async with open_store(url, namespace=namespace, clock=None) as store, store.work("w", ["paper"]) as work:
        await store.apply(
            [Put(new_op(), Envelope("dead", "paper", "out"), At(LONG_AGO_MS), Conflict.replace(), Late())]
        )
        for settled in (partial(Again, due_ms=LONG_AGO_MS, attempt=1, error="boom"), GIVEN_UP):
            (claim,) = (await work.claim({"paper": Demand(1)}, request=new_op().hex(), lease_ms=15_000)).claims
            await work.settle([settled(claim.record.id, claim.record.revision, claim.token)])


async def deliver(url: str, n: int) -> list[Delivery]:
    """Deliver what is due, and return it once so many have arrived."""
    sink = RecordingSink("paper")
    async with Scheduler(url, sinks=[sink]) as scheduler, asyncio.timeout(120):
        while Counter(each.event for each in await scheduler.journal(limit=1000))["delivered"] < n:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return sink.deliveries


async def pending(url: str, namespace: str = "default") -> dict[str, Snapshot]:
    async with Scheduler(url, namespace=namespace, sinks=[RecordingSink("paper")], dispatch=False) as scheduler:
        return {each.record.id: each async for each in scheduler.pending()}


def test_what_was_delivered_in_a_window_comes_again_once_for_each_name(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=10000"
    kept, events = f"{tmp_path / 'kept'}", f"{tmp_path / 'events'}"
    asyncio.run(schedule(url))
    taken = snapshot.run(spark, store=url, to=kept)
    assert taken.rows == 10
    first = asyncio.run(deliver(url, 6))
    archive.run(spark, store=url, to=events)
    frame, happened = spark.read.parquet(kept), spark.read.parquet(events)
    where = "event = 'delivered' and lane = 'paper' and at >= '2026-01-01T10:00:00Z' and id <> 'm5'"
    run = partial(replay.run, frame, store=url, name="again", events=happened, events_where=where)
    counted = run(dry_run=True)
    assert (counted.job, counted.rows, counted.counts["accepted"], counted.counts["without_message"]) == (
        "replay",
        5,
        5,
        0,
    )
    assert set(asyncio.run(pending(url))) == {"late", "late2", "o1", "o2"}
    done = run()
    assert (done.counts["stored"], done.facts["name"]) == (5, "again")
    second = asyncio.run(deliver(url, 11))
    assert {each.envelope.id for each in second} == {f"{each}-replay-again" for each in IDS[:5]}
    was = {each.envelope.id: each.envelope for each in first}
    for each in second:
        new, old = each.envelope, was[each.envelope.id.removesuffix("-replay-again")]
        assert (new.payload, new.key, new.headers) == (old.payload, old.key, old.headers)
    again = run()
    assert (again.counts["stored"], again.counts["known"]) == (0, 5)
    assert set(asyncio.run(pending(url))) == {"late", "late2", "o1", "o2"}


def test_a_condition_a_shift_and_another_destination_apply_and_ids_may_stay(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}?journal=10000"
    kept = f"{tmp_path / 'kept'}"
    shop: dict[str, Any] = {"store": url, "namespace": "shop"}
    asyncio.run(schedule(url, "shop"))
    assert snapshot.run(spark, to=f"{kept}/none", table="dead", **shop).rows == 0
    asyncio.run(give_up(url, "shop"))
    assert snapshot.run(spark, to=f"{kept}/dead", table="dead", **shop).rows == 1
    dead = spark.read.parquet(f"{kept}/dead")
    assert dead.select("errors", "traceback").collect() == [(["boom", "no"], "Traceback\n  é")]
    assert snapshot.run(spark, to=f"{kept}/1", **shop).rows == 10
    first = spark.read.parquet(f"{kept}/1")
    frame = first.withColumn("due_at", F.expr("due_at - interval 1 hour")).unionByName(first)
    frame = frame.unionByName(dead, allowMissingColumns=True)
    before = asyncio.run(pending(url, "shop"))
    where = "to = 'paper:out'"
    shifted = replay.run(frame, name="x", where=where, shift="+1d", to="paper:else", **shop)
    assert (shifted.rows, shifted.counts["stored"]) == (3, 3)  # two are in the frame twice: the later one counts
    after = asyncio.run(pending(url, "shop"))
    for each in ("o1", "o2"):
        record = after[f"{each}-replay-x"].record
        assert record.due_ms - before[each].record.due_ms == 86_400_000
        assert record.envelope.address == "else"
    record = after["dead-replay-x"].record
    assert (record.attempt, record.first_error, record.earlier_errors, record.last_error) == (0, None, (), None)
    same = replay.run(frame, same_ids=True, where=where, shift="-10m", **shop)
    assert (same.counts["replaced"], same.counts["stored"]) == (2, 1)
    moved = asyncio.run(pending(url, "shop"))
    assert {before[each].record.due_ms - moved[each].record.due_ms for each in ("o1", "o2")} == {600_000}
    assert replay.run(frame, same_ids=True, where=where, shift="-10m", **shop).counts["known"] == 3
    events = spark.sql("select explode(array('nobody', 'o1~1800000000')) as id")  # the second is of a series
    some = replay.run(frame, name="y", events=events, dry_run=True, **shop)
    assert (some.rows, some.counts["without_message"]) == (1, 1)
    letter = frame.where("id = 'dead'").withColumn("id", F.lit("o1~1800000000"))  # of the occurrence itself
    some = replay.run(letter, name="y", events=events, dry_run=True, **shop)
    assert (some.rows, some.counts["accepted"], some.counts["without_message"]) == (1, 1, 1)


def test_a_series_is_never_replaced_by_its_replayed_message(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}"
    kept = f"{tmp_path / 'kept'}"

    async def schedule_both() -> None:
        async with Scheduler(url, sinks=[RecordingSink("paper")], dispatch=False) as scheduler:
            await scheduler.schedule(b"", to="paper:in", id="daily", every=Every("1d"))
            await scheduler.schedule(b"", to="paper:in", id="once", delay="1h")

    asyncio.run(schedule_both())
    snapshot.run(spark, store=url, to=kept)
    done = replay.run(spark.read.parquet(kept), store=url, same_ids=True, shift="+1h")
    assert (done.rows, done.counts["replaced"], done.counts["recurring"]) == (1, 1, 1)
    found = asyncio.run(pending(url))
    assert found["daily"].record.envelope.rule is not None


def test_a_shift_is_exact_so_that_nothing_is_early(spark: SparkSession) -> None:
    frame = spark.sql("select 'm' as id, timestamp_micros(1893456000000001) as due_at")
    moved = replay.replayed(frame, name="x", now_ms=0, shift_ms=-1000)
    assert moved.select(F.unix_micros("due_at")).collect() == [(1_893_455_999_000_001,)]


def test_bad_options_are_named_before_anything_is_stored(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'delay.db'}"
    frame = spark.sql("select 'm' as id, timestamp'2026-01-01 00:00:00Z' as due_at, 'p' as payload, 'paper:in' as `to`")
    for options, told in [
        ({}, r"name is missing; allowed: either a name of this replay"),
        ({"name": "a", "same_ids": True}, r"name is given with same_ids"),
        ({"name": "a b"}, r"name is 'a b'; allowed: letters"),
        ({"name": "a", "shift": "soon"}, r"shift is 'soon'"),
        ({"name": "a", "shift": "+-1d"}, r"shift is '-1d'"),
        ({"name": "a", "where": "nothing = 1"}, r"where is 'nothing = 1'; allowed: an SQL condition on id, due_at"),
        ({"name": "a", "where": "id ="}, r"where is 'id ='; allowed: an SQL condition"),
        ({"name": "a", "events_where": "id = 'm'"}, r"events_where is given without events"),
        ({"name": "a", "events": frame, "events_where": "at"}, r"events_where is 'at'; allowed"),
        ({"name": "a", "to": "nowhere"}, r"to is 'nowhere'"),
        ({"name": "a", "rate": -1}, r"option 'rate' is '-1'"),
        ({"name": "a", "concurrency": 0}, r"option 'concurrency' is '0'"),
        ({"name": "a", "rejects": f"{tmp_path}", "dry_run": True}, r"rejects is .*; allowed: a folder that does not"),
    ]:
        with pytest.raises(ConfigurationError, match=told):
            replay.run(frame, store=url, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="table is 'done'; allowed: messages, dead"):
        snapshot.run(spark, store=url, to=f"{tmp_path}", table="done")  # type: ignore[arg-type]
