"""Make a truth (the expected orders) and a store with known differences from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from aiodelay.backends.registry import open_store
from aiodelay.core.values import Command, Demand, Done, Outcome, SettleOutcome, Snapshot
from aiodelay.spark.jobs.mapping import mapped
from aiodelay.spark.writing import write_frame

__all__ = ["DUE", "LANE", "MAPPING", "TO", "apply", "deliver", "get", "orders", "plant"]

DUE = datetime(2031, 1, 1, tzinfo=UTC)
LANE = "redis-list"
TO = f"{LANE}:orders"
MAPPING = {"id": "concat('order-', number)", "due_at": "remind_at", "payload": "body"}
ORPHANS = 5


def orders(spark: SparkSession, n: int) -> DataFrame:
    """Return the orders 0 to n-1. Each order is due a second after the order before."""
    at = F.timestamp_seconds(F.lit(DUE.timestamp()) + F.col("id"))
    return spark.range(n).select(
        F.col("id").alias("number"), at.alias("remind_at"), F.repeat(F.lit("é"), 20).alias("body")
    )


def plant(truth: DataFrame, url: str, namespace: str) -> None:
    """Store the truth and five extra orders. Orders …1 are left out, …2 get other times, and …3 get other bodies."""
    part = F.col("number") % 100
    orphans = truth.limit(ORPHANS).withColumn("number", F.col("number") + 1_000_000)
    stored = truth.where(part != 1).unionByName(orphans)
    later = F.col("remind_at") + F.expr("interval 1 hour")
    stored = stored.withColumn("remind_at", F.when(part == 2, later).otherwise(F.col("remind_at")))
    stored = stored.withColumn("body", _other(part == 3))
    write_frame(mapped(stored, MAPPING, to=TO), {"store": url, "namespace": namespace, "rate": "0"})


def _other(where: Column) -> Column:
    return F.when(where, F.lit("other")).otherwise(F.col("body"))


def apply(url: str, namespace: str, *commands: Command) -> Sequence[Outcome]:
    """Apply commands, as a live program does."""

    async def run() -> Sequence[Outcome]:
        async with open_store(url, namespace=namespace, clock=None) as store:
            return await store.apply(commands)

    return asyncio.run(run())


def get(url: str, namespace: str, message_id: str) -> Snapshot | None:
    """Return the current state of a message."""

    async def run() -> Snapshot | None:
        async with open_store(url, namespace=namespace, clock=None) as store:
            return await store.get(message_id)

    return asyncio.run(run())


def deliver(url: str, namespace: str, n: int) -> None:
    """Claim and settle `n` due messages."""

    async def run() -> None:
        async with open_store(url, namespace=namespace, clock=None) as store, store.work("test", [LANE]) as work:
            claimed = await work.claim({LANE: Demand(n)}, request="test", lease_ms=10_000)
            assert len(claimed.claims) == n
            done = [Done(each.record.id, each.record.revision, each.token) for each in claimed.claims]
            assert set(await work.settle(done)) == {SettleOutcome.SETTLED}

    asyncio.run(run())
