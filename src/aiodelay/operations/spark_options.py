"""The options of Spark's jobs, each declared once: `aiodelay.spark.jobs` and the commands of `aiodelay spark` read it.

Nothing here imports PySpark, so that `aiodelay spark JOB --help` needs none.
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
    """What the command line knows of an option beside its name, its type and its default.

    Attributes:
        name: What the command line calls the option; None: by the option's own name.
        env: Environment variable that gives the option.
        least: The least value.
        most: The highest value.
        signed: Whether the value may begin with a minus.
        many: Whether several values may follow each other.
    """

    name: str | None = None
    env: str | None = None
    least: float | None = None
    most: float | None = None
    signed: bool = False
    many: bool = False


By: TypeAlias = Literal["lane", "hour", "day"]
"""What a report may have a row for: event type or sink, hour or day in UTC."""
Kept: TypeAlias = Literal["messages", "dead"]
"""What a snapshot keeps."""
Kind: TypeAlias = Literal["missing", "drift"]
"""What a repair mends."""
OnConflict: TypeAlias = Literal["insert", "newer"]
"""Which version of an id stands: the first, or the highest."""
Overdue: TypeAlias = Literal["backlog", "ignore"]
"""What becomes of messages that are due before the simulated time: they are due at its begin, or left out."""
PastDue: TypeAlias = Literal["reject", "now"]
"""What becomes of rows whose time is up."""

_Store: TypeAlias = Annotated[str, Flag(env="AIODELAY_STORE")]
_Namespace: TypeAlias = Annotated[str, Flag(env="AIODELAY_NAMESPACE")]
_Columns: TypeAlias = Annotated[Mapping[str, str] | None, Flag("map")]
_AtLeast1: TypeAlias = Annotated[int, Flag(least=1)]
_Natural: TypeAlias = Annotated[int, Flag(least=0)]


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Which messages a job is about.

    Attributes:
        store: URL of the store, such as redis://host or sqlite:///delay.db; env:NAME or file:PATH if it holds a
            password: what stands in a variable or a file, here and on each executor.
        namespace: Whose messages, in a store that several applications share.
    """

    store: _Store = field(repr=False)  # it may hold a password
    namespace: _Namespace = "default"


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """How fast a job works on a store.

    Attributes:
        rate: Most messages a second, of all tasks together; 0 = no limit.
        concurrency: How many tasks work at once; without it, as many as the session has cores.
    """

    rate: _Natural = 20_000
    concurrency: Annotated[int | None, Flag(least=1)] = None


@dataclass(frozen=True, kw_only=True)
class PaceOptions(RateOptions):
    """How fast a job works on a store, and how patiently.

    Attributes:
        timeout: How long a task asks again while the store does not answer.
    """

    timeout: str = "60s"


