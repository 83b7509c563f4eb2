"""The options of the Spark jobs, with types, defaults and help texts.

`aiodelay.spark.jobs` and the commands of `aiodelay spark` both read these dataclasses. This module does not import
PySpark, so that `aiodelay spark JOB --help` works without PySpark.
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
    """Additional data of an option for the command line.

    Attributes:
        name: The name on the command line; None: the name of the field.
        env: The environment variable from which the option is read if the command line does not give it.
        least: The smallest allowed value.
        most: The largest allowed value.
        signed: The value may begin with a minus.
        many: The option takes several values after one name.
    """

    name: str | None = None
    env: str | None = None
    least: float | None = None
    most: float | None = None
    signed: bool = False
    many: bool = False


By: TypeAlias = Literal["lane", "hour", "day"]
"""Columns by which a report groups its rows: event type or sink, hour or day in UTC."""
Kept: TypeAlias = Literal["messages", "dead"]
"""The table that a snapshot copies."""
Kind: TypeAlias = Literal["missing", "drift"]
"""The kinds of difference that a repair can repair."""
OnConflict: TypeAlias = Literal["insert", "newer"]
"""The version of an id that the store keeps: the first, or the highest."""
Overdue: TypeAlias = Literal["backlog", "ignore"]
"""Messages that are due before the simulated time: they wait as a backlog at its start, or are left out."""
PastDue: TypeAlias = Literal["reject", "now"]
"""Rows whose due time has passed: reject them, or store them for delivery now."""

_Store: TypeAlias = Annotated[str, Flag(env="AIODELAY_STORE")]
_Namespace: TypeAlias = Annotated[str, Flag(env="AIODELAY_NAMESPACE")]
_Columns: TypeAlias = Annotated[Mapping[str, str] | None, Flag("map")]
_AtLeast1: TypeAlias = Annotated[int, Flag(least=1)]
_Natural: TypeAlias = Annotated[int, Flag(least=0)]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The store and the namespace of a job.

    Attributes:
        store: URL of the store, such as redis://host or sqlite:///delay.db. If the URL has a password, give env:NAME
            or file:PATH: the variable or file must exist here and on each executor.
        namespace: Namespace of the messages, in a store that several applications share.
    """

    store: _Store = field(repr=False)  # it may hold a password
    namespace: _Namespace = "default"


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The rate of a job.

    Attributes:
        rate: Most messages a second, over all tasks; 0 = no limit.
        concurrency: Number of tasks that work at once; default: the number of cores of the session.
    """

    rate: _Natural = 20_000
    concurrency: Annotated[int | None, Flag(least=1)] = None


@dataclass(frozen=True, kw_only=True)
class PaceOptions(RateOptions):
    """The rate of a job, and how long it repeats calls to a store that does not answer.

    Attributes:
        timeout: How long a task repeats a call while the store does not answer.
    """

    timeout: str = "60s"


@dataclass(frozen=True, kw_only=True)
class WriteOptions(PaceOptions, StoreOptions):
    """The store to which a job writes, its rate, and its timeout."""


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(StoreOptions):
    """Options of `archive`, whose store has a journal or a history topic.

    Attributes:
        to: Folder of the archive, where Spark can write.
        checkpoint: Folder that records which events were read; default: a folder in the archive.
        every: Continue until interrupted, and read new events at this interval, such as 1m. Default: read the events
            that there are, and end.
        max_rows_per_batch: Most events of one batch.
        fail_on_data_loss: End with an error if events were trimmed before they were read.
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
        to: Destination of rows without one: SINK:ADDRESS, or handler:TYPE.
        mapping: Columns or SQL expressions for the columns of a message, such as
            id=order_id,due_at=remind_at,payload=struct(*); may be repeated. Default: columns with the names of a
            message's columns.
        conflict: insert: keep the first version of an id; newer: keep the highest version.
        min_lead: Reject rows that are due sooner than this.
        past_due: Reject rows whose due time has passed, or store them for delivery now.
        max_payload: Reject rows with a payload of more bytes.
        timezone: Time zone of times without an offset; without it, such rows are rejected.
        rejects: New folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Check and count the rows, and store nothing.
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
    """Options of `cold put`. The default of `min_lead` covers the window of a promotion and the day until the next one.

    Attributes:
        tier: Folder of the tier, anywhere that Spark can read and write; the job creates it.
        store: The store into which the tier is promoted. With it, rows that are due too soon for the tier are stored
            there, and messages that rows replace are ended there. Without it, such rows are rejected.
        namespace: Namespace of the messages in the store.
        to: Destination of rows without one: SINK:ADDRESS, or handler:TYPE.
        mapping: Columns or SQL expressions for the columns of a message, as for `backfill`.
        was_due: Column or SQL expression: the due time of the message that a row replaces, null for a new message.
            With it, the job reads only these days of the tier.
        conflict: insert: keep the first row of an id; newer: keep the highest version.
        min_lead: Rows that are due sooner than this do not go into the tier.
        max_payload: Reject rows with a payload of more bytes.
        timezone: Time zone of times without an offset; without it, such rows are rejected.
        rejects: New folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Check and count the rows, and store nothing.
        now: Current time for the checks, ISO 8601 with an offset; default: the clock of this machine.
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
        tier: Folder of the tier.
        store: The store into which the tier is promoted. With it, promoted messages are cancelled there too.
        namespace: Namespace of the messages in the store.
        timezone: Time zone of times without an offset.
        now: Current time, ISO 8601 with an offset; default: the clock of this machine.
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
        archive: Folder that `archive` writes, on this machine or mounted here.
        before: Merge the days before this day, YYYY-MM-DD; default: today (UTC).
        keep: How long the old files stay, for readers that have begun to read them.
    """

    archive: str
    before: str | None = None
    keep: Duration = "1d"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `engine`.

    Attributes:
        source: Topic of schedules, kafka://host:9092/TOPIC. If the URL has a password, give env:NAME or file:PATH.
        checkpoint: Folder for the offsets and the pending messages, where Spark can write.
        to: Cluster of the target topics, kafka://host:9092; default: the cluster of --in.
        dead: Topic for dead letters; default: TOPIC.dead. The engine creates it if it is missing.
        slot: Length of a slot, and the most that a slot adds to lateness. A checkpoint keeps its value.
        trigger: Interval at which batches begin.
        shards: Number of tasks over which the messages of a slot are spread. A checkpoint keeps its value.
        starting: With a new checkpoint, read all records of the topic, or only new ones.
        max_rows_per_batch: Most records of one batch.
        fail_on_data_loss: End with an error if records were deleted before they were read.
        timeout: How long a task repeats its writes while Kafka does not accept them.
    """

    source: Annotated[str, Flag("in")] = field(repr=False)
    checkpoint: str
    to: Annotated[str | None, Flag("out")] = None
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
        source: URL of the store that messages leave. If the URL has a password, give env:NAME or file:PATH. For
            another scheduler that you have stopped: etf1+kafka://host:9092/schedules or
            fred84+redis://host?prefix=de_.
        target: URL of the store to which messages move.
        cutover: ISO 8601 with an offset. Messages that are due before it stay. After the cut-over, a run moves the
            messages that are left and due later than lead from now.
        work: Folder for this migration alone, where driver and executors can write; it holds payloads.
        namespace: Namespace of the messages in the first store.
        to_namespace: Namespace of the messages in the second store.
        lead: A run refuses to begin if the cut-over is nearer than this.
        margin: Do not move messages that are due within this time.
        passes: Most passes of a run; 0: until a pass finds nothing, or until margin before the cut-over.
        verify: Compare every part of each copy with its original, before the original is removed.
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
    """Options of `promote`; all promotions of a tier go into the same store.

    Attributes:
        tier: Folder of the tier, as for `cold put`.
        window: Move the messages that are due within this time; whole days in UTC, so up to a day more.
        min_lead: Messages with less time left than this when they are moved count as late.
        new_store: Promote into this store from now on. Without it, a store other than the last one is an error.
        dry_run: Count the messages, and move nothing.
        now: Current time, ISO 8601 with an offset; default: the clock of this machine.
    """

    tier: str
    window: Duration = "7d"
    min_lead: Duration = "1d"
    new_store: bool = False
    dry_run: bool = False
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TruthOptions(StoreOptions):
    """The store, and how rows of the truth become messages.

    Attributes:
        mapping: Columns or SQL expressions for the columns of a message, as for `backfill`. Columns that it does not
            give are not compared.
        to: Destination of rows without one: SINK:ADDRESS, or handler:TYPE.
        timezone: Time zone of times without an offset.
    """

    mapping: _Columns = None
    to: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReconcileOptions(TruthOptions):
    """Options of `reconcile`.

    Attributes:
        lane: Compare only the messages of this sink or event type; the truth must then have no others.
        margin: Do not compare messages that are due sooner than this. It must be longer than the read takes.
        now: Current time for the comparison, ISO 8601 with an offset; default: the clock of this machine.
        out: Where to write the differences: parquet:DIR (which `repair` reads), csv:DIR or json:DIR.
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
        kinds: Kinds of difference to repair; may be repeated.
        delete_orphans: Cancel orphans too, at most this many; with more orphans the job does nothing.
        max_fraction: With more differences than this part of the truth's rows, 0 to 1, the job does nothing.
        margin: Do not change messages that are due sooner than this.
        now: Current time for the repair, ISO 8601 with an offset; default: the clock of this machine.
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
        name: Name of this replay; ids become ID-replay-NAME.
        same_ids: Keep the ids; give this instead of a name. Messages that are pending under these ids are replaced.
        mapping: Columns or SQL expressions for the columns of a message, as for `backfill`. Default: columns with the
            names of a message's columns.
        where: Replay only rows that meet this SQL condition, such as "to = 'kafka:orders'".
        events_where: Use only events that meet this SQL condition, such as "event = 'delivered' and day =
            '2026-11-21'".
        shift: now: all messages are due now, and the rate spreads them. +1d or -2h: later or earlier than the original
            due time.
        to: Another destination for all messages: SINK:ADDRESS, or handler:TYPE.
        rejects: New folder for rows that cannot be messages, as Parquet, with the reason of each.
        dry_run: Check and count the rows, and store nothing.
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
        archive: Folder of archived events, anywhere that Spark can read.
        by: Columns by which rows are grouped: lane, and hour or day in UTC; may be repeated.
        start: Count events from this time on; ISO 8601 with an offset.
        end: Count events before this time; ISO 8601 with an offset.
        where: Count only events that meet this SQL condition, such as "lane = 'kafka'".
        parquet: Folder for the rows as Parquet, anywhere that Spark can write.
        csv: File on this machine for the same rows as CSV.
        html: File on this machine for a page with plots.
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
        mapping: Column or SQL expression of the due time, such as due_at=remind_at; other columns of a mapping for
            `backfill` are ignored.
        where: With --from, use only rows that meet this SQL condition, such as "to = 'kafka:orders'".
        timezone: Time zone of times without an offset.
        overdue: Messages that are due before the simulated time wait as a backlog at its start, or are ignored.
        scale: Simulate this many times as many messages, 0.01 to 100.
        slot: Messages that are due in the same slot count as due at its begin, such as 100ms or 1s; must divide an
            hour. Default: 1ms to 10s, by the length of the simulated time.
        out: Folder on this machine for simulate.csv, with a row for each hour and rate, and simulate.html, with plots.
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
        to: Folder of snapshots, where Spark can write. Each run adds a new folder in it.
        table: Copy the messages that are pending or in flight, or the dead letters.
    """

    to: str
    table: Kept = "messages"
