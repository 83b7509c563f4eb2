"""The options of the Spark jobs, declared once for `aiodelay.spark.jobs` and for the commands of `aiodelay spark`.

This module does not import PySpark, so `aiodelay spark JOB --help` works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

from aiodelay.core.durations import Duration

__all__ = [
    "ArchiveOptions",
    "BackfillOptions",
    "By",
    "ColdCancelOptions",
    "ColdPutOptions",
    "CompactOptions",
    "EngineOptions",
    "Flag",
    "Kept",
    "Kind",
    "MigrateOptions",
    "OnConflict",
    "Overdue",
    "PaceOptions",
    "PastDue",
    "PromoteOptions",
    "RateOptions",
    "ReconcileOptions",
    "RepairOptions",
    "ReplayOptions",
    "ReportOptions",
    "SimulateOptions",
    "SnapshotOptions",
    "StoreOptions",
    "TruthOptions",
    "WriteOptions",
]


class Flag(NamedTuple):
    """Facts about an option for the command line, in addition to its name, type and default.

    Attributes:
        name: The name of the option on the command line; None = the name of the attribute.
        env: The environment variable that gives the option.
        least: The lowest allowed value.
        most: The highest allowed value.
        signed: Whether the value may begin with a minus sign.
        many: Whether several values may follow the option.
    """

    name: str | None = None
    env: str | None = None
    least: float | None = None
    most: float | None = None
    signed: bool = False
    many: bool = False


By: TypeAlias = Literal["lane", "hour", "day"]
"""A grouping of a report's rows: by event type or sink, by hour, or by day in UTC."""
Kept: TypeAlias = Literal["messages", "dead"]
"""The content of a snapshot: pending messages, or dead letters."""
Kind: TypeAlias = Literal["missing", "drift"]
"""A kind of difference that a repair removes."""
OnConflict: TypeAlias = Literal["insert", "newer"]
"""The version of an id that stays: the first version, or the highest version."""
Overdue: TypeAlias = Literal["backlog", "ignore"]
"""The rule for messages due before the simulated time: count them as due when this time starts, or leave them out."""
PastDue: TypeAlias = Literal["reject", "now"]
"""The rule for rows whose due time is already past."""

_Store: TypeAlias = Annotated[str, Flag(env="AIODELAY_STORE")]
_Namespace: TypeAlias = Annotated[str, Flag(env="AIODELAY_NAMESPACE")]
_Columns: TypeAlias = Annotated[Mapping[str, str] | None, Flag("map")]
_AtLeast1: TypeAlias = Annotated[int, Flag(least=1)]
_Natural: TypeAlias = Annotated[int, Flag(least=0)]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The store and the namespace of a job.

    Attributes:
        store: The URL of the store, such as redis://host or sqlite:///delay.db. If it holds a password, write env:NAME
            or file:PATH instead: the driver and each executor then read the URL from that variable or file.
        namespace: The namespace, if several applications share the store.
    """

    store: _Store = field(repr=False)  # it may hold a password
    namespace: _Namespace = "default"


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The speed at which a job uses a store.

    Attributes:
        rate: The most messages per second, of all tasks together; 0 = no limit.
        concurrency: The number of tasks that work at the same time. Default: the number of cores of the session.
    """

    rate: _Natural = 20_000
    concurrency: Annotated[int | None, Flag(least=1)] = None


@dataclass(frozen=True, kw_only=True)
class PaceOptions(RateOptions):
    """The speed at which a job uses a store, and the time for which it retries.

    Attributes:
        timeout: The time for which a task retries if the store does not answer.
    """

    timeout: str = "60s"


