"""Turns orders in Parquet into reminders in a Kafka topic, each at its due time. Then writes an archive and a report.

Run it: `python examples/spark/pipeline.py --redis redis://localhost --kafka localhost:9092 --dir pipeline`
(needs `pip install '.[kafka,redis,spark-local]'` and Java 17). The program ends with an error if the topic lacks
an order or has an order twice, if an order is early, or if a job has an unexpected result. docs/spark/pipeline.md
explains each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession

from aiodelay import Scheduler
from aiodelay.spark.jobs import archive, backfill, reconcile, report
from aiodelay.spark.session import local_session
from aiodelay.spark.summary import Summary

ORDERS = Path(__file__).with_name("orders.py")
LEAD, SPAN_S = timedelta(seconds=25), 10
MAPPING = {"id": "order_id", "due_at": "remind_at", "payload": "struct(*)"}
PATIENCE_S = 120.0


class WrongError(Exception):
    """A step has an unexpected result."""


class Pipeline:
    """The steps of the example. Each step is an ordinary job that uses the data of the step before."""

    def __init__(self, spark: SparkSession, redis: str, kafka: str, folder: Path, rows: int) -> None:
        self.spark, self.kafka, self.folder, self.rows = spark, kafka, folder, rows
        run = uuid4().hex[:8]  # so that you can run the example again on the same servers
        self.namespace, self.topic = f"pipeline-{run}", f"reminders-{run}"
        self.first = datetime.now(UTC) + LEAD
        self.store = f"{redis}{'&' if '?' in redis else '?'}journal=1000000"  # all steps need the journal

    def run(self) -> None:
        """Run all steps."""
        self.orders()
        self.backfill()
        self.reconcile("before", "same")
        asyncio.run(self.dispatch())
        self.archive()
        self.report()
        self.reconcile("after", "ended")

    def orders(self) -> None:
        span = ["--first", self.first.isoformat(), "--span-s", f"{SPAN_S}"]
        command = [sys.executable, f"{ORDERS}", f"{self.folder / 'orders'}", "--rows", f"{self.rows}", *span]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.tell("orders", rows=self.rows, first=f"{self.first:%H:%M:%S}")

    def truth(self) -> DataFrame:
        return self.spark.read.parquet(f"{self.folder / 'orders'}")

    def backfill(self) -> None:
        """Store a message for each order, twice: the second run changes nothing."""
        for what in ("stored", "known"):
            summary = backfill.run(
                self.truth(),
                store=self.store,
                namespace=self.namespace,
                mapping=MAPPING,
                to=f"kafka:{self.topic}",
                past_due="now",
            )
            self.expect(summary, {"rows": self.rows, what: self.rows})

    def reconcile(self, when: str, kind: str) -> None:
        """Compare the store with all orders. The time of the comparison is before the first order is due."""
        summary = reconcile.run(
            self.spark,
            self.truth(),
            store=self.store,
            namespace=self.namespace,
            mapping=MAPPING,
            to=f"kafka:{self.topic}",
            margin="0s",
            now=self.first - timedelta(minutes=30),
        )
        self.expect(summary, {"rows": self.rows, "rejected": 0, kind: self.rows}, when)

    async def dispatch(self) -> None:
        """Deliver each order at its due time, and read the records of the topic."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka)
        await admin.start()
        await admin.create_topics([NewTopic(self.topic, 2, 1)])
        await admin.close()
        scheduler = Scheduler(self.store, namespace=self.namespace, sinks=[f"kafka://{self.kafka}"])
        async with AIOKafkaConsumer(self.topic, bootstrap_servers=self.kafka, auto_offset_reset="earliest") as consumer:
            async with scheduler:
                records = await self.arrivals(consumer)
            ends = await consumer.end_offsets(consumer.assignment())
        self.check(records, sum(ends.values()))

    async def arrivals(self, consumer: AIOKafkaConsumer) -> list[ConsumerRecord]:
        found: list[ConsumerRecord] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(found) < self.rows:
                    found.append(await consumer.getone())
        except TimeoutError:
            raise WrongError(f"after {PATIENCE_S:g} s only {len(found)} of {self.rows} orders have arrived") from None
        return found

    def check(self, records: Sequence[ConsumerRecord], in_topic: int) -> None:
        """Check that each order is in the topic once, and that none was written before its due time."""
        orders = [json.loads(record.value) for record in records]
        early = sum(
            record.timestamp < datetime.fromisoformat(order["remind_at"]).timestamp() * 1000
            for record, order in zip(records, orders, strict=True)
        )
        distinct = len({order["order_id"] for order in orders})
        self.tell("dispatch", topic=self.topic, records=in_topic, orders=distinct, early=early)
        if (in_topic, distinct, early) != (self.rows, self.rows, 0):
            raise WrongError(f"dispatch: {in_topic} records of {distinct} orders, {early} early")

    def archive(self) -> None:
        """Write the journal to Parquet, twice: the second run has nothing to write."""
        for n in (3 * self.rows, 0):  # stored, claimed, delivered
            summary = archive.run(
                self.spark, store=self.store, namespace=self.namespace, to=f"{self.folder / 'archive'}"
            )
            self.expect(summary, {"rows": n})

    def report(self) -> None:
        """Report the lateness of the orders as Parquet, CSV and a page."""
        summary = report.run(
            self.spark,
            archive=f"{self.folder / 'archive'}",
            parquet=f"{self.folder / 'report'}",
            csv=self.folder / "report.csv",
            html=self.folder / "report.html",
        )
        self.expect(summary, {"delivered": self.rows, "early": 0, "unclaimed": 0, "dead": 0})

    def expect(self, summary: Summary, expected: Mapping[str, int], when: str = "") -> None:
        """Print the counts of a job, and compare them with the expected counts."""
        told = summary.shape()
        found = {name: told[name] if name in ("rows", "rejected") else summary.counts.get(name) for name in expected}
        self.tell(f"{summary.job} {when}".strip(), **found, seconds=round(summary.seconds, 1))
        if found != expected:
            raise WrongError(f"{summary.job} {when}: found {found}, expected {expected}; the whole summary: {told}")

    def tell(self, step: str, **facts: object) -> None:
        print(f"{step:18}" + "  ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Orders from Parquet to reminders in Kafka, archived and reported.")
    parser.add_argument("--redis", default="redis://localhost")
    parser.add_argument("--kafka", default="localhost:9092", help="HOST:PORT")
    parser.add_argument("--dir", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--rows", type=int, default=500)
    given = parser.parse_args()
    given.dir.mkdir(parents=True)
    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    spark = local_session("local[2]", conf)
    try:
        Pipeline(spark, given.redis, given.kafka, given.dir, given.rows).run()
    except WrongError as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 1
    finally:
        spark.stop()
    print(f"{'done':18}the report: {given.dir / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
