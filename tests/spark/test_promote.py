"""Promotion: each message is in the store once and in time, despite kills, cancels and replacements."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from pyspark.sql import DataFrame, SparkSession

from aiodelay import Context, Scheduler
from aiodelay.core.values import TOMBSTONE_WINDOW_MS, Put, Unknown
from aiodelay.errors import ConfigurationError
from aiodelay.ports.clock import SystemClock
from aiodelay.spark import loading
from aiodelay.spark.cold import Tier
from aiodelay.spark.errors import clear_error
from aiodelay.spark.jobs import cold_put, promote
from aiodelay.spark.jobs.hot import Hot
from tests.spark.messages import end_some, stored
from tests.spark.test_kills import running, wait_for_rows
from tests.spark.tiers import NOW, cancel, days, moved, put, rows
from tests.support.servers import RedisServer

KILLED_ROWS = 400


@dataclass
class Remind:
    order: int


def test_a_schedule_of_two_years_ahead_is_put_promoted_and_delivered(spark: SparkSession, tmp_path: Path) -> None:
    tier, store = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}"
    due = datetime.now(UTC) - timedelta(seconds=1)
    orders = spark.createDataFrame([("order-7", due, 7)], "id STRING, due_at TIMESTAMP, `order` INT")
    mapping = {"id": "id", "due_at": "due_at", "payload": "struct(`order`)"}
    then = due - timedelta(days=730)
    assert cold_put.run(orders, tier=tier, mapping=mapping, to="handler:Remind", now=then).counts["put"] == 1
    early = moved(spark, tier, store, due - timedelta(days=20))
    assert (early.rows, early.facts["folders_read"]) == (0, 0)
    near = moved(spark, tier, store, due - timedelta(days=3))
    assert (near.counts["stored"], near.rejected, near.facts["days"]) == (1, 0, [f"{due.date()}"])

    async def deliver() -> tuple[Remind, str, datetime]:
        scheduler = Scheduler(store)
        delivered: asyncio.Future[tuple[Remind, str, datetime]] = asyncio.get_running_loop().create_future()

        @scheduler.handler
        async def remind(event: Remind, context: Context) -> None:
            delivered.set_result((event, context.id, context.due))

        async with scheduler:
            return await delivered

    event, message_id, when = asyncio.run(deliver())
    assert (event, message_id) == (Remind(7), "order-7")
    assert timedelta() <= when - due < timedelta(milliseconds=1), "never early"


@pytest.mark.parametrize("step", ["claim", "promoted"])
def test_a_promotion_that_ends_before_it_writes_or_is_marked_is_made_up_for_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    tier, store = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}"
    put(rows(spark, *((f"{n}", 10 + n % 3 / 2, 1) for n in range(9)), ("far", 90, 1)), tier)
    claim = Tier.claim

    def claimed(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - of the step
        claim(*arguments, **options)
        raise InterruptedError

    monkeypatch.setattr(Tier, step, claimed if step == "claim" else raise_)
    with pytest.raises(InterruptedError):
        moved(spark, tier, store, NOW + days(9))
    monkeypatch.undo()
    there = 0 if step == "claim" else 9
    assert len(stored(store, "default") if there else ()) == there
    again = moved(spark, tier, store, NOW + days(9))
    assert (again.rows, again.counts["stored"], again.counts["known"]) == (9, 9 - there, there)
    assert moved(spark, tier, store, NOW + days(9)).rows == 0
    assert stored(store, "default").keys() == {f"{n}" for n in range(9)}


@pytest.mark.nightly  # killed while it writes: test_kills; the other steps: above
@pytest.mark.usefixtures("java")
def test_each_message_is_in_the_store_once_whatever_step_a_promotion_is_killed_at(
    spark: SparkSession, redis_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    tier, url = f"{tmp_path / 'tier'}", f"{redis_server.url}"
    later = NOW + days(9)
    put(rows(spark, *((f"{n}", 10 + n % 3 / 2, 1) for n in range(KILLED_ROWS)), ("far", 90, 1)), tier)
    for step in ("claim", "write", "promoted"):
        with running("promote_and_die", step, tier, url, namespace, later.isoformat()) as process:
            if step == "write":
                wait_for_rows(process, url, namespace, rows=3)
            else:
                assert process.wait() == -signal.SIGKILL
        found = stored(url, namespace)
        if step == "write":
            assert len(found) < KILLED_ROWS
            ended = end_some(url, namespace, deliver=2, cancel=[max(found)])
    assert stored(url, namespace).keys() == {f"{n}" for n in range(KILLED_ROWS)} - ended
    again = moved(spark, tier, url, later, namespace=namespace)
    assert (again.rows, again.counts["known"]) == (KILLED_ROWS, KILLED_ROWS)
    last = moved(spark, tier, url, later, namespace=namespace)
    assert (last.rows, last.facts["days"]) == (0, [])
    assert stored(url, namespace).keys() == {f"{n}" for n in range(KILLED_ROWS)} - ended


def test_a_missed_promotion_is_told_and_made_up_for_once(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}"
    put(rows(spark, ("a", 9, 1), ("b", 15, 1), ("c", 15.6, 1), ("d", 16.6, 1), ("e", 40, 1)), tier)
    cancel(spark, tier, ("b", None))
    with pytest.raises(ConfigurationError, match="window is 7d, shorter than min_lead; allowed: at least 8d"):
        moved(spark, tier, store, NOW, min_lead="8d")
    late = NOW + days(15.5)
    dry = moved(spark, tier, store, late, dry_run=True)
    assert ({**dry.counts}, dry.rejected) == ({"found": 3, "late": 2, "overdue": 1, "doubtful": 0}, 2)
    assert not (tmp_path / "delay.db").exists()
    monkeypatch.setattr(Tier, "promoted", raise_)
    with pytest.raises(InterruptedError):
        moved(spark, tier, f"sqlite:///{tmp_path / 'lost.db'}", late)
    with pytest.raises(ConfigurationError, match="lost"):
        moved(spark, tier, store, late + days(1))
    monkeypatch.undo()
    caplog.clear()
    with caplog.at_level(logging.ERROR, "aiodelay.spark"):
        summary = moved(spark, tier, store, late + days(1), new_store=True)
    assert {name: n for name, n in summary.counts.items() if n} == {"stored": 3, "late": 3, "overdue": 2, "doubtful": 1}
    assert (summary.rows, summary.rejected, summary.is_within(0)) == (3, 3, False)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "3 messages had less than 1d left when they were promoted, 2 of them were overdue"
    )
    assert {*stored(store, "default")} == {"a", "c", "d"}, "they are delivered at once"
    other = f"sqlite:///{tmp_path / 'forgetful.db'}"
    refused = r"store is .*forgetful.* default; allowed: .*delay.* default, into"
    with pytest.raises(ConfigurationError, match=refused):
        moved(spark, tier, other, late + days(20))
    with pytest.raises(ConfigurationError, match=refused):
        put(rows(spark, ("f", 99, 1)), tier, store=other)
    with pytest.raises(ConfigurationError, match=refused):
        cancel(spark, tier, ("e", None), store=other)
    assert moved(spark, tier, other, late + days(2), new_store=True).rows == 0, "what was promoted is not read again"
    with pytest.raises(ConfigurationError, match=r"forgetful.* default, into which this tier is promoted"):
        moved(spark, tier, store, late + days(20))
    assert moved(spark, tier, other, late + days(20)).counts["stored"] == 1


def raise_(*_: object, **__: object) -> None:
    raise InterruptedError


def test_what_is_cancelled_and_replaced_before_during_and_after_a_promotion_is_not_delivered(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}"
    names = ("before", "same-day", "away", "during", "during-away", "during-near", "after", "after-away", "stays")
    put(rows(spark, *((name, 9, 1) for name in names)), tier)
    now = NOW + days(3)
    cancel(spark, tier, ("before", None))
    put(rows(spark, ("same-day", 9.1, 2), ("away", 30, 2)), tier)
    write = Hot.write

    def write_later(self: Hot, messages: DataFrame, *, read_ms: int) -> dict[str, int]:
        monkeypatch.setattr(Hot, "write", write)  # the promotion has read, and not written yet
        assert cancel(spark, tier, ("during", None), now=now).facts["reasons"] == {"id.promoted": 1}
        told = cancel(spark, tier, ("during", None), now=now, store=store)
        assert (told.rejected, told.counts["hot_barred"]) == (0, 1)
        replacing = rows(spark, ("during-away", 40, 2), ("during-near", 9.2, 2))
        assert put(replacing, tier, now=now, store=store).counts["hot_barred"] == 1
        return write(self, messages, read_ms=read_ms)

    monkeypatch.setattr(Hot, "write", write_later)
    summary = moved(spark, tier, store, now)
    assert {name: n for name, n in summary.counts.items() if n} == {"stored": 4, "known": 3}
    assert cancel(spark, tier, ("after", None), now=now, store=store).counts["hot_cancelled"] == 1
    assert put(rows(spark, ("after-away", 50, 2)), tier, now=now, store=store).counts["hot_cancelled"] == 1
    moved(spark, tier, store, now)
    assert versions(store) == {"same-day": 2, "during-near": 2, "stays": 1}
    assert moved(spark, tier, store, NOW + days(45)).counts["late"] == 2
    assert moved(spark, tier, store, NOW + days(45)).rows == 0
    arrived = {"away": 2, "during-away": 2, "after-away": 2}
    assert versions(store) == {"same-day": 2, "during-near": 2, "stays": 1, **arrived}


def versions(store: str) -> Mapping[str, int | None]:
    return {name: record.envelope.version for name, record in stored(store, "default").items()}


def test_what_was_read_too_long_ago_is_not_written(spark: SparkSession, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'delay.db'}"
    hot = Hot(store=store, namespace="default", rate=0, concurrency=1, timeout="60s")
    frame = rows(spark, ("a", 9, 1)).selectExpr("*", "'redis-list:orders' to")
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    with pytest.raises(Exception, match="too slow") as caught:
        hot.write(frame, read_ms=now_ms - TOMBSTONE_WINDOW_MS)
    assert f"{clear_error(caught.value)}".startswith("rate is too slow: not all rows were written by 20")
    assert not stored(store, "default")
    assert hot.write(frame, read_ms=now_ms - TOMBSTONE_WINDOW_MS // 2)["stored"] == 1


def test_what_a_store_has_not_answered_to_is_not_sent_again_when_it_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tried(_: loading._Loader, puts: Sequence[Put]) -> tuple[Sequence[Put], Unknown]:
        return puts, Unknown("no answer")

    store = f"sqlite:///{tmp_path / 'delay.db'}"
    hot = Hot(store=store, namespace="default", rate=0, concurrency=1, timeout="60s")
    row = {"id": "a", "due_at": NOW, "payload": b"", "to": "redis-list:orders", "version": 1}
    settings = structs.replace(hot.settings(), until_ms=SystemClock().now_ms() + 200)
    monkeypatch.setattr(loading._Loader, "_tried", tried)
    with pytest.raises(ConfigurationError, match="rate is too slow"):
        loading.load(settings, iter([pa.RecordBatch.from_pylist([row])]))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "tier is '{tier}', which is empty; allowed: a folder that `cold put` has written"),
        ({"window": "1 week"}, "window is '1 week'"),
        ({"store": "redis:/h:secret@x"}, "url is redis:/h:***@x; allowed: redis://"),
        ({"store": "env:NO_SUCH_STORE"}, "store is 'env:NO_SUCH_STORE'"),
    ],
)
def test_a_wrong_option_is_named_and_no_day_is_claimed(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], told: str
) -> None:
    tier = f"{tmp_path / 'tier'}"
    with pytest.raises(ConfigurationError) as caught:
        promote.run(spark, tier=tier, **({"store": "sqlite:///x.db"} | options))  # type: ignore[arg-type]
    assert f"{caught.value}".startswith(told.format(tier=tier))
    assert Tier(spark, tier).standing().claimed_ms == 0