@dataclass(frozen=True, kw_only=True)
class WriteOptions(PaceOptions, StoreOptions):
    """The store to which a job writes, its speed, and the time for which it retries."""


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(StoreOptions):
    """Options of `archive`. The store must have a journal. A Kafka store must have a history topic.

    Attributes:
        to: The folder of the archive, on a file system to which Spark can write.
        checkpoint: The folder for the reading position. Default: a folder in the archive.
        every: Run until interrupted, and read new events at this interval, such as 1m. Without this option, the job
            runs once.
        max_rows_per_batch: The most events in a batch.
        fail_on_data_loss: Fail if events were trimmed before the job read them.
    """

    to: str
    checkpoint: str | None = None
    every: Duration | None = None
    max_rows_per_batch: _AtLeast1 = 1_000_000
    fail_on_data_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class BackfillOptions(WriteOptions):
    """Options of `backfill`.

    Attributes:
        to: The destination of rows that name no destination: SINK:ADDRESS, or handler:TYPE.
        mapping: The columns or SQL expressions that give the parts of a message, such as
            id=order_id,due_at=remind_at,payload=struct(*). May be repeated. Without this option, the columns must have
            the names of the parts.
        conflict: The version of an id that stays. insert: the first version; newer: the highest version.
        min_lead: Reject rows that are due within this duration from now. With past_due now, this has no effect.
        past_due: The rule for rows whose due time is past: reject them, or deliver them now.
        max_payload: The most bytes of a payload.
        timezone: The time zone of times without an offset. Without this option, rows with such times are rejected.
        rejects: A new folder for the rejected rows, as Parquet, each with its reason.
        dry_run: Only count the rows; store nothing.
    """

    to: str | None = None
    mapping: _Columns = None
    conflict: OnConflict = "insert"
    min_lead: Duration = "0s"
    past_due: PastDue = "reject"
    max_payload: int = 262_144
    timezone: str | None = None
    rejects: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class ColdPutOptions(PaceOptions):
    """Options of `cold put`. The default of `min_lead` is the default window of `promote`, plus one day.

    Attributes:
        tier: The folder of the tier, on a file system that Spark can read and write. The job creates it.
        store: The store into which the tier is promoted. The job writes rows that are due too soon into this store. If
            a row replaces a message of this store, the job ends that message. Without --store, the job rejects rows
            that need a change of the store.
        namespace: The namespace of the messages.
        to: The destination of rows that name no destination: SINK:ADDRESS, or handler:TYPE.
        mapping: The columns or SQL expressions that give the parts of a message, as for `backfill`.
        was_due: A column or SQL expression that gives the due time of the message that a row replaces; null for new
            messages. With this option, the job reads only the days of these due times.
        conflict: The version of an id that stays. insert: the first version; newer: the highest version.
        min_lead: Rows that are due within this duration from now do not go into the tier.
        max_payload: The most bytes of a payload.
        timezone: The time zone of times without an offset. Without this option, rows with such times are rejected.
        rejects: A new folder for the rejected rows, as Parquet, each with its reason.
        dry_run: Only count the rows; store nothing.
        now: The time to use as the present, ISO 8601 with an offset. Default: the clock of this machine.
    """

    tier: str
    store: str | None = field(default=None, repr=False)
    namespace: _Namespace = "default"
    to: str | None = None
    mapping: _Columns = None
    was_due: str | None = None
    conflict: OnConflict = "insert"
    min_lead: Duration = "8d"
    max_payload: int = 262_144
    timezone: str | None = None
    rejects: str | None = None
    dry_run: bool = False
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class ColdCancelOptions(PaceOptions):
    """Options of `cold cancel`.

    Attributes:
        tier: The folder of the tier.
        store: The store into which the tier is promoted.
        namespace: The namespace of the messages.
        timezone: The time zone of times without an offset.
        now: The time to use as the present, ISO 8601 with an offset. Default: the clock of this machine.
    """

    tier: str
    store: str | None = field(default=None, repr=False)
    namespace: _Namespace = "default"
    timezone: str | None = None
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class CompactOptions:
    """Options of `compact`.

    Attributes:
        archive: The folder that `archive` writes, on this machine or mounted here.
        before: Merge the days before this day, YYYY-MM-DD. Default: the days before today (UTC).
        keep: The time for which old files stay, for readers that have already started with them.
    """

    archive: str
    before: str | None = None
    keep: Duration = "1d"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `engine`.

    A slot is a short period of due times. The job delivers all messages of a slot together, after the slot has ended.

    Attributes:
        source: The topic of the requests: kafka://host:9092/TOPIC. If it holds a password, write env:NAME or file:PATH.
        checkpoint: The folder for the reading positions and the waiting messages, where Spark can write.
        to: The cluster of the target topics: kafka://host:9092. Default: the cluster of --in.
        dead: The topic for dead letters. Default: TOPIC.dead. The job creates a missing topic.
        slot: The length of a slot. The job delivers the messages of a slot together, so a slot adds at most its length
            to lateness. The length cannot change for one checkpoint.
        trigger: The time between the starts of two batches.
        shards: The number of tasks that share the messages of a slot. The number cannot change for one checkpoint.
        starting: The position at which a new checkpoint begins.
        max_rows_per_batch: The most records to read in a batch.
        fail_on_data_loss: Fail if records were deleted before the job read them.
        timeout: The time for which the job retries if Kafka takes nothing.
    """

    source: Annotated[str, Flag("in")] = field(repr=False)
    checkpoint: str
    to: Annotated[str | None, Flag("out")] = field(default=None, repr=False)
    dead: str | None = None
    slot: Duration = "1s"
    trigger: Duration = "500ms"
    shards: _AtLeast1 = 4
    starting: Literal["earliest", "latest"] = "earliest"
    max_rows_per_batch: _AtLeast1 = 100_000
    fail_on_data_loss: bool = True
    timeout: str = "60s"


@dataclass(frozen=True, kw_only=True)
class MigrateOptions(PaceOptions):
    """Options of `migrate`.

    Attributes:
        source: The URL of the store to move messages from. If it holds a password, write env:NAME or file:PATH. To
            import from another scheduler, stop that scheduler first, and write etf1+kafka://host:9092/schedules or
            fred84+redis://host?prefix=de_.
        target: The URL of the store to move messages to.
        cutover: The time of the cut-over, ISO 8601 with an offset. Messages due before the cut-over stay in the source.
            If the cut-over is past, the job moves the remaining messages that are due later than `lead` from now.
        work: A folder for this migration alone, where the driver and the executors can write. The job writes payloads
            to this folder.
        namespace: The namespace in the source.
        to_namespace: The namespace in the target.
        lead: The shortest time from the start of a run to the cut-over.
        margin: Do not move messages that are due within this duration from now.
        passes: The most passes. 0 = until a pass finds nothing, or until `margin` before the cut-over.
        verify: Compare all parts of each copy with the original message, before the job removes the original.
    """

    source: Annotated[str, Flag("from")] = field(repr=False)
    target: Annotated[str, Flag("to")] = field(repr=False)
    cutover: datetime
    work: str
    namespace: str = "default"
    to_namespace: str = "default"
    lead: Duration = "10m"
    margin: Duration = "2m"
    passes: _Natural = 0
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class PromoteOptions(WriteOptions):
    """Options of `promote`. All promotions of a tier go into the same store, until `new_store` changes the store.

    Attributes:
        tier: The folder of the tier, as for `cold put`.
        window: Move each message at least this duration before it is due.
        min_lead: Count messages as late if the job moves them less than this duration before they are due.
        new_store: Promote into this store from now on. Without this flag, the job refuses another store than before.
        dry_run: Only count the messages; move nothing.
        now: The time to use as the present, ISO 8601 with an offset. Default: the clock of this machine.
    """

    tier: str
    window: Duration = "7d"
    min_lead: Duration = "1d"
    new_store: bool = False
    dry_run: bool = False
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TruthOptions(StoreOptions):
    """The table of the messages that should be pending in a store (the "truth").

    Attributes:
        mapping: The columns or SQL expressions that give the parts of a message, as for `backfill`. Parts that the
            mapping does not give are not compared.
        to: The destination of rows that name no destination: SINK:ADDRESS, or handler:TYPE.
        timezone: The time zone of times without an offset.
    """

    mapping: _Columns = None
    to: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReconcileOptions(TruthOptions):
    """Options of `reconcile`.

    Attributes:
        lane: Compare only messages of this sink or event type. The truth must then hold only such messages.
        margin: Ignore messages that are due within this duration from now. The duration must be longer than the time to
            read the store.
        now: The time of the comparison, ISO 8601 with an offset. Default: the clock of this machine.
        out: The output for the differences: parquet:DIR (which `repair` reads), csv:DIR or json:DIR.
        overwrite: Replace existing output.
    """

    lane: str | None = None
    margin: Duration = "5m"
    now: datetime | None = None
    out: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class RepairOptions(TruthOptions):
    """Options of `repair`.

    Attributes:
        kinds: The kinds of differences to repair. May be repeated.
        delete_orphans: Also cancel orphans, at most this number. An orphan is a pending message that is not in the
            truth. If there are more orphans, the job changes nothing.
        max_fraction: The most differences, as a part (0 to 1) of the truth's rows. If there are more differences, the
            job changes nothing.
        margin: Do not change messages that are due within this duration from now.
        now: The time of the repair, ISO 8601 with an offset. Default: the clock of this machine.
    """

    kinds: Sequence[Kind] = ("missing", "drift")
    delete_orphans: _Natural = 0
    max_fraction: Annotated[float, Flag(least=0, most=1)] = 0.01
    margin: Duration = "5m"
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(RateOptions, StoreOptions):
    """Options of `replay`.

    Attributes:
        name: The name of this replay. New ids are ID-replay-NAME.
        same_ids: Keep the old ids instead of new ids. A pending message with the same id is replaced.
        mapping: The columns or SQL expressions that give the parts of a message, as for backfill. Without this option,
            the columns must have the names of the parts.
        where: An SQL condition on the rows, such as "to = 'kafka:orders'".
        events_where: An SQL condition on the events, such as "event = 'delivered' and day = '2026-11-21'".
        shift: The change of all due times, such as +1d or -2h. The value "now" makes all messages due at once, and only
            the rate limits the replay.
        to: Another destination for all messages: SINK:ADDRESS, or handler:TYPE.
        rejects: A new folder for rows that cannot become messages, as Parquet, each with its reason.
        dry_run: Only count the rows; store nothing.
    """

    name: str | None = None
    same_ids: bool = False
    mapping: _Columns = None
    where: str | None = None
    events_where: str | None = None
    shift: Annotated[Duration, Flag(signed=True)] = "now"
    to: str | None = None
    rate: _Natural = 500
    rejects: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `report`.

    Attributes:
        archive: The folder of archived events, where Spark can read.
        by: The groups of the rows: lane, and hour or day in UTC. May be repeated.
        start: Count events at this time or later, ISO 8601 with an offset.
        end: Count events before this time, ISO 8601 with an offset.
        where: An SQL condition on the columns of the events, such as "lane = 'kafka'".
        parquet: A folder for the rows, where Spark can write.
        csv: A file on this machine for the same rows.
        html: A file on this machine for a page with plots.
        overwrite: Replace existing output.
    """

    archive: str
    by: Sequence[By] = ("lane", "hour")
    start: Annotated[datetime | None, Flag("from")] = None
    end: Annotated[datetime | None, Flag("to")] = None
    where: str | None = None
    parquet: str | None = None
    csv: Path | None = None
    html: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of `simulate`.

    Attributes:
        mapping: The column or SQL expression that gives the due time, as for backfill: due_at=remind_at. Other parts
            are ignored.
        where: An SQL condition on the rows of --from, such as "to = 'kafka:orders'".
        timezone: The time zone of times without an offset.
        overdue: The rule for messages that are due before the simulated time. backlog: count them as due at the start
            of the simulated time. ignore: leave them out.
        scale: Simulate this multiple of the messages, 0.01 to 100.
        slot: The precision of due times, such as 100ms or 1s. Messages due within one slot count as due at the start of
            the slot. The value must divide an hour. Default: 1ms to 10s, by the length of the simulated time.
        out: A folder on this machine for simulate.csv (a row for each hour and rate) and simulate.html (plots).
        overwrite: Replace existing output.
    """

    mapping: _Columns = None
    where: str | None = None
    timezone: str | None = None
    overdue: Overdue = "backlog"
    scale: float = 1.0
    slot: Duration | None = None
    out: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions(StoreOptions):
    """Options of `snapshot`.

    Attributes:
        to: The folder of the snapshots, where Spark can write.
        table: The content: pending messages, or dead letters.
    """

    to: str
    table: Kept = "messages"
