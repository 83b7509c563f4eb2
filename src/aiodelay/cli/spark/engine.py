"""`aiodelay spark engine`: a scheduler on Spark alone, from Kafka to Kafka (experimental)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from .common import Cluster, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["engine"]


def engine(
    *,
    in_: Annotated[str, Parameter(name="--in")],
    checkpoint: str,
    out: str | None = None,
    dead: str | None = None,
    slot: str = "1s",
    trigger: str = "500ms",
    shards: Annotated[int, Parameter(validator=Number(gte=1))] = 4,
    starting: Literal["earliest", "latest"] = "earliest",
    max_rows_per_batch: Annotated[int, Parameter(validator=Number(gte=1))] = 100_000,
    fail_on_data_loss: bool = True,
    timeout: str = "60s",
    cluster: Cluster = Cluster(),
) -> int:
    """Deliver what a topic's records schedule until interrupted, with Spark and Kafka alone. Experimental.

    Late by a second or so, never early, at least once. What each batch delivered is a line of JSON on stderr.

    Args:
        in_: kafka://host:9092/TOPIC; env:NAME or file:PATH if it holds a password.
        checkpoint: Folder of what was read and of what waits, where Spark can write.
        out: kafka://host:9092, where the topics are that records name; without it, where --in is.
        dead: The topic for dead letters; without it, TOPIC.dead. It is created if it is missing.
        slot: Length of a slot, the most that it adds to lateness; a checkpoint keeps to one.
        trigger: How often a batch begins.
        shards: Over how many tasks the messages of a slot are spread; a checkpoint keeps to one number.
        starting: Where a new checkpoint begins.
        max_rows_per_batch: Most records that are read in a batch.
        fail_on_data_loss: End with an error where records were deleted before they were read.
        timeout: How long to try again while Kafka takes nothing.
    """

    def job(spark: SparkSession) -> Summary:
        from aiodelay.spark.jobs.engine import run  # noqa: PLC0415 - `--help` needs no PySpark

        return run(
            spark,
            source=in_,
            checkpoint=checkpoint,
            to=out,
            dead=dead,
            slot=slot,
            trigger=trigger,
            shards=shards,
            starting=starting,
            max_rows_per_batch=max_rows_per_batch,
            fail_on_data_loss=fail_on_data_loss,
            timeout=timeout,
            on_batch=_tell,
        )

    return run_job(job, cluster)


def _tell(batch: Mapping[str, Any]) -> None:
    print(json.dumps(batch), file=sys.stderr, flush=True)