@dataclass(frozen=True, kw_only=True)
class WriteOptions(PaceOptions, StoreOptions):
    """Which store a job writes to, how fast, and how patiently."""


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(StoreOptions):
    """Options of `archive`, whose store has a journal or a history.

    Attributes:
        to: The archive's folder, where Spark can write.
        checkpoint: Folder that holds how far was read; without it, one within the archive.
        every: Go on until interrupted, and look so often for more: 1m.
        max_rows_per_batch: How many events are committed at a time.
        fail_on_data_loss: End with an error where events were trimmed before they were read.
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
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        mapping: Where a message's columns come from: id=order_id,due_at=remind_at,payload=struct(*); columns or SQL
            expressions; may be repeated. Without it, columns named as a message's.
        conflict: insert: the first version of an id stands; newer: the one with the highest version.
        min_lead: Reject rows that are due sooner than this.
        past_due: What becomes of rows whose time is up: reject them, or deliver them now.
        max_payload: Most bytes of a payload.
        timezone: Where times without an offset were written down; without it they are rejected.
        rejects: A new folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Count, and store nothing.
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
    """Options of `cold put`. The default of `min_lead` is the window of a promotion, and a day until the next one.

    Attributes:
        tier: The tier's folder, anywhere that Spark can read and write; it is made.
        store: The store that the tier is promoted into; with it rows that are due too soon go there, and what they
            replace is ended there too. Without it they are rejected.
        namespace: Whose messages.
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        mapping: Where a message's columns come from, as of `backfill`.
        was_due: A column or SQL expression: when the message was due that a row replaces, null of new ones; then only
            these days are looked at.
        conflict: insert: the first row of an id stands; newer: the one with the highest version.
        min_lead: Rows due sooner than this do not belong into the tier.
        max_payload: Most bytes of a payload.
        timezone: Where times without an offset were written down; without it they are rejected.
        rejects: A new folder for the rejected rows, as Parquet, with the reason of each.
        dry_run: Count, and keep nothing.
        now: The time by which rows are judged, ISO 8601 with an offset; without it, this machine's.
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
        tier: The tier's folder.
        store: The store that the tier is promoted into.
        namespace: Whose messages.
        timezone: Where times without an offset were written down.
        now: The time, ISO 8601 with an offset; without it, this machine's.
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
        before: Merge days before this one, YYYY-MM-DD; without it, before today (UTC).
        keep: How long old files stay for readers that have begun with them.
    """

    archive: str
    before: str | None = None
    keep: Duration = "1d"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `engine`.

    Attributes:
        source: kafka://host:9092/TOPIC; env:NAME or file:PATH if it holds a password.
        checkpoint: Folder of what was read and of what waits, where Spark can write.
        to: kafka://host:9092, where the topics are that records name; without it, where --in is.
        dead: The topic for dead letters; without it, TOPIC.dead. It is created if it is missing.
        slot: Length of a slot, the most that it adds to lateness; a checkpoint keeps to one.
        trigger: How often a batch begins.
        shards: Over how many tasks the messages of a slot are spread; a checkpoint keeps to one number.
        starting: Where a new checkpoint begins.
        max_rows_per_batch: Most records that are read in a batch.
        fail_on_data_loss: End with an error where records were deleted before they were read.
        timeout: How long to try again while Kafka takes nothing.
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
        source: URL of the store that messages leave; env:NAME or file:PATH if it holds a password. Or
            etf1+kafka://host:9092/schedules or fred84+redis://host?prefix=de_, once that scheduler has been stopped.
        target: Of the store that they move to.
        cutover: ISO 8601 with an offset. What is due before it stays. Once it has passed, what is left is moved as far
            as it is due later than lead from now.
        work: A folder of this migration alone, where driver and executors can write; it holds payloads.
        namespace: Whose messages.
        to_namespace: Whose they become.
        lead: How far ahead the cut-over must be at least for a run to begin.
        margin: Move nothing any more that is due within this.
        passes: How many at most; 0: until one finds nothing, or it is margin before the cut-over.
        verify: Compare each copy with its original, in all their parts, before that is taken out.
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
        tier: The tier's folder, as of `cold put`.
        window: How far ahead of their time messages are moved, at least.
        min_lead: Messages that have less time than this when they are moved are late.
        new_store: Promote into this store from now on; without it, another one than before is refused.
        dry_run: Count, and move nothing.
        now: The time, ISO 8601 with an offset; without it, this machine's.
    """

    tier: str
    window: Duration = "7d"
    min_lead: Duration = "1d"
    new_store: bool = False
    dry_run: bool = False
    now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TruthOptions(StoreOptions):
    """What should be pending in a store.

    Attributes:
        mapping: Where a message's columns come from, as of `backfill`; columns that it does not give are not compared.
        to: The destination of rows that give none: SINK:ADDRESS, or handler:TYPE.
        timezone: Where times without an offset were written down.
    """

    mapping: _Columns = None
    to: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReconcileOptions(TruthOptions):
    """Options of `reconcile`.

    Attributes:
        lane: Only messages of this sink or event type; the truth must then be of it alone.
        margin: Say nothing of what is due sooner than this; longer than reading takes.
        now: The time of the comparison, ISO 8601 with an offset; without it, this machine's.
        out: Where differences are written: parquet:DIR (which `repair` takes), csv:DIR or json:DIR.
        overwrite: Replace what is there already.
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
        kinds: What to mend; may be repeated.
        delete_orphans: Cancel orphans too, at most so many; with more of them nothing is done.
        max_fraction: With more differences than this part of the truth's rows nothing is done, 0 to 1.
        margin: Change nothing that is due sooner than this.
        now: The time of the repair, ISO 8601 with an offset; without it, this machine's.
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
        name: What this replay is called: ids become ID-replay-NAME.
        same_ids: Keep ids instead; what is pending under one of them is replaced.
        mapping: Where a message's columns come from, as for backfill; without it, columns named as a message's.
        where: A condition in SQL on what is read, such as "to = 'kafka:orders'".
        events_where: A condition in SQL on those events, such as "event = 'delivered' and day = '2026-11-21'".
        shift: now: all are due at once, as fast as the rate lets them; or so much later than they were: +1d, -2h.
        to: Another destination of all of them: SINK:ADDRESS, or handler:TYPE.
        rejects: A new folder for rows that cannot be messages, as Parquet, with the reason of each.
        dry_run: Count, and store nothing.
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
        archive: Folder of archived events, wherever Spark can read.
        by: What to have a row for: lane, and hour or day, in UTC; may be repeated.
        start: Count what happened from then on; ISO 8601 with an offset.
        end: Count what happened before then; likewise.
        where: A condition in SQL on the events' columns, such as "lane = 'kafka'".
        parquet: Folder to write the rows to, wherever Spark can write.
        csv: File of this machine for the same rows.
        html: File of this machine for a page with plots.
        overwrite: Replace what is there already.
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
        mapping: Where the due time comes from, as for backfill: due_at=remind_at; the rest does not count.
        where: A condition in SQL on what is read with --from, such as "to = 'kafka:orders'".
        timezone: Where times without an offset were written down.
        overdue: What is due before that time: it is backlog at its begin, or it is ignored.
        scale: As if there were so many times as many messages, 0.01 to 100.
        slot: Messages due within the same slot count as due at its begin: 100ms, 1s; what divides an hour. 1ms to 10s
            without it, by the length of the time.
        out: Folder of this machine for simulate.csv, a row for each hour and rate, and simulate.html, with plots.
        overwrite: Replace what is there already.
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
        to: The folder of snapshots, where Spark can write.
        table: messages, which are pending or in flight, or dead letters.
    """

    to: str
    table: Kept = "messages"
