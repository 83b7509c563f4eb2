"""Input of the commands of `aiodelay spark`: files, databases, snapshots and ids that become a job's frames."""

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

__all__ = ["BatchLines", "CancelledIds", "Copies", "CutOver", "Differences", "DueTimes", "Rows", "Truth"]


@dataclass(frozen=True, kw_only=True)
class _WithOption(Source):
    """Input that Spark's readers load, with options for the readers.

    Attributes:
        option: An option of Spark's reader, as NAME=VALUE, such as user=me. May be repeated.
    """

    option: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        read_settings("--option", self.option)  # report a mistake before Spark starts

    def read(self, spark: SparkSession, text: str, field: str = "from") -> DataFrame:
        """Return the rows of a file or a table."""
        return _read(spark, text, read_settings("--option", self.option), field)


def _read(spark: SparkSession, text: str, options: Mapping[str, str] | None = None, field: str = "from") -> DataFrame:
    from aiodelay.spark.jobs.sources import read_source  # noqa: PLC0415 - `--help` needs no Spark

    return read_source(spark, text, options, field=field)


@dataclass(frozen=True, kw_only=True)
class Rows(_WithOption):
    """Rows that become messages.

    Attributes:
        from_: Rows to store: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE.
    """

    from_: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job on the rows."""
        return job(self.read(spark, self.from_), **options)


@dataclass(frozen=True, kw_only=True)
class CancelledIds(_WithOption):
    """Ids of the messages to cancel.

    Attributes:
        ids: Ids of the messages to cancel.
        from_: Instead of --ids, parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE with the column id.
            If there is a column version, versions newer than its value are not cancelled. If there is a column
            was_due_at, the job reads only the days of these due times.
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
        """Run the job on the ids."""
        if self.from_ is not None:
            return job(self.read(spark, self.from_), **options)
        return job(spark.createDataFrame([(message_id,) for message_id in self.ids], "id STRING"), **options)


@dataclass(frozen=True, kw_only=True)
class BatchLines(Source):
    """A job that writes a line of JSON to stderr for each batch."""

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job, with a line on stderr for each batch."""
        return job(spark, on_batch=_tell, **options)


def _tell(batch: Mapping[str, Any]) -> None:
    print(json.dumps(batch), file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class CutOver(Source):
    """The cut-over and the work folder, as in `MigrateOptions`. An import from another scheduler needs neither."""

    cutover: datetime | None = None
    work: str | None = None

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the migration, or the import from another scheduler."""
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
    """The messages that should be pending.

    Attributes:
        truth: Rows of the messages that should be pending: parquet:DIR, csv:DIR, json:DIR, orc:DIR, or
            jdbc:URL?dbtable=TABLE.
    """

    truth: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job on the truth."""
        return job(spark, self.read(spark, self.truth, "truth"), **options)


@dataclass(frozen=True, kw_only=True)
class Differences(Truth):
    """The differences of a reconcile, and the truth.

    Attributes:
        differences: The folder that `reconcile --out parquet:DIR` has written within the last 24 h.
    """

    differences: str

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job on the differences and the truth."""
        found = _read(spark, f"parquet:{self.differences}", field="differences")
        return job(spark, found, self.read(spark, self.truth, "truth"), **options)


@dataclass(frozen=True, kw_only=True)
class Copies(Source):
    """Copies of messages, and an archive of events that selects some of them.

    Attributes:
        from_: Snapshots, as parquet:DIR; or the source of a backfill, with the same --map.
        archive: Replay only messages that have an event in this archive.
    """

    from_: str
    archive: str | None = None

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job on the rows and the events."""
        from aiodelay.spark.jobs.report import read_events  # noqa: PLC0415 - `--help` needs no Spark

        events = None if self.archive is None else read_events(spark, self.archive)
        return job(_read(spark, self.from_), events=events, **options)


@dataclass(frozen=True, kw_only=True)
class DueTimes(_WithOption):
    """Due times of a store or of files, and the dispatch rates to simulate.

    Attributes:
        rate: The dispatch rates to simulate, in messages a second: up to six, separated by commas: 500,1000,2000.
        from_: Read due times from parquet:DIR, csv:DIR, json:DIR, orc:DIR, or jdbc:URL?dbtable=TABLE, not from a store.
        store: URL of the store whose pending messages are read. If the URL has a password, give env:NAME or file:PATH.
        namespace: Namespace of the messages, in a store that several applications share.
        lane: With a store, read only the messages of this sink or event type.
        from_time: Start of the simulated time, ISO 8601 with an offset; default: now.
        to_time: End of the simulated time; default: 7 days after the start, at most 92 days.
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
            raise ConfigurationError("--lane", shortened(self.lane), "--lane with a store; with --from, use --where")

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job on the due times."""
        from aiodelay.spark.jobs.simulate import pending, read_rates, span_of  # noqa: PLC0415 - for `--help`

        rates, span, store = read_rates(self.rate), span_of(self.from_time, self.to_time), f"{self.store}"
        if self.from_ is not None:
            frame = self.read(spark, self.from_)
        else:
            frame = pending(spark, store=store, span=span, namespace=self.namespace, lane=self.lane)
        return job(frame, rates=rates, span=span, source=masked_url(self.from_ or store), **options)
