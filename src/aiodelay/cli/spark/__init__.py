"""The commands of `aiodelay spark`, one for each job.

Begin with `common`, which has the options that all jobs share.
"""

from __future__ import annotations

from typing import NamedTuple

from cyclopts import App

from aiodelay.operations.spark_options import (
    ArchiveOptions,
    BackfillOptions,
    ColdCancelOptions,
    ColdPutOptions,
    CompactOptions,
    EngineOptions,
    MigrateOptions,
    PromoteOptions,
    ReconcileOptions,
    RepairOptions,
    ReplayOptions,
    ReportOptions,
    SimulateOptions,
    SnapshotOptions,
)

from .command import Source, command
from .sources import BatchLines, CancelledIds, Copies, CutOver, Differences, DueTimes, Rows, Truth

__all__ = ["JOBS", "spark"]


class Job(NamedTuple):
    """A command: its help text, the options of its job, and the input that the command line adds."""

    help: str
    options: type
    source: type[Source] = Source


JOBS: dict[str, Job] = {
    "archive": Job("Write the events of messages to Parquet, by day, each event once.", ArchiveOptions),
    "backfill": Job("Store the rows of files or of a database as messages.", BackfillOptions, Rows),
    "cold put": Job(
        "Add the rows of files or of a database to a cold tier, until `promote` moves them into a store.\n\n"
        "You can repeat the command: the tier keeps the first version of an id, or with --conflict newer the highest.",
        ColdPutOptions,
        Rows,
    ),
    "cold cancel": Job(
        "Cancel messages in a cold tier, and with --store also in the store if they were promoted.\n\n"
        "You can repeat the command. Without --store, it rejects ids that are not in the tier or were promoted.",
        ColdCancelOptions,
        CancelledIds,
    ),
    "compact": Job("Merge the small files of an archive, for each day that is over.", CompactOptions),
    "engine": Job("Deliver from Kafka to Kafka with Spark alone (experimental).", EngineOptions, BatchLines),
    "migrate": Job(
        "Move messages that are due at a given time or later to another store, while both are in use.",
        MigrateOptions,
        CutOver,
    ),
    "promote": Job("Move messages that become due soon from a cold tier into a store.", PromoteOptions),
    "reconcile": Job(
        "Compare the messages that should be pending (the truth) with the pending messages of a store.",
        ReconcileOptions,
        Truth,
    ),
    "repair": Job("Repair the differences that `reconcile` found, if they still exist.", RepairOptions, Differences),
    "replay": Job("Store messages of a snapshot or of a backfill again, with new due times.", ReplayOptions, Copies),
    "report": Job("Report how late messages were delivered, and which failed, from archived events.", ReportOptions),
    "simulate": Job(
        "Forecast the lateness and the backlog of pending messages, at given dispatch rates.", SimulateOptions, DueTimes
    ),
    "snapshot": Job("Copy the pending messages or the dead letters of a store to Parquet.", SnapshotOptions),
}
"""The commands by name."""

spark: App = App(name="spark", help="Load, check, archive, replay and report with Apache Spark.")
_cold = App(name="cold", help="Keep messages that are due in months or years in files, or cancel them there.")
spark.command(_cold)

for _name, _job in JOBS.items():
    _words = _name.rpartition(" ")  # "cold put" is a command of the group "cold"
    (_cold if _words[0] else spark).command(
        command(_name.replace(" ", "_"), _job.options, _job.source), name=_words[2], help=_job.help
    )
