"""Frames to write, and the content of a store afterwards, for the tests of writing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import Cancel, Demand, Done, Query, Record

__all__ = ["TO", "end_some", "frame_of", "given", "stored"]

TO = "redis-list:orders"
MOST = 500


def frame_of(spark: SparkSession, rows: int, *, due: str = "2030-01-01", partitions: int = 2) -> DataFrame:
    """Return messages `0` … with their numbers as payloads."""
    numbers = spark.range(0, rows, 1, partitions)
    return numbers.selectExpr("string(id) id", f"timestamp'{due}' due_at", "string(id) payload")


def given(url: str, namespace: str, **options: str) -> dict[str, str]:
    """Return options for writing, without a cap."""
    return {"store": url, "namespace": namespace, "to": TO, "rate": "0"} | options


def stored(url: str, namespace: str) -> dict[str, Record]:
    """Return what is pending or in flight, by id; each once, or this fails."""

    async def read() -> list[Record]:
        async with open_store(url, namespace=namespace, clock=None) as store:
            found: list[Record] = []
            after = None
            while page := await store.search(Query(after=after, limit=1000)):
                found += [each.record for each in page]
                after = (page[-1].next_attempt_ms, page[-1].record.id)
            return found

    records = asyncio.run(read())
    by_id = {record.id: record for record in records}
    assert len(by_id) == len(records)
    return by_id


def end_some(url: str, namespace: str, deliver: int, cancel: Sequence[str] = ()) -> set[str]:
    """Cancel some messages, deliver as many of those that are due; return the ids of both."""

    async def play() -> set[str]:
        ended = set(cancel)
        async with open_store(url, namespace=namespace, clock=None) as store:
            await store.apply([Cancel(NO_OP, message_id) for message_id in cancel])
            async with store.work("tests", ["redis-list"]) as work:
                while len(ended) < deliver + len(cancel):
                    wanted = Demand(min(deliver + len(cancel) - len(ended), MOST))
                    claimed = await work.claim({"redis-list": wanted}, request=new_op().hex(), lease_ms=60_000)
                    assert claimed.claims, "nothing is due"
                    await work.settle(
                        [Done(each.record.id, each.record.revision, each.token) for each in claimed.claims]
                    )
                    ended |= {each.record.id for each in claimed.claims}
        return ended

    return asyncio.run(play())
