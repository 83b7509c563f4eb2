"""Code that needs a separate process: drivers that are killed, and sessions that must be the only one.

`python -m tests.spark.program COMMAND …`; each prints what came of it, or is killed before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from aiodelay.spark.cold import Tier
from aiodelay.spark.jobs import archive, engine, migrate, promote
from aiodelay.spark.moving import Place, Taker
from aiodelay.spark.session import local_session
from aiodelay.spark.writing import write_frame
from tests.spark.messages import frame_of, given

at = datetime.fromisoformat
ROWS = 2_000
QUICK_QUERIES = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""A query of ten rows takes less to interpret than to compile, and to plan once than stage by stage.

PySpark asks Java twice for each column where in Python it is used, for its errors, unless told not to.
"""
PATIENT = {"spark.python.authenticate.socketTimeout": "120s"}
"""So long Spark and a Python worker wait for each other on a loaded machine, once the worker has started."""
BUSY = "Python worker failed to connect back"
"""How Spark ends a stream whose Python took more than ten seconds to start, which may be on a loaded machine."""
ARCHIVED: Mapping[str, Any] = {"max_rows_per_batch": 5, "every": "3s"}
OWN_PORT = {"SPARK_TESTING": "yes"}
"""What lets Spark start a session's own Connect server at a free port: else all of them want port 15002 at once."""


def session(master: str, conf: Mapping[str, str] | None = None) -> SparkSession:
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    return local_session(master or None, settings | PATIENT | dict(conf or {}))


def write_slowly(master: str, url: str, namespace: str) -> None:
    """Write at a rate at which it takes minutes."""
    write(session(master), url, namespace, rate="2", concurrency="1")


def write(spark: SparkSession, url: str, namespace: str, **options: str) -> None:
    frame = frame_of(spark, ROWS, due="2020-01-01")
    frame.write.format("aiodelay").mode("append").options(**given(url, namespace, **options)).save()


def follow(spark: SparkSession, url: str, namespace: str, folder: str, **options: str) -> None:
    """Write what the files of a folder hold, two in a batch, from where it was left."""
    files = spark.readStream.schema("id string, due_at timestamp, payload string").option("maxFilesPerTrigger", 2)
    query = (
        files.parquet(f"{folder}/rows")
        .writeStream.format("aiodelay")
        .options(**given(url, namespace, **options))
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def round_trip(master: str, url: str, namespace: str) -> None:
    """Write and read by the data source alone: prints how many were read."""
    spark = session(master)
    frame_of(spark, ROWS).write.format("aiodelay").mode("append").options(**given(url, namespace)).save()
    reader = spark.read.format("aiodelay").option("store", url).option("namespace", namespace)
    print(reader.load().where("due_at = timestamp'2030-01-01' AND string(payload) = id").count())


def count_again(master: str, url: str, namespace: str) -> None:
    """Do the same, and write once more as jobs do: prints what came of that too."""
    round_trip(master, url, namespace)
    print(write_frame(frame_of(session(master), ROWS), given(url, namespace)))


def speculate(master: str, url: str, namespace: str, folder: str) -> None:
    """Write while the first attempt at a part waits for Spark to run a copy beside it: prints what came of it."""
    conf = {"interval": "100ms", "quantile": "0.5", "multiplier": "1.1", "minTaskRuntime": "100ms"}
    speculation = {"spark.speculation": "true"} | {f"spark.speculation.{name}": text for name, text in conf.items()}
    spark = session(master, speculation | {"spark.executor.memory": "512m"})

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        copy = Path(folder, "copy")
        for batch in batches:
            yield batch.slice(0, 100)
            if task.partitionId() == 1 and task.attemptNumber():
                copy.touch()
            while task.partitionId() == 1 and not copy.exists():
                time.sleep(0.01)
            yield batch.slice(100)

    frame = frame_of(spark, ROWS)
    print(write_frame(frame.mapInArrow(slow, frame.schema), given(url, namespace)).rows)


def do_all_slowly(url: str, kafka: str, folder: str, now: str, cutover: str) -> None:
    """Write, stream, promote, migrate and archive at once, and run an engine: each for minutes."""
    place, spark = Path(folder), session("local[16]", QUICK_QUERIES)
    take_out_slowly()
    jobs: list[Callable[[], object]] = [
        lambda: write(spark, url, "written", rate="2", concurrency="1"),
        lambda: follow(spark, url, "streamed", folder, rate="1", concurrency="1"),
        lambda: promote.run(
            spark, tier=f"{place / 'tier'}", store=url, namespace="promoted", now=at(now), rate=1, concurrency=1
        ),
        lambda: migrate.run(spark, **migration(url, "copied", cutover, folder), rate=1, concurrency=1),
        lambda: migrate.run(spark, **migration(url, "taken", cutover, folder), rate=0, concurrency=1),
        lambda: archive.run(
            spark, store=f"sqlite:///{place / 'noted.db'}?journal=100000", **ARCHIVED, to=f"{place / 'archive'}"
        ),
    ]

    def deliver() -> None:
        engine.run(spark, source=kafka, checkpoint=f"{place / 'engine'}", shards=2, trigger="3s")

    def run(job: Callable[[], object]) -> None:
        try:
            spark.createDataFrame([], "n INT")  # makes this session that of the thread, by which Spark finds a source
            begin_again_if_slow(job)
        except Exception:
            traceback.print_exc()
            raise
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # it should go on for minutes

    threads = [threading.Thread(target=run, args=(job,)) for job in (*jobs, deliver)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def begin_again_if_slow(job: Callable[[], object]) -> None:
    """Run a job, and run it again each time a Python worker took longer to start than Spark waits."""
    while True:
        try:
            job()
        except StreamingQueryException as error:
            if BUSY not in f"{error}":
                raise
            traceback.print_exc()
        else:
            return


def take_out_slowly() -> None:
    """Let migrations of this process take messages out of their source one a second, at whatever rate they copy."""

    def slow(source: Place, margin_ms: int, _: float, patience_ms: int) -> Taker:
        return Taker(source, margin_ms, 1, patience_ms)

    mock.patch.object(migrate, "Taker", slow).start()


def migration(url: str, name: str, cutover: str, folder: str) -> dict[str, Any]:
    """Return where a migration moves messages from and to."""
    places = {"source": url, "namespace": f"{name}-from", "target": url, "to_namespace": f"{name}-to"}
    return {**places, "cutover": at(cutover), "work": f"{folder}/{name}"}


def promote_and_die(step: str, tier: str, url: str, namespace: str, now: str) -> None:
    """Promote, and be killed when days were claimed, are to be marked as promoted, or while it writes for minutes."""

    def dying(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - of any step
        if step == "claim":
            claim(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    spark, claim = session("local[2]"), Tier.claim
    if step != "write":
        setattr(Tier, step, dying)
    rate = 20 if step == "write" else 0
    promote.run(spark, tier=tier, store=url, namespace=namespace, now=at(now), rate=rate, concurrency=1)


def migrate_slowly(url: str, source: str, target: str, cutover: str, folder: str) -> None:
    """Move what one namespace holds to another, at a rate at which each step takes long."""
    places = {"source": url, "namespace": source, "target": url, "to_namespace": target}
    given = {"cutover": at(cutover), "work": folder, "rate": 100, "concurrency": 2}
    migrate.run(session("local[2]"), **places, **given)  # type: ignore[arg-type]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
