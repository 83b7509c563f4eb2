"""What the commands of Spark's jobs take beside the options of the job: where its rows come from, mostly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from aiodelay.errors import ConfigurationError, masked_url, shortened
from aiodelay.operations.spark_options import Flag

from .command import Source
from .common import read_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["Asked", "Differences", "Kept", "Messages", "Moved", "Rows", "Told", "Truth"]


@dataclass(frozen=True, kw_only=True)
class _WithOption(Source):
    """Reads what Spark reads.

    Attributes:
        option: Spark's own for what is read, as NAME=VALUE, such as user=me; may be repeated.
    """

    option: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        read_settings("--option", self.option)  # a mistake is told before Spark begins

    def read(self, spark: SparkSession, text: str, field: str = "from") -> DataFrame:
        """Return the rows."""
        return _read(spark, text, read_settings("--option", self.option), field)


def _read(spark: SparkSession, text: str, options: Mapping[str, str] | None = None, field: str = "from") -> DataFrame:
    from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415 - `--help` needs no Spark

    return read_source(spark, text, options, field=field)


@dataclass(frozen=True, kw_only=True)
class Rows(_WithOption):
    """Rows that become messages.

    Attributes:
        from_: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
    """

    from_: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the rows."""
        return job(self.read(spark, self.from_), **options)


@dataclass(frozen=True, kw_only=True)
class Asked(_WithOption):
    """Messages that are cancelled.

    Attributes:
        ids: Which messages.
        from_: Or parquet:DIR, csv:DIR and so on, with the column id; version, of which no newer one is cancelled, and
            was_due_at, which tells where to look, may be there too.
    """

    ids: Annotated[tuple[str, ...], Flag(many=True)] = ()
    from_: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.ids) == (self.from_ is not None):
            raise ConfigurationError(
                "ids", "given with --from" if self.ids else "missing", "--ids ID …, or --from WHAT"
            )

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the messages' rows."""
        if self.from_ is not None:
            return job(self.read(spark, self.from_), **options)
        return job(spark.createDataFrame([(message_id,) for message_id in self.ids], "id STRING"), **options)


@dataclass(frozen=True, kw_only=True)
class Told(Source):
    """Batches that are told of, each as a line of JSON on stderr."""

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job."""
        return job(spark, on_batch=_tell, **options)


def _tell(batch: Mapping[str, Any]) -> None:
    print(json.dumps(batch), file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Moved(Source):
    """A cut-over, which another scheduler's messages need none of."""

    cutover: datetime | None = None
    work: str | None = None

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job, or take over from another scheduler."""
        from aiodelay.spark.jobs import takeover  # noqa: PLC0415 - `--help` needs no Spark
        from aiodelay.spark.options import store_url  # noqa: PLC0415

        if store_url(options["source"]).startswith(takeover.SOURCES):
            names = ("source", "target", "to_namespace", "verify")
            return takeover.run(**{name: options[name] for name in names if name in options})
        for name, value in (("--cutover", self.cutover), ("--work", self.work)):
            if value is None:
                raise ConfigurationError(name, "missing", "--cutover 2027-01-01T00:00:00Z --work DIR")
        return job(spark, cutover=self.cutover, work=self.work, **options)


@dataclass(frozen=True, kw_only=True)
class Truth(_WithOption):
    """What should be pending.

    Attributes:
        truth: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
    """

    truth: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the truth."""
        return job(spark, self.read(spark, self.truth, "truth"), **options)


@dataclass(frozen=True, kw_only=True)
class Differences(Truth):
    """What a reconcile has found.

    Attributes:
        differences: Folder that `reconcile --out parquet:DIR` has written, within the last 24 h.
    """

    differences: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the differences and the truth."""
        found = _read(spark, f"parquet:{self.differences}", field="differences")
        return job(spark, found, self.read(spark, self.truth, "truth"), **options)


@dataclass(frozen=True, kw_only=True)
class Kept(Source):
    """What was kept of messages.

    Attributes:
        from_: parquet:DIR of snapshots; or what a backfill was made from, with the same --map.
        archive: Only messages to which an event of this archive happened.
    """

    from_: str
    archive: str | None = None

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the rows and the events."""
        from aiodelay.spark.jobs.report import read_events  # noqa: PLC0415 - `--help` needs no Spark

        events = None if self.archive is None else read_events(spark, self.archive)
        return job(_read(spark, self.from_), events=events, **options)


@dataclass(frozen=True, kw_only=True)
class Messages(_WithOption):
    """Messages with their due times, and the rates at which they are dispatched.

    Attributes:
        rate: Messages a second, up to six with commas, such as 500,1000,2000.
        from_: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE; then no store is read.
        store: URL of the store whose pending messages are read; env:NAME or file:PATH if it holds a password.
        namespace: Whose messages, in a store that several applications share.
        lane: Only this sink's or event type's, of a store.
        from_time: Simulate from then on, ISO 8601 with an offset; from now on without it.
        to_time: Until then; 7 days without it, 92 at most.
    """

    rate: str
    from_: str | None = None
    store: Annotated[str | None, Flag(env="AIODELAY_STORE")] = None
    namespace: Annotated[str, Flag(env="AIODELAY_NAMESPACE")] = "default"
    lane: str | None = None
    from_time: datetime | None = None
    to_time: datetime | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_ is None and self.store is None:
            raise ConfigurationError("--store", "missing", "a store, or --from")
        if self.from_ is not None and self.lane is not None:
            raise ConfigurationError(
                "--lane", shortened(self.lane), "with a store; of what is read with --from, --where"
            )

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Call the job with the messages."""
        from aiodelay.spark.jobs.simulate import pending, read_rates, span_of  # noqa: PLC0415 - for `--help`

        rates, span, store = read_rates(self.rate), span_of(self.from_time, self.to_time), f"{self.store}"
        if self.from_ is not None:
            frame = self.read(spark, self.from_)
        else:
            frame = pending(spark, store=store, span=span, namespace=self.namespace, lane=self.lane)
        return job(frame, rates=rates, span=span, source=masked_url(self.from_ or store), **options)
